"""Device memory of our own."""

from __future__ import annotations

import threading

from gpu_compat.context import Context
from gpu_compat.copying import Copying
from gpu_compat.declarations import ffi
from gpu_compat.library import Library
from gpu_compat.memory import DeviceMemory
from gpu_compat.status import SUCCESS, error_for
from neuron_pushkv.device.base import SLAB_ALIGNMENT, Memory, MemoryKind
from neuron_pushkv.errors import DeviceError


class Slabs:
    """Allocated with ``cuMemAlloc``, in multiples of :data:`SLAB_ALIGNMENT`: the driver's own large pages."""

    def __init__(self, context: Context, memory: DeviceMemory, copying: Copying) -> None:
        self._context = context
        self._memory = memory
        self._copying = copying
        self._bases: dict[int, int] = {}
        """Address of a slab -> address of its allocation."""
        self._lock = threading.Lock()

    def allocate(self, length: int) -> Memory:
        """See :meth:`~neuron_pushkv.device.base.Accelerator.allocate`."""
        if length <= 0:
            raise DeviceError(f"a slab of {length} bytes can't be allocated; ask for one byte or more")
        size = -(-length // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
        with self._context.current() as library:
            base = self._new(library, size)
            if base % SLAB_ALIGNMENT:  # As a rule the driver aligns what is as large; nothing says that it must.
                library.call("cuMemFree_v2", base)
                base = self._new(library, size + SLAB_ALIGNMENT)
            address = -(-base // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
            with self._lock:
                self._bases[address] = base
            slab = Memory(address, length, MemoryKind.CUDA, self._context.index, self._memory.shown)
            try:
                self._copying.clear(address, size)
                if slab.mapped:
                    self._memory.synchronise(library, address)
            except DeviceError:
                self.free(slab)
                raise
        return slab

    def _new(self, library: Library, size: int) -> int:
        found = ffi.new("CUdeviceptr *")
        status = library.status("cuMemAlloc_v2", found, size)
        if status != SUCCESS:
            raise DeviceError(f"{size} bytes of CUDA memory are not to be had: {error_for(status, 'cuMemAlloc_v2')}")
        return int(found[0])

    def free(self, memory: Memory) -> None:
        """See :meth:`~neuron_pushkv.device.base.Accelerator.free`."""
        with self._lock:
            base = self._bases.pop(memory.address, None)
        if base is None:
            raise DeviceError(f"the memory at {memory.address:#x} was not allocated here; free each slab once")
        with self._context.current() as library:
            library.call("cuMemFree_v2", base)

    def close(self) -> None:
        """Frees all slabs, as far as the driver still can."""
        with self._lock:
            bases, self._bases = list(self._bases.values()), {}
        if bases:
            with self._context.current() as library:
                for base in bases:
                    library.status("cuMemFree_v2", base)
