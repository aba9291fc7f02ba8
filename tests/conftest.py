"""What all tests share: tests that need a device this machine has not got are skipped, with the device's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, however slow the machine is. Others: `pytest --hypothesis-profile default`.
settings.load_profile("ci")

DEVICES = {
    "neuron": ("/dev", "neuron*", "a Neuron device (/dev/neuron0)"),
    "efa": ("/sys/bus/pci/drivers/efa", "*:*:*", "an EFA device (one bound to the efa driver)"),
    "gpu": ("/dev", "nvidia[0-9]*", "a CUDA device (/dev/nvidia0)"),
}
"""Marker -> where its device shows, and what to call it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an absent device."""
    absent = {
        marker: pytest.mark.skip(reason=f"needs {name}")
        for marker, (folder, pattern, name) in DEVICES.items()
        if not any(Path(folder).glob(pattern))
    }
    for item in items:
        for marker, skip in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)
