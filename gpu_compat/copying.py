"""Copies between device and host, on streams of our own: they wait for no work of the model's, nor it for them."""

from __future__ import annotations

from typing import Any

from gpu_compat.context import Context
from gpu_compat.declarations import ffi
from gpu_compat.library import Library
from neuron_pushkv.device.base import Copies


class Copying:
    """One stream for each way. From and into page-locked host memory copies are fastest; any will do."""

    def __init__(self, context: Context) -> None:
        self._context = context
        with context.current() as library:
            self._reading, self._writing = _new_stream(library), _new_stream(library)

    def read(self, copies: Copies) -> None:
        """See :meth:`~neuron_pushkv.device.base.Accelerator.read`."""
        with self._context.current() as library:
            try:
                for device, host, length in copies.tolist():
                    library.call("cuMemcpyDtoHAsync_v2", ffi.cast("void *", host), device, length, self._reading)
            finally:  # Also what was launched before an error uses the caller's memory.
                library.call("cuStreamSynchronize", self._reading)

    def write(self, copies: Copies) -> None:
        """See :meth:`~neuron_pushkv.device.base.Accelerator.write`."""
        with self._context.current() as library:
            try:
                for device, host, length in copies.tolist():
                    library.call("cuMemcpyHtoDAsync_v2", device, ffi.cast("void *", host), length, self._writing)
            finally:
                library.call("cuStreamSynchronize", self._writing)

    def clear(self, address: int, length: int) -> None:
        """Zeroes that memory of the device; returns when it is done."""
        with self._context.current() as library:
            library.call("cuMemsetD8Async", address, 0, length, self._writing)
            library.call("cuStreamSynchronize", self._writing)

    def close(self) -> None:
        """Ends the streams. Once."""
        with self._context.current() as library:
            for stream in (self._reading, self._writing):
                library.status("cuStreamDestroy_v2", stream)


def _new_stream(library: Library) -> Any:
    stream = ffi.new("CUstream *")
    library.call("cuStreamCreate", stream, library.c.CU_STREAM_NON_BLOCKING)
    return stream[0]
