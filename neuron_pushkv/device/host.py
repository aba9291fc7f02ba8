"""Host memory: what vLLM's CPU backend computes in."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from neuron_pushkv.device.base import SLAB_ALIGNMENT, Copies, Dmabuf, Memory, MemoryKind, ReadyWord
from neuron_pushkv.errors import DeviceError


class HostAccelerator:
    """Plain memory. A forward pass has finished when it returns, so a step is ready at once."""

    name = "cpu"
    needs_flush = False
    slab_bytes = SLAB_ALIGNMENT
    hint = ""
    failed = ""

    def __init__(self) -> None:
        self._slabs: dict[int, mmap.mmap] = {}

    def describe(self, address: int, length: int) -> Memory:
        """``address`` and ``length`` in bytes, as given."""
        return Memory(address, length, MemoryKind.HOST)

    def allocate(self, length: int) -> Memory:
        """Zeroed pages, large ones where the kernel has them."""
        try:
            slab = mmap.mmap(-1, length + SLAB_ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise DeviceError(f"{length} bytes of host memory are not to be had ({error}); ask for less") from error
        with suppress(OSError):  # A kernel without large pages.
            slab.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(slab))
        address = -(-start // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
        self._slabs[address] = slab
        return Memory(address, length, MemoryKind.HOST)

    def free(self, memory: Memory) -> None:
        """Unmaps it."""
        if self._slabs.pop(memory.address, None) is None:
            raise DeviceError(f"the memory at {memory.address:#x} was not allocated here; free each slab once")

    def export(self, memory: Memory) -> Dmabuf | None:
        """Cards map host memory as it is."""
        return None

    def nics(self, memory: Memory) -> tuple[str, ...]:
        """Any NIC will do."""
        return ()

    def mark_step(self) -> ReadyWord | None:
        """Already finished."""
        return None

    def read(self, copies: Copies) -> None:
        """Copies within the host's memory."""
        for device, host, length in copies.tolist():
            ctypes.memmove(host, device, length)

    def write(self, copies: Copies) -> None:
        """The other way."""
        for device, host, length in copies.tolist():
            ctypes.memmove(device, host, length)

    def close(self) -> None:
        """Forgets all slabs."""
        self._slabs.clear()
