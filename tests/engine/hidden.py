"""A device whose memory nobody can see: there is nothing at its addresses, only the accelerator moves its bytes."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

import numpy as np

from neuron_pushkv.device.base import Copies, Dmabuf, Memory, MemoryKind, ReadyWord
from neuron_pushkv.errors import DeviceError

PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HiddenAccelerator:
    """Each memory has an address of its own, at which there is nothing, and its bytes elsewhere.

    ``on_read`` and ``on_write`` are called before each batch: they may wait, or raise. With ``held`` steps are ready
    only when :meth:`finish_step` is called for them.
    """

    name = "hidden"
    needs_flush = True
    slab_bytes = mmap.PAGESIZE
    hint = ""
    failed = ""

    def __init__(self, *, held: bool = False) -> None:
        self._memories: list[tuple[Memory, int]] = []
        self._word = np.zeros(1, dtype=np.uint32)
        self._marked = 0
        self._held = held
        self.on_read: Callable[[Copies], None] = lambda copies: None
        self.on_write: Callable[[Copies], None] = lambda copies: None
        self.copied = 0
        """Bytes, either way."""

    def hide(self, buffer: ctypes.Array[ctypes.c_char]) -> Memory:
        """Memory whose bytes are in ``buffer``."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, len(buffer), PROT_NONE, flags, -1, 0)
        assert address not in (None, ctypes.c_void_p(-1).value)
        memory = Memory(address, len(buffer), MemoryKind.NEURON, 0, mapped=False)
        self._memories.append((memory, ctypes.addressof(buffer)))
        return memory

    def describe(self, address: int, length: int) -> Memory:
        return next(memory for memory, _ in self._memories if memory.address == address and memory.length == length)

    def allocate(self, length: int) -> Memory:
        raise DeviceError("nothing is allocated here")

    def free(self, memory: Memory) -> None:
        raise DeviceError("nothing is allocated here")

    def export(self, memory: Memory) -> Dmabuf | None:
        raise DeviceError("this memory can't be shown to anybody")

    def nics(self, memory: Memory) -> tuple[str, ...]:
        return ()

    def mark_step(self) -> ReadyWord | None:
        if self.failed:
            raise DeviceError(self.failed)
        self._marked += 1
        if not self._held:
            self.finish_step()
        return ReadyWord(self._word.ctypes.data, self._marked)

    def finish_step(self) -> None:
        """The oldest step that is under way has ended."""
        self._word += np.uint32(1)

    def read(self, copies: Copies) -> None:
        self.on_read(copies)
        for device, host, length in copies.tolist():
            ctypes.memmove(host, self._real(device, length), length)
        self.copied += int(copies[:, 2].sum())

    def write(self, copies: Copies) -> None:
        self.on_write(copies)
        for device, host, length in copies.tolist():
            ctypes.memmove(self._real(device, length), host, length)
        self.copied += int(copies[:, 2].sum())

    def close(self) -> None:
        for memory, _ in self._memories:
            _libc.munmap(memory.address, memory.length)
        self._memories.clear()

    def _real(self, address: int, length: int) -> int:
        for memory, where in self._memories:
            if memory.address <= address and address + length <= memory.address + memory.length:
                return where + address - memory.address
        raise DeviceError(f"{length} bytes at {address:#x} are not of this device")


class Gate:
    """Holds copies back until it is opened; ``reached`` is set when the first one comes."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, copies: Copies) -> None:
        self.reached.set()
        if not self._open.wait(30):
            raise DeviceError("nobody has opened the gate")

    def open(self) -> None:
        self._open.set()
