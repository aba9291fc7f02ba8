"""One device and its primary context: the one that torch and the CUDA runtime use too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_compat.declarations import ffi
from gpu_compat.library import Library
from gpu_compat.status import INVALID_VALUE, SUCCESS, error_for
from neuron_pushkv.errors import DeviceError

_NAME_BYTES, _BUS_ID_BYTES = 256, 32


class Context:
    """Device ``index`` among those that the process sees. Raises :class:`DeviceError` where there is none."""

    def __init__(self, library: Library, index: int) -> None:
        self.library = library
        self.index = index
        count = self.number("cuDeviceGetCount")
        if index >= count:
            raise DeviceError(f"there is no CUDA device {index}, only {count}; look at CUDA_VISIBLE_DEVICES")
        self.device = self.number("cuDeviceGet", index)
        context = ffi.new("CUcontext *")
        library.call("cuDevicePrimaryCtxRetain", context, self.device)
        self._context: Any = context[0]

    @contextmanager
    def current(self) -> Iterator[Library]:
        """The library, for calls that need the calling thread to have a context; nothing stays behind."""
        self.library.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield self.library
        finally:
            self.library.status("cuCtxPopCurrent_v2", ffi.new("CUcontext *"))

    def number(self, function: str, *arguments: Any) -> int:
        """What a function answers through its first argument, an ``int *``."""
        found = ffi.new("int *")
        self.library.call(function, found, *arguments)
        return int(found[0])

    def attribute(self, name: str) -> int:
        """An attribute of the device, named without its prefix; 0 where the driver is too old to know it."""
        found = ffi.new("int *")
        number = getattr(self.library.c, f"CU_DEVICE_ATTRIBUTE_{name}")
        status = self.library.status("cuDeviceGetAttribute", found, number, self.device)
        if status not in (SUCCESS, INVALID_VALUE):
            raise error_for(status, "cuDeviceGetAttribute")
        return int(found[0])

    def name(self) -> str:
        """For people ("NVIDIA H200")."""
        return self._text("cuDeviceGetName", _NAME_BYTES)

    def bus_id(self) -> str:
        """Where the device is on the PCI bus ("0000:3b:00.0")."""
        return self._text("cuDeviceGetPCIBusId", _BUS_ID_BYTES).lower()

    def _text(self, function: str, most: int) -> str:
        text = ffi.new("char[]", most)
        self.library.call(function, text, most, self.device)
        return bytes(ffi.string(text)).decode()

    def close(self) -> None:
        """Lets go of the context, which goes on living where others use it. Once."""
        self.library.status("cuDevicePrimaryCtxRelease_v2", self.device)
