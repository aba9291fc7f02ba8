"""The stand-in for libnrt, built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neuron_pushkv.device.neuron.declarations import CDEF

from .build import FOLDER, compile_library

SONAME = "libnrt.so.1"


def declared(folder: Path) -> Path:
    """Our declarations as a header, ``folder/declared.h``; ``folder`` again."""
    (folder / "declared.h").write_text(CDEF)
    return folder


def compile_nrt(folder: Path, *, headers: Path | None = None, defines: Sequence[str] = ()) -> Path:
    """The library in ``folder``, against the public headers in ``headers``, or else our declarations."""
    include = [declared(folder)] if headers is None else [headers]
    names = [*defines, *([] if headers is None else ["PUBLIC_HEADERS"])]
    return compile_library(FOLDER / "libnrt.c", folder / SONAME, soname=SONAME, include=include, defines=names)
