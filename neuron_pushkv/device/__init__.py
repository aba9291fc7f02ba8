"""The accelerator seam and its implementations."""

from __future__ import annotations

from neuron_pushkv.device.base import Accelerator
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import DeviceError


def accelerator_for(device_type: str) -> Accelerator:
    """The accelerator for torch's ``device_type`` ("cpu", ...). Raises :class:`DeviceError` for one we can't serve."""
    if device_type == "cpu":
        return HostAccelerator()
    raise DeviceError(f"KV caches on device '{device_type}' can't be pushed yet; this version serves 'cpu' only")
