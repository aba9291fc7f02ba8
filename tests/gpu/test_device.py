"""The CUDA accelerator on a real device. None of this has run yet: no device was at hand when it was written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_compat.accelerator
from gpu_compat import CudaAccelerator
from gpu_compat.context import Context
from gpu_compat.library import Library
from gpu_compat.steps import EventWords, Marker, StreamWords
from neuron_pushkv.device.base import SLAB_ALIGNMENT, MemoryKind
from neuron_pushkv.errors import DeviceError
from tests.gpu.hardware import Hardware, copies, reached, until

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
    return module


def content(accelerator: CudaAccelerator, address: int, length: int) -> bytes:
    host = np.empty(length, dtype=np.uint8)
    accelerator.read(copies((address, host.ctypes.data, length)))
    return host.tobytes()


def test_the_facts_make_sense(accelerator: CudaAccelerator) -> None:
    facts = accelerator.facts()
    assert facts.device
    assert Path("/sys/bus/pci/devices", facts.bus_id).exists() or len(facts.bus_id) == len("0000:00:00.0")
    assert facts.capability >= (7, 0)
    assert facts.stream_writes, "stream writes work on Linux from driver 515 on"
    assert facts.needs_flush is False or facts.capability < (9, 0)


def test_slabs_are_aligned_zeroed_and_described(accelerator: CudaAccelerator) -> None:
    slab = accelerator.allocate(64 * MIB + 5)
    assert slab.address % SLAB_ALIGNMENT == 0
    assert not any(content(accelerator, slab.address, slab.length))
    described = accelerator.describe(slab.address + 512, 64 * MIB)
    assert (described.kind, described.ordinal, described.mapped) == (MemoryKind.CUDA, 0, slab.mapped)
    with pytest.raises(DeviceError, match="more than their allocation has"):
        accelerator.describe(slab.address, 1 << 40)
    accelerator.free(slab)
    with pytest.raises(DeviceError, match="free each slab once"):
        accelerator.free(slab)


def test_more_than_there_is_says_so(accelerator: CudaAccelerator) -> None:
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY: free device memory"):
        accelerator.allocate(1 << 42)


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_go_both_ways(accelerator: CudaAccelerator, hardware: Hardware, pinned: bool) -> None:
    slab = accelerator.allocate(8 * MIB)
    sent = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8)
    host = hardware.pinned(4 * MIB) if pinned else np.empty(4 * MIB, dtype=np.uint8)
    host[:] = sent
    starts = [(index * 4096, index * 8192 + 3, 4093) for index in range(1024)]
    rows = copies(*((slab.address + there, host.ctypes.data + here, length) for here, there, length in starts))
    accelerator.write(rows)
    host[:] = 0
    accelerator.read(rows)
    assert all(np.array_equal(host[here : here + length], sent[here : here + length]) for here, _, length in starts)
    assert not host[4093:4096].any()


def test_memory_of_others_is_refused(accelerator: CudaAccelerator, hardware: Hardware) -> None:
    with pytest.raises(DeviceError, match="the host's, not a CUDA device's"):
        accelerator.describe(hardware.pinned(4096).ctypes.data, 4096)
    here = np.empty(4096, dtype=np.uint8)
    with pytest.raises(DeviceError, match=r"unknown to CUDA|the host's"):  # Some systems share page tables.
        accelerator.describe(here.ctypes.data, 4096)


@pytest.mark.parametrize("offset", [0, 512, 4096 + 512])
def test_every_export_is_a_descriptor_of_its_own(accelerator: CudaAccelerator, offset: int) -> None:
    slab = accelerator.allocate(16 * MIB)
    part = accelerator.describe(slab.address + offset, 8 * MIB)
    first, second = accelerator.export(part), accelerator.export(part)
    if not accelerator.facts().dmabuf:
        assert first is None
        assert second is None
        pytest.skip("this driver has no dmabufs")
    assert first is not None
    assert second is not None
    assert first.fd != second.fd
    for dmabuf in (first, second):
        assert dmabuf.offset == offset % os.sysconf("SC_PAGE_SIZE")
        assert os.lseek(dmabuf.fd, 0, os.SEEK_END) >= dmabuf.offset + part.length
        os.close(dmabuf.fd)


@pytest.mark.parametrize("way", ["stream", "event"])
def test_a_word_is_reached_when_its_stream_has_got_there(hardware: Hardware, way: str) -> None:
    context = Context(Library(), 0)
    marker: Marker = StreamWords(context, "cuStreamWriteValue32_v2") if way == "stream" else EventWords(context, "test")
    hardware.block()
    try:
        first = marker.mark(hardware.stream)
        assert not reached(first)
    finally:
        hardware.release()
    until(lambda: reached(first), "the first step is ready")
    hardware.block()
    try:
        second = marker.mark(hardware.stream)
        assert (first.address, first.value + 1) == (second.address, second.value)
        assert reached(first)
        assert not reached(second)
    finally:
        hardware.release()
    marker.close()  # Waits.
    context.close()


def test_a_tensor_of_torchs_is_taken_as_it_is(accelerator: CudaAccelerator, torch: Any) -> None:
    tensor = torch.arange(64 * MIB // 4, dtype=torch.int32, device="cuda:0")
    storage = tensor.untyped_storage()
    memory = accelerator.describe(storage.data_ptr(), storage.nbytes())
    assert (memory.address, memory.length, memory.ordinal) == (tensor.data_ptr(), 64 * MIB, 0)
    torch.cuda.synchronize()
    got = np.frombuffer(content(accelerator, tensor.data_ptr() + 4096, 4096), dtype=np.int32)
    assert np.array_equal(got, np.arange(1024, 2048, dtype=np.int32))


def test_what_torch_has_computed_is_there_when_the_word_is(accelerator: CudaAccelerator, torch: Any) -> None:
    stream = torch.cuda.Stream(device=0)
    host = np.empty(16 * MIB // 4, dtype=np.float32)
    with torch.cuda.stream(stream):
        for value in range(1, 6):
            tensor = torch.zeros(16 * MIB // 4, dtype=torch.float32, device="cuda:0")
            for _ in range(200):
                tensor += value
            word = accelerator.mark_step()
            assert word is not None
            until(lambda word=word: reached(word), "the step is ready")
            accelerator.read(copies((tensor.data_ptr(), host.ctypes.data, host.nbytes)))
            assert (host == 200.0 * value).all()


EXPANDABLE = """
import torch
from gpu_compat import CudaAccelerator
from neuron_pushkv.errors import DeviceError
tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
try:
    CudaAccelerator(0).describe(tensor.data_ptr(), 64 << 20)
except DeviceError as error:
    print(error)
"""


def test_expandable_segments_are_refused(torch: Any) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE],
        env={**os.environ, **dict.fromkeys(names, "expandable_segments:True")},
        cwd=Path(gpu_compat.accelerator.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in done.stdout, done.stdout + done.stderr
