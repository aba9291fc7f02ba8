"""Which transport the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Accelerator, Memory, MemoryKind
from neuron_pushkv.transport.base import Transport


def wants_nixl(settings: ConnectorSettings, device: str) -> bool:
    """Whether it is NIXL, for an accelerator of that name.

    ``shm`` says that both sides are on one host, where NIXL moves KV between GPUs directly.
    """
    if settings.transport == "auto":
        return device == "cuda" and settings.provider == "shm"
    return settings.transport == "nixl"


def bounces(settings: ConnectorSettings, memory: Sequence[Memory]) -> bool:
    """Whether KV in ``memory`` goes through the host's, which is then all that the network is shown."""
    return bool(memory) and (settings.bounce == "always" or not all(part.mapped for part in memory))


def open_transport(settings: ConnectorSettings, accelerator: Accelerator, memory: Sequence[Memory]) -> Transport:
    """Open it, for ``memory``, over the cards that are nearest to it, where libfabric offers these.

    Raises :class:`~neuron_pushkv.errors.FabricError` if it is not installed, or can't be used as asked.
    """
    if wants_nixl(settings, accelerator.name):
        from neuron_pushkv.transport.nixl import NixlTransport

        return NixlTransport(settings.nixl_backend)
    from neuron_pushkv.transport.fabric import FabricTransport

    bounced = bounces(settings, memory)
    return FabricTransport(
        settings.provider,
        settings.libfabric,
        settings.host,
        nics=accelerator.nics(memory[0]) if memory and settings.provider.startswith("efa") else (),
        preferred=True,
        flush=accelerator.needs_flush and not bounced,
        core=settings.progress_core,
        device=MemoryKind.HOST if bounced or not memory else memory[0].kind,
        export=accelerator.export,
        hint=accelerator.hint,
    )
