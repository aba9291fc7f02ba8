"""The accelerator seam: what the transfer engine has to know about a device, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class MemoryKind(StrEnum):
    """Where bytes live. Decides the interface that memory is registered with."""

    HOST = "host"
    NEURON = "neuron"
    CUDA = "cuda"


@dataclass(frozen=True)
class Memory:
    """A run of bytes to register: ``address`` is a virtual address, ``length`` in bytes.

    ``ordinal`` is the device's number (-1 for host); ``dmabuf_fd`` an exported handle where there is one.
    """

    address: int
    length: int
    kind: MemoryKind = MemoryKind.HOST
    ordinal: int = -1
    dmabuf_fd: int | None = None


@dataclass(frozen=True)
class ReadyWord:
    """Nothing of a batch is posted until the 32-bit word at ``address`` has reached ``value`` (wrapping compare)."""

    address: int
    value: int


class Accelerator(Protocol):
    """One kind of device. Methods are called from the engine's thread and must not block."""

    name: str
    needs_flush: bool
    """Whether a received write must be flushed before the device may read it."""

    def describe(self, address: int, length: int) -> Memory:
        """Say what memory this is. Raises :class:`~neuron_pushkv.errors.DeviceError` if it can't be registered."""

    def nics(self, memory: Memory) -> tuple[str, ...]:
        """Names of the NICs nearest to ``memory``, best first; empty means that any will do."""

    def mark_step(self) -> ReadyWord | None:
        """A word that will be reached when the work launched so far has finished; ``None`` if it has already."""
