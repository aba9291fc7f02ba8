"""Opening libfabric and a provider, and saying in one sentence why that can't be done."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from neuron_pushkv.errors import FabricError, ProviderMismatch
from neuron_pushkv.fabric import discovery

LEAST_VERSION = (1, 17)
"""Oldest libfabric whose structs ``ofi.h`` was checked against."""
API_VERSION = (1, 22)
"""Newest API that we ask a library for; later ones answer to it too."""
TX_DEPTH = 256
"""Writes under way per peer. More gains nothing (a round trip is covered) and makes a fence leave more in doubt."""


def native() -> ModuleType:
    """The compiled core. Raises :class:`FabricError` if it was not built."""
    try:
        module = importlib.import_module("neuron_pushkv.fabric._core")
    except ImportError as error:
        raise FabricError(
            f"the native core of neuron_pushkv is not built ({error}); install a C compiler (Debian: gcc libc6-dev), "
            "then install the package again with pip"
        ) from error
    return module


def version_text(version: int) -> str:
    """``version`` is major << 16 | minor."""
    return f"{version >> 16}.{version & 0xFFFF}"


def packed(version: tuple[int, int]) -> int:
    """The other way round."""
    return version[0] << 16 | version[1]


def text_of(ffi: Any, characters: Any) -> str:
    """A C string as text."""
    raw: bytes = ffi.string(characters)
    return raw.decode(errors="replace")


def open_core(module: ModuleType, asked: str, library: Path | None, host: str | None) -> Any:
    """The opened ``pk_core *``, whose owner must close and free it. Raises :class:`FabricError`.

    ``asked`` is "efa", "efa-direct", "tcp" or "shm"; ``library`` and ``host`` as in the settings.
    """
    ffi, lib = module.ffi, module.lib
    # The two protocols over EFA are fabrics of one provider.
    fabric_name = asked if asked in ("efa", "efa-direct") else None
    provider = "efa" if fabric_name else asked
    options = ffi.new("pk_options *")
    keep = [ffi.new("char[]", text.encode()) for text in (provider, fabric_name or "", host or "")]
    options.provider = keep[0]
    options.fabric_name = keep[1] if fabric_name else ffi.NULL
    options.host = keep[2] if host else ffi.NULL
    options.least_version = packed(LEAST_VERSION)
    options.api_version = packed(API_VERSION)
    options.tx_depth = TX_DEPTH
    out = ffi.new("pk_core **")
    tried: list[str] = []
    for path in discovery.candidates(library, provider):
        name = ffi.new("char[]", os.fsencode(path))
        options.library = name
        failure = ffi.new("pk_failure *")
        code = lib.pk_open(options, out, failure)
        if code == lib.PK_OK:
            return out[0]
        text = text_of(ffi, failure.text)
        where = f"libfabric {version_text(failure.version)} at {text_of(ffi, failure.library)}"
        if code == lib.PK_NO_LIBRARY:
            tried.append(f"{path}: {text.removeprefix(path + ': ')}")
        elif code == lib.PK_NOT_LIBFABRIC:
            tried.append(f"{path}: not libfabric: {text}")
        elif code == lib.PK_TOO_OLD:
            tried.append(f"{where}: too old, {version_text(packed(LEAST_VERSION))} or later is needed")
        elif code == lib.PK_NO_PROVIDER:
            raise _not_offered(asked, provider, text, where, host)
        else:
            raise FabricError(f"{where}: provider '{asked}' can't be opened: {text}")
    raise FabricError(f"no usable libfabric ({'; '.join(tried)}); {discovery.HOW_TO_GET_ONE}")


def _not_offered(asked: str, provider: str, offered: str, where: str, host: str | None) -> FabricError:
    if provider not in offered.replace(";", ", ").split(", "):
        return ProviderMismatch(
            f"provider '{asked}' was asked for, but {where} offers here only: {offered or 'nothing'}; set 'provider' "
            "to one of these, or install what that provider needs"
        )
    if host is not None:
        return FabricError(
            f"{where} has provider '{asked}', but not on host '{host}'; set 'host' to an address of this machine"
        )
    return ProviderMismatch(
        f"provider '{asked}' was asked for, but what {where} has of provider '{provider}' can't do that: one-sided "
        "writes with 32-bit immediates and delivery completion; a later libfabric may"
    )
