"""Host memory behind the accelerator seam."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from neuron_pushkv.device import accelerator_for
from neuron_pushkv.device.base import SLAB_ALIGNMENT
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import DeviceError


def test_slabs_are_aligned_zeroed_and_freed_once() -> None:
    accelerator = HostAccelerator()
    slab = accelerator.allocate(3 * 4096)
    assert slab.address % SLAB_ALIGNMENT == 0
    assert ctypes.string_at(slab.address, slab.length) == bytes(slab.length)
    accelerator.free(slab)
    with pytest.raises(DeviceError, match="free each slab once"):
        accelerator.free(slab)


def test_more_than_there_is_says_so() -> None:
    with pytest.raises(DeviceError, match="are not to be had"):
        HostAccelerator().allocate(1 << 60)


def test_copies_go_both_ways() -> None:
    accelerator = HostAccelerator()
    device, host = accelerator.allocate(4096), (ctypes.c_ubyte * 4096)(*([7] * 4096))
    copies = np.array([(device.address + 16, ctypes.addressof(host) + 32, 100)], dtype=np.uint64)
    accelerator.write(copies)
    assert ctypes.string_at(device.address, 128) == bytes(16) + b"\x07" * 100 + bytes(12)
    ctypes.memset(device.address, 9, 4096)
    accelerator.read(copies)
    assert bytes(host[30:134]) == b"\x07" * 2 + b"\x09" * 100 + b"\x07" * 2


def test_a_device_that_nobody_serves_is_named() -> None:
    with pytest.raises(DeviceError, match=r"device 'tpu' can't be pushed; devices that can: .*cpu"):
        accelerator_for("tpu")
