"""Opening libfabric and a provider, and saying in one sentence why that can't be done."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from neuron_pushkv.device.base import MemoryKind
from neuron_pushkv.errors import FabricError, ProviderMismatch
from neuron_pushkv.fabric import discovery

logger = logging.getLogger(__name__)

LEAST_VERSION = (1, 17)
"""Oldest libfabric whose structs ``ofi.h`` was checked against."""
API_VERSION = (1, 22)
"""Newest API that we ask a library for; later ones answer to it too."""
TX_DEPTH = 256
"""Writes under way per peer and rail. More gains nothing (a round trip is covered); a fence leaves more in doubt."""

INTERFACES = {MemoryKind.HOST: 0, MemoryKind.CUDA: 1, MemoryKind.NEURON: 4}
"""libfabric's FI_HMEM_* for each kind of memory (rdma/fi_domain.h)."""

STRIPE = 256 << 10
"""Bytes. Longer writes are split so that all rails have a share of each; shorter ones go over one rail as they are."""


HOW_TO_GET_HMEM = {
    MemoryKind.NEURON: "use the libfabric of AWS's EFA software, and start Neuron's runtime before its first use",
    MemoryKind.CUDA: "use the libfabric of AWS's EFA software, and see that it finds NVIDIA's driver (libcuda.so.1)",
}


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


@dataclass(frozen=True)
class Options:
    """What may be said about how a core is opened; the settings of :class:`FabricTransport` say what each means."""

    library: Path | None = None
    host: str | None = None
    nics: tuple[str, ...] = ()
    preferred: bool = False
    rails: int | None = None
    flush: bool = False
    cpu: int | None = None
    most_registered: int | None = None
    device: MemoryKind = MemoryKind.HOST
    hint: str = ""


def open_core(module: ModuleType, asked: str, opening: Options) -> Any:
    """The opened ``pk_core *``, whose owner must close and free it. Raises :class:`FabricError`.

    ``asked`` is "efa", "efa-direct", "tcp" or "shm".
    """
    ffi, lib = module.ffi, module.lib
    if opening.rails is not None and not 1 <= opening.rails <= lib.PK_MOST_RAILS:
        raise FabricError(f"{opening.rails} rails can't be opened; there can be 1 to {lib.PK_MOST_RAILS}")
    # The two protocols over EFA are fabrics of one provider.
    fabric_name = asked if asked in ("efa", "efa-direct") else None
    provider = "efa" if fabric_name else asked
    options = ffi.new("pk_options *")
    texts = (provider, fabric_name, opening.host, ",".join(opening.nics) or None)
    keep = [ffi.NULL if text is None else ffi.new("char[]", text.encode()) for text in texts]
    options.provider, options.fabric_name, options.host, options.nics = keep
    options.least_version = packed(LEAST_VERSION)
    options.api_version = packed(API_VERSION)
    options.tx_depth = TX_DEPTH
    # All the cards that there are make sense with EFA; elsewhere several would be several ways through one.
    options.rails = opening.rails or (0 if fabric_name or opening.nics else 1)
    options.stripe = STRIPE
    options.interface = INTERFACES[opening.device]
    options.flush = opening.flush
    options.most_registered = opening.most_registered or 0
    options.cpu = -1 if opening.cpu is None else opening.cpu
    out = ffi.new("pk_core **")
    tried: list[str] = []
    for path in discovery.candidates(opening.library, provider):
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
            raise _not_offered(asked, provider, text, where, opening.host)
        elif code == lib.PK_NO_HMEM:
            raise FabricError(
                f"{where} has provider '{asked}', but not for {opening.device} memory (not offered with FI_HMEM); "
                f"{opening.hint or HOW_TO_GET_HMEM[opening.device]}"
            )
        elif code == lib.PK_NO_NIC and opening.preferred:
            return open_core(module, asked, _with_offered(opening, text, where))
        elif code == lib.PK_NO_NIC:
            raise FabricError(
                f"network cards {', '.join(opening.nics)} were asked for, but with provider '{asked}' {where} has here "
                f"only: {text}"
            )
        elif code == lib.PK_NO_CPU:
            raise FabricError(
                f"the progress thread can't run on core {opening.cpu}: this machine has {cores()}, of which this "
                "process may be allowed fewer; set 'progress_core' to one of those, or leave it unset"
            )
        else:
            advice = f"; {opening.hint}" if opening.hint else ""
            raise FabricError(f"{where}: provider '{asked}' can't be opened: {text}{advice}")
    raise FabricError(f"no usable libfabric ({'; '.join(tried)}); {discovery.HOW_TO_GET_ONE}")


def cores() -> str:
    """This machine's, as the kernel lists them, for people: "cores 0-15"."""
    online = Path("/sys/devices/system/cpu/online")
    return f"cores {online.read_text().strip()}" if online.is_file() else f"{os.cpu_count()} cores"


def _with_offered(opening: Options, offered: str, where: str) -> Options:
    """To open it again: with those of the preferred cards that are among ``offered``, else with any."""
    domains = offered.split(", ")
    # As library.c: EFA's domains are a card's name and, after a dash, the endpoints' type.
    left = tuple(name for name in opening.nics if any(f"{domain}-".startswith(f"{name}-") for domain in domains))
    logger.warning(
        "the network cards nearest to the device are %s, but %s has here only: %s; KV goes over %s. Unset "
        "FI_EFA_IFACE, or attach all of the instance's EFA cards",
        ", ".join(opening.nics),
        where,
        offered,
        ", ".join(left) or "these",
    )
    return replace(opening, nics=left, preferred=False)


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
