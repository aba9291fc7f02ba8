"""The accelerator seam: what the transfer engine has to know about a device, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

SLAB_ALIGNMENT = 2 << 20
"""Bytes. Cards map memory in pages as large as that where its address and length allow."""

Copies: TypeAlias = NDArray[np.uint64]
"""(n, 3) rows: address in device memory, address in host memory, bytes."""


class MemoryKind(StrEnum):
    """Where bytes live. Decides the interface that memory is registered with."""

    HOST = "host"
    NEURON = "neuron"
    CUDA = "cuda"


@dataclass(frozen=True)
class Memory:
    """A run of bytes: ``address`` is a virtual address, ``length`` in bytes. ``ordinal``: the device's (-1 for host).

    ``mapped`` is false for memory that the network can't be shown: its address is a place in this process that nobody
    can read or write, and only the accelerator moves its bytes.
    """

    address: int
    length: int
    kind: MemoryKind = MemoryKind.HOST
    ordinal: int = -1
    mapped: bool = True


@dataclass(frozen=True)
class Dmabuf:
    """Memory as a file descriptor that a card's driver can map; ``offset``: where in it the memory begins, in bytes."""

    fd: int
    offset: int


@dataclass(frozen=True)
class ReadyWord:
    """Nothing of a batch is posted until the 32-bit word at ``address`` has reached ``value`` (wrapping compare)."""

    address: int
    value: int


class Accelerator(Protocol):
    """One kind of device, for one worker.

    Methods may be called from any thread of the process that made it; ``mark_step`` only from the one that launches the
    work. None but ``read``, ``write`` and ``close`` waits for the device. All raise
    :class:`~neuron_pushkv.errors.DeviceError`.
    """

    name: str
    """As torch names the device type ("cpu", "neuron", "cuda")."""
    needs_flush: bool
    """Whether a received write must be flushed before the device may read it."""
    slab_bytes: int
    """What a slab should have at least, where there is need for as much: larger ones register better up to here."""
    hint: str
    """What is known to be wrong, should memory of this device be refused by the network; for people, or empty."""

    @property
    def failed(self) -> str:
        """Why nothing that the device computes can be had any more, or empty."""

    def describe(self, address: int, length: int) -> Memory:
        """Say what memory this is. Raises if it can't be used for transfers."""

    def allocate(self, length: int) -> Memory:
        """``length`` bytes of new memory of this device, aligned to :data:`SLAB_ALIGNMENT` and zeroed."""

    def free(self, memory: Memory) -> None:
        """Give back what :meth:`allocate` gave. Nothing may be using it any more."""

    def export(self, memory: Memory) -> Dmabuf | None:
        """A new descriptor for that part of what was described or allocated, which the caller closes.

        ``None`` where there is none to be had: then the network tries without. One card can use it, once.
        """

    def nics(self, memory: Memory) -> tuple[str, ...]:
        """Names of the NICs nearest to ``memory``, best first; empty means that any will do."""

    def mark_step(self) -> ReadyWord | None:
        """A word that will be reached when the work launched so far has finished; ``None`` if it has already."""

    def read(self, copies: Copies) -> None:
        """Copy from the device to the host, without the GIL. Returns when all of it is done."""

    def write(self, copies: Copies) -> None:
        """Copy from the host to the device, likewise."""

    def close(self) -> None:
        """Free what was allocated and end what this started. Idempotent."""


@runtime_checkable
class HearsOutputs(Protocol):
    """An accelerator that may know of no other sign that a step has finished than that vLLM has its outputs."""

    def begin_step(self, step: int, ended: int) -> None:
        """Step number ``step`` begins, and vLLM has the outputs of all steps up to ``ended``, of all workers.

        By the thread that launches the work. Numbers grow by one.
        """
