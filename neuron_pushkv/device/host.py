"""Host memory: what vLLM's CPU backend computes in."""

from __future__ import annotations

from neuron_pushkv.device.base import Memory, MemoryKind, ReadyWord


class HostAccelerator:
    """Plain memory. A forward pass has finished when it returns, so a step is ready at once."""

    name = "cpu"
    needs_flush = False

    def describe(self, address: int, length: int) -> Memory:
        """``address`` and ``length`` in bytes, as given."""
        return Memory(address, length, MemoryKind.HOST)

    def nics(self, memory: Memory) -> tuple[str, ...]:
        """Any NIC will do."""
        return ()

    def mark_step(self) -> ReadyWord | None:
        """Already finished."""
        return None
