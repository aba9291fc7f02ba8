"""What memory of a device is: where it lies, whether the network can be shown it, and its descriptors.

Three ways of allocating are to be told apart. ``cuMemAlloc`` (torch's allocator as it is by default) gives whole
allocations. A range that is reserved and mapped by one handle (vLLM's allocator for its sleep mode) is as good. A range
that is mapped piece by piece (torch's expandable segments) is refused: it is no one thing that a card could map, and
torch changes its pieces while it runs.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from gpu_compat.context import Context
from gpu_compat.declarations import ffi
from gpu_compat.library import Library
from gpu_compat.status import INVALID_VALUE, NOT_SUPPORTED, SUCCESS, error_for
from neuron_pushkv.device.base import Dmabuf, Memory, MemoryKind
from neuron_pushkv.errors import DeviceError

_PAGE = os.sysconf("SC_PAGE_SIZE")

logger = logging.getLogger(__name__)


class DeviceMemory:
    """Looks at addresses of one device."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.dmabuf = bool(context.attribute("DMA_BUF_SUPPORTED")) and context.library.has(
            "cuMemGetHandleForAddressRange"
        )
        self.shown = self.dmabuf or bool(context.attribute("GPU_DIRECT_RDMA_SUPPORTED"))
        """Whether other devices can reach this one's memory at all."""

    def describe(self, address: int, length: int) -> Memory:
        """See :meth:`~neuron_pushkv.device.base.Accelerator.describe`. May wait for copies to that memory."""
        if length <= 0:
            raise DeviceError(f"{length} bytes at {address:#x} are no memory to push from or into")
        with self._context.current() as library:
            self._check_kind(library, address)
            mapped = self._check_range(library, address, length) and self.shown
            if mapped:
                self.synchronise(library, address)
            else:
                logger.warning(
                    "%d bytes of CUDA memory at %#x are out of network cards' reach (%s) and have to be copied through "
                    "host memory",
                    length,
                    address,
                    "allocated without GPUDirect RDMA" if self.shown else "no dmabufs and no GPUDirect RDMA here",
                )
        return Memory(address, length, MemoryKind.CUDA, self._context.index, mapped)

    def _check_kind(self, library: Library, address: int) -> None:
        kind = _attribute(library, "MEMORY_TYPE", "unsigned int *", address)
        if kind is None:
            raise DeviceError(
                f"the memory at {address:#x} is unknown to CUDA; KV caches on device 'cuda' must be CUDA's own memory"
            )
        if _attribute(library, "IS_MANAGED", "unsigned int *", address):
            raise DeviceError(
                f"the memory at {address:#x} is managed by CUDA, which moves it between host and device, so that no "
                f"card can be shown where it is; allocate KV caches with torch's own allocator"
            )
        if kind != library.c.CU_MEMORYTYPE_DEVICE:
            raise DeviceError(
                f"the memory at {address:#x} is the host's, not a CUDA device's; KV caches on the CPU have device 'cpu'"
            )
        ordinal = _attribute(library, "DEVICE_ORDINAL", "int *", address)
        if ordinal != self._context.index:
            raise DeviceError(
                f"the memory at {address:#x} is on CUDA device {ordinal}, and this accelerator is for device "
                f"{self._context.index}; a worker's KV caches must be on one device"
            )

    def _check_range(self, library: Library, address: int, length: int) -> bool:
        """Whether cards may map it, as far as its allocation goes. Raises where it isn't in one piece."""
        base, size = ffi.new("CUdeviceptr *"), ffi.new("size_t *")
        library.call("cuMemGetAddressRange_v2", base, size, address)
        inside = base[0] <= address and address + length <= base[0] + size[0]
        virtual = _is_virtual(library, address)
        if virtual and (not inside or _attribute(library, "RANGE_SIZE", "size_t *", address) != size[0]):
            raise DeviceError(
                f"the memory at {address:#x} is mapped piece by piece, as torch's expandable segments are, and no card "
                f"can be shown that; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False (newer torch: "
                f"PYTORCH_ALLOC_CONF)"
            )
        if not inside:
            raise DeviceError(
                f"{length} bytes at {address:#x} are more than their allocation has: {size[0]} bytes at {base[0]:#x}"
            )
        return not virtual or _attribute(library, "IS_GPU_DIRECT_RDMA_CAPABLE", "int *", address) != 0

    def synchronise(self, library: Library, address: int) -> None:
        """Let no synchronous operation return before it has reached that memory: what cards read must be there.

        Best effort for memory that is mapped by handles, whose drivers don't all know of it.
        """
        value = ffi.new("unsigned int *", 1)
        number = library.c.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        status = library.status("cuPointerSetAttribute", value, number, address)
        if status in (INVALID_VALUE, NOT_SUPPORTED):
            logger.debug("memory at %#x has no SYNC_MEMOPS: %s", address, error_for(status, "cuPointerSetAttribute"))
        elif status != SUCCESS:
            raise error_for(status, "cuPointerSetAttribute")

    def export(self, memory: Memory) -> Dmabuf | None:
        """See :meth:`~neuron_pushkv.device.base.Accelerator.export`. Descriptors begin and end with pages."""
        if not self.dmabuf or not memory.mapped:
            return None
        start = memory.address // _PAGE * _PAGE
        length = -(-(memory.address + memory.length) // _PAGE) * _PAGE - start
        fd = ffi.new("int *", -1)
        with self._context.current() as library:
            kind = library.c.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            # Where CPU and device share a coherent link, only what is mapped over PCIe is within a card's reach.
            pcie = library.c.CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
            for flags in (pcie, 0):
                status = library.status("cuMemGetHandleForAddressRange", fd, start, length, kind, flags)
                if status not in (INVALID_VALUE, NOT_SUPPORTED):
                    break
        if status == NOT_SUPPORTED:
            return None
        if status != SUCCESS:
            raise error_for(status, "cuMemGetHandleForAddressRange")
        return Dmabuf(int(fd[0]), memory.address - start)


def _attribute(library: Library, name: str, kind: str, address: int) -> int | None:
    """An attribute of that address; ``None`` where CUDA doesn't know the address, or not the attribute."""
    found: Any = ffi.new(kind)
    number = getattr(library.c, f"CU_POINTER_ATTRIBUTE_{name}")
    status = library.status("cuPointerGetAttribute", found, number, address)
    if status == INVALID_VALUE:
        return None
    if status != SUCCESS:
        raise error_for(status, "cuPointerGetAttribute")
    return int(found[0])


def _is_virtual(library: Library, address: int) -> bool:
    """Whether it is mapped by handles (``cuMemMap``). No other memory has one to retain."""
    if not library.has("cuMemRetainAllocationHandle") or not library.has("cuMemRelease"):
        return False
    handle = ffi.new("CUmemGenericAllocationHandle *")
    if library.status("cuMemRetainAllocationHandle", handle, ffi.cast("void *", address)) != SUCCESS:
        return False
    library.call("cuMemRelease", handle[0])
    return True
