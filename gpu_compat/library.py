"""Loads libcuda, the CUDA driver's library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpu_compat.declarations import REQUIRED, ffi
from gpu_compat.status import FORKED, NOT_INITIALIZED, SUCCESS, error_for
from neuron_pushkv.errors import DeviceError

SONAME = "libcuda.so.1"
"""Comes with the driver, not with the toolkit. One that this process has loaded already is the one that is taken."""


class Library:
    """libcuda, loaded and initialised; ``setting`` is its file, if not what the loader finds.

    ``c`` has its functions and constants; functions that may be missing are asked for with :meth:`has`. Raises
    :class:`DeviceError` where there is no driver, and where it has no device.
    """

    def __init__(self, setting: Path | None = None) -> None:
        name = str(setting or SONAME)
        try:
            # Never unloaded: others in this process, and the device, may be using it.
            self.c: Any = ffi.dlopen(name, ffi.RTLD_NOW | ffi.RTLD_NODELETE)
        except OSError as error:
            raise DeviceError(
                f"the CUDA driver can't be loaded ({error}); install NVIDIA's driver, or give the container its "
                f"devices (--gpus)"
            ) from error
        missing = [function for function in REQUIRED if not self.has(function)]
        if missing:
            raise DeviceError(f"{name} has no {missing[0]}; install NVIDIA's driver 450 or later")
        self._process = os.getpid()
        status = self.status("cuInit", 0)
        if status == NOT_INITIALIZED:  # What cuInit itself says in a forked child.
            raise DeviceError(f"cuInit: {FORKED}")
        if status != SUCCESS:
            raise error_for(status, "cuInit")

    def has(self, function: str) -> bool:
        """Whether this driver has that function."""
        return hasattr(self.c, function)

    def status(self, function: str, *arguments: Any) -> int:
        """Call it, without the GIL, and return its status. Raises on the wrong side of a fork."""
        if os.getpid() != self._process:
            raise DeviceError(f"{function}: {FORKED}")
        return int(getattr(self.c, function)(*arguments))

    def call(self, function: str, *arguments: Any) -> None:
        """Call it. Raises the :class:`DeviceError` that its status stands for."""
        status = self.status(function, *arguments)
        if status != SUCCESS:
            raise error_for(status, function)
