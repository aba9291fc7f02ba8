"""Copies between device and host."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from gpu_compat.declarations import ffi
from neuron_pushkv.device.base import Copies
from neuron_pushkv.errors import DeviceError
from tests.engine.sides import until
from tests.fakes.cuda import Open


def copies(*rows: tuple[int, int, int]) -> Copies:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)


def test_copies_go_both_ways_and_no_further(start: Open) -> None:
    accelerator, _ = start()
    device, host = accelerator.allocate(4096), ctypes.create_string_buffer(b"\x07" * 4096, 4096)
    here = ctypes.addressof(host)
    accelerator.write(copies((device.address + 16, here + 32, 100), (device.address + 200, here, 1)))
    assert ctypes.string_at(device.address, 202) == bytes(16) + b"\x07" * 100 + bytes(84) + b"\x07\x00"
    ctypes.memset(device.address, 9, 4096)
    accelerator.read(copies((device.address + 16, here + 32, 100), (device.address + 200, here, 1)))
    assert host.raw[:134] == b"\x09" + b"\x07" * 31 + b"\x09" * 100 + b"\x07" * 2
    accelerator.read(copies())
    accelerator.write(copies())


def test_copies_wait_for_no_work_of_the_model(start: Open) -> None:
    accelerator, cuda = start()
    cuda.launch()
    device, host = accelerator.allocate(64), ctypes.create_string_buffer(b"new", 3)
    accelerator.write(copies((device.address, ctypes.addressof(host), 3)))
    assert ctypes.string_at(device.address, 3) == b"new"
    cuda.finish()


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("way", ["read", "write"])
def test_no_copy_is_left_behind_not_even_by_an_error(start: Open, way: str, wrong: bool) -> None:
    accelerator, cuda = start()
    device, host = accelerator.allocate(64), ctypes.create_string_buffer(64)
    to = device.address if way == "write" else ctypes.addressof(host)
    ctypes.memset(ctypes.addressof(host) if way == "write" else device.address, 5, 64)
    rows = [(device.address, ctypes.addressof(host), 64), (1, 1, 1)]
    stream = getattr(accelerator._copying, "_writing" if way == "write" else "_reading")
    outcome: list[str] = []

    def copy() -> None:
        try:
            getattr(accelerator, way)(copies(*rows[: 1 + wrong]))
        except DeviceError as error:
            outcome.append(str(error))

    cuda.launch(int(ffi.cast("uintptr_t", stream)))  # A device that takes its time.
    thread = threading.Thread(target=copy)
    thread.start()
    until(cuda.c.fake_waiting, "the copy is waited for, without the GIL")
    assert ctypes.string_at(to, 64) == bytes(64)
    cuda.finish(int(ffi.cast("uintptr_t", stream)))
    thread.join(10)
    assert ctypes.string_at(to, 64) == b"\x05" * 64
    assert bool(outcome) is wrong


@pytest.mark.parametrize("way", ["read", "write"])
def test_addresses_that_are_not_the_devices_are_refused(start: Open, way: str) -> None:
    accelerator, cuda = start()
    device, host = accelerator.allocate(2 << 20), ctypes.create_string_buffer(1 << 20)
    here = ctypes.addressof(host)
    for wrong in ((here, here, 8), (device.address + (2 << 20) - 4, here, 8)):
        with pytest.raises(DeviceError, match="Async_v2 failed with CUDA_ERROR_INVALID_VALUE"):
            getattr(accelerator, way)(copies((device.address, here, 8), wrong))
    assert cuda.counts()["depth"] == 0
