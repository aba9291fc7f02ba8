"""Finds and loads libnrt, the Neuron runtime's library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from neuron_pushkv.device.neuron import maps
from neuron_pushkv.device.neuron.declarations import REQUIRED, ffi
from neuron_pushkv.device.neuron.status import FAILURE, FORKED, SUCCESS, error_for
from neuron_pushkv.errors import DeviceError, NeuronError

NAME, SONAME = "libnrt", "libnrt.so.1"
INSTALLED = Path("/opt/aws/neuron/lib")
"""Where the package aws-neuronx-runtime-lib puts it; as a rule the loader doesn't look there."""


def find(setting: Path | None = None) -> str:
    """What to load: ``setting`` (a file, or its folder), else the one that this process has, the installed one, or
    whatever the loader finds.

    Two copies in one process would be two runtimes that fight for the cores. Raises :class:`DeviceError` for a setting
    that is no file, or another one than is loaded.
    """
    present = maps.loaded(NAME)
    if setting is not None:
        chosen = setting / SONAME if setting.is_dir() else setting
        if not chosen.is_file():
            raise DeviceError(f"there is no libnrt at {chosen}; name the file {SONAME} of the Neuron runtime")
        if present is not None and not chosen.samefile(present):
            raise DeviceError(f"this process has loaded {present} already and can't use a second runtime, {chosen}")
        return str(chosen)
    if present is not None:
        return str(present)
    installed = INSTALLED / SONAME
    return str(installed) if installed.is_file() else SONAME


class Library:
    """libnrt, loaded. ``c`` has its functions; those that may be missing are asked for with :meth:`has`."""

    def __init__(self, setting: Path | None = None) -> None:
        name = find(setting)
        try:
            self.c: Any = ffi.dlopen(name)
        except OSError as error:
            raise DeviceError(
                f"the Neuron runtime can't be loaded ({error}); install aws-neuronx-runtime-lib, which puts {SONAME} "
                f"into {INSTALLED}"
            ) from error
        missing = [name for name in REQUIRED if not self.has(name)]
        if missing:
            raise DeviceError(f"{name} has no {missing[0]}; install a Neuron runtime of 2025 or later")
        self.path = maps.loaded(NAME) or Path(name)
        self._process = os.getpid()

    def has(self, function: str) -> bool:
        """Whether this runtime has that function."""
        return hasattr(self.c, function)

    def status(self, function: str, *arguments: Any) -> int:
        """Call it, without the GIL, and return its status. Raises :class:`NeuronError` on the wrong side of a fork."""
        if os.getpid() != self._process:
            raise NeuronError(FAILURE, FORKED)
        return int(getattr(self.c, function)(*arguments))

    def call(self, function: str, *arguments: Any) -> None:
        """Call it. Raises the :class:`NeuronError` that its status stands for."""
        status = self.status(function, *arguments)
        if status != SUCCESS:
            raise error_for(status, function)
