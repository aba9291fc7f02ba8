"""Compiles the stand-ins."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


def compile_library(
    source: Path, out: Path, *, soname: str, include: Sequence[Path] = (), defines: Sequence[str] = ()
) -> Path:
    """``source`` as the shared library ``out``, called ``soname``; ``out`` again.

    ``include`` are folders with headers, ``defines`` are names to define ("NAME" or "NAME=value"). A warning is an
    error: raises AssertionError with what the compiler says.
    """
    command = [
        *(os.environ.get("CC", "cc"), "-std=c11", "-O1", "-g", "-fPIC", "-shared", f"-Wl,-soname,{soname}"),
        *("-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"),
        *(f"-I{folder}" for folder in (FOLDER, *include)),
        *(f"-D{name}" for name in defines),
        *(str(source), "-o", str(out), "-lpthread"),
    ]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr
    return out
