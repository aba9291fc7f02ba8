"""What the tests and the measurement do with a real device beside the accelerator, through libcuda itself."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

from gpu_compat.declarations import TYPES
from gpu_compat.library import SONAME
from neuron_pushkv.device.base import Copies, ReadyWord

ffi: Any = FFI()
ffi.cdef(
    TYPES
    + """
enum { CU_STREAM_WAIT_VALUE_GEQ = 0 };
CUresult cuInit(unsigned int Flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev);
CUresult cuCtxSetCurrent(CUcontext ctx);
CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags);
CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags);
CUresult cuStreamSynchronize(CUstream hStream);
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, uint32_t value, unsigned int flags);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream);
"""
)


class Hardware:
    """Device 0, with its primary context current in the thread that makes this."""

    def __init__(self) -> None:
        self.c: Any = ffi.dlopen(SONAME)
        self.call("cuInit", 0)
        context = ffi.new("CUcontext *")
        self.call("cuDevicePrimaryCtxRetain", context, 0)
        self.call("cuCtxSetCurrent", context[0])
        found = ffi.new("CUstream *")
        self.call("cuStreamCreate", found, self.c.CU_STREAM_NON_BLOCKING)
        self._stream = found[0]
        self.stream = int(ffi.cast("uintptr_t", found[0]))
        """A stream of ours."""
        self._gate = self.pinned(4).view(np.uint32)
        self._passed = 0

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.c, function)(*arguments)
        assert status == 0, f"{function}: {status}"

    def pinned(self, length: int) -> NDArray[np.uint8]:
        """Zeroed, page-locked host memory that stays until the end of the process."""
        place = ffi.new("void **")
        self.call("cuMemHostAlloc", place, length, self.c.CU_MEMHOSTALLOC_PORTABLE | self.c.CU_MEMHOSTALLOC_DEVICEMAP)
        content = np.frombuffer(ffi.buffer(place[0], length), dtype=np.uint8)
        content[:] = 0
        return content

    def block(self) -> None:
        """What is launched on the stream from now on waits for :meth:`release`."""
        self._passed += 1
        address = self._gate.ctypes.data
        self.call("cuStreamWaitValue32_v2", self._stream, address, self._passed, self.c.CU_STREAM_WAIT_VALUE_GEQ)

    def release(self) -> None:
        self._gate[0] = self._passed

    def copy_within(self, to: int, source: int, length: int) -> None:
        """From device memory to device memory; returns when it is done."""
        self.call("cuMemcpyDtoDAsync_v2", to, source, length, self._stream)
        self.call("cuStreamSynchronize", self._stream)


def reached(word: ReadyWord) -> bool:
    """As the transports look at it."""
    return (ctypes.c_uint32.from_address(word.address).value - word.value) % (1 << 32) < 1 << 31


def until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Wait for a condition, and look without pause; but not at the cost of this process's other threads."""
    end = time.monotonic() + seconds
    while not condition():
        time.sleep(0)
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"


def copies(*rows: tuple[int, int, int]) -> Copies:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)
