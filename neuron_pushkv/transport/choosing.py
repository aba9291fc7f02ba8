"""Which transport the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Accelerator, Memory, MemoryKind
from neuron_pushkv.transport.base import Transport


def wants_nixl(settings: ConnectorSettings, accelerator: Accelerator) -> bool:
    """Whether it is NIXL. ``shm`` says that both sides are on one host, where NIXL moves KV between GPUs directly."""
    if settings.transport == "auto":
        return accelerator.name == "cuda" and settings.provider == "shm"
    return settings.transport == "nixl"


def open_transport(settings: ConnectorSettings, accelerator: Accelerator, memory: Sequence[Memory]) -> Transport:
    """Open it, for ``memory``, over the cards that are nearest to it.

    Raises :class:`~neuron_pushkv.errors.FabricError` if it is not installed, or can't be used as asked.
    """
    if wants_nixl(settings, accelerator):
        from neuron_pushkv.transport.nixl import NixlTransport

        return NixlTransport(settings.nixl_backend)
    from neuron_pushkv.transport.fabric import FabricTransport

    # Memory without a mapping is copied through the host's, and then only that is the network's to see.
    device = next((part.kind for part in memory if part.mapped), MemoryKind.HOST)
    return FabricTransport(
        settings.provider,
        settings.libfabric,
        settings.host,
        nics=accelerator.nics(memory[0]) if memory and settings.provider.startswith("efa") else (),
        flush=accelerator.needs_flush,
        core=settings.progress_core,
        device=device,
        export=accelerator.export,
        hint=accelerator.hint,
    )
