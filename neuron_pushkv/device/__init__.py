"""The accelerator seam and its implementations."""

from __future__ import annotations

from importlib.metadata import entry_points

from neuron_pushkv.device.base import Accelerator
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import DeviceError

ENTRY_POINTS = "neuron_pushkv.accelerators"
"""Group of entry points whose names are torch's device types, each a callable: device's number -> its accelerator."""


def accelerator_for(device_type: str, index: int = -1) -> Accelerator:
    """The accelerator for torch's ``device_type`` ("cpu", ...), on the device of that ``index``.

    Raises :class:`DeviceError` for a device that nobody serves, or that can't be used.
    """
    if device_type == "cpu":
        return HostAccelerator()
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if device_type not in found:
        known = ", ".join(sorted({"cpu", *found}))
        raise DeviceError(f"KV caches on device '{device_type}' can't be pushed; devices that can: {known}")
    accelerator: Accelerator = found[device_type].load()(index)
    return accelerator
