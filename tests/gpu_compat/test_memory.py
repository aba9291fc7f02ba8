"""What memory is, where it is exported, and slabs."""

from __future__ import annotations

import ctypes
import logging
import os

import pytest

from neuron_pushkv.device.base import SLAB_ALIGNMENT, Memory, MemoryKind
from neuron_pushkv.errors import DeviceError
from tests.fakes.cuda import Open

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def file_content(fd: int, start: int, length: int) -> bytes:
    return os.pread(fd, length, start)


def test_slabs_are_aligned_zeroed_and_freed_once(start: Open) -> None:
    accelerator, cuda = start()
    slab = accelerator.allocate(3 * MIB + 5)
    assert (slab.length, slab.kind, slab.ordinal, slab.mapped) == (3 * MIB + 5, MemoryKind.CUDA, 0, True)
    assert slab.address % SLAB_ALIGNMENT == 0
    assert ctypes.string_at(slab.address, 4 * MIB) == bytes(4 * MIB)
    assert cuda.synchronous(slab.address)
    accelerator.free(slab)
    with pytest.raises(DeviceError, match="free each slab once"):
        accelerator.free(slab)


def test_slabs_are_aligned_where_the_driver_does_not(start: Open) -> None:
    accelerator, cuda = start(skew=4096)
    slab = accelerator.allocate(2 * MIB)
    assert slab.address % SLAB_ALIGNMENT == 0
    assert ctypes.string_at(slab.address, 2 * MIB) == bytes(2 * MIB)
    assert cuda.counts()["allocations"] == 1
    accelerator.free(slab)
    assert cuda.counts()["allocations"] == 0


def test_slabs_left_over_are_freed_in_the_end(start: Open) -> None:
    accelerator, cuda = start()
    accelerator.allocate(MIB)
    accelerator.mark_step()
    accelerator.close()
    assert not any(cuda.counts().values())
    accelerator.close()


def test_memory_that_runs_out_says_so_and_leaks_nothing(start: Open) -> None:
    accelerator, _ = start(memory=8 * MIB)
    slab = accelerator.allocate(4 * MIB)
    with pytest.raises(DeviceError, match=r"6291456 bytes .*_OUT_OF_MEMORY: free device memory"):
        accelerator.allocate(6 * MIB)
    accelerator.free(slab)
    assert accelerator.allocate(8 * MIB).length == 8 * MIB


@pytest.mark.parametrize("length", [0, -1])
def test_slabs_and_memory_of_no_bytes_are_refused(start: Open, length: int) -> None:
    accelerator, _ = start()
    with pytest.raises(DeviceError, match="ask for one byte or more"):
        accelerator.allocate(length)
    with pytest.raises(DeviceError, match="no memory to push"):
        accelerator.describe(4096, length)


def test_a_part_of_an_allocation_is_described_as_it_is(start: Open) -> None:
    accelerator, _ = start()
    slab = accelerator.allocate(4 * MIB)
    assert accelerator.describe(slab.address + 512, MIB) == Memory(slab.address + 512, MIB, MemoryKind.CUDA, 0)
    with pytest.raises(DeviceError, match=r"more than their allocation has: 4194304 bytes"):
        accelerator.describe(slab.address + 1, 4 * MIB)


def test_memory_of_others_is_refused_with_the_reason(start: Open) -> None:
    accelerator, cuda = start()
    here = ctypes.create_string_buffer(64)
    with pytest.raises(DeviceError, match="unknown to CUDA"):
        accelerator.describe(ctypes.addressof(here), 64)
    with pytest.raises(DeviceError, match="managed by CUDA"):
        accelerator.describe(cuda.managed(MIB), MIB)
    word = accelerator.mark_step()
    assert word is not None
    with pytest.raises(DeviceError, match="the host's, not a CUDA device's"):
        accelerator.describe(word.address, 4)


def test_memory_of_another_device_is_refused(start: Open) -> None:
    first, cuda = start()
    slab = first.allocate(MIB)
    second, _ = start(index=1)  # The same driver: its file has been loaded already.
    assert cuda.counts()["contexts"] == 2
    with pytest.raises(DeviceError, match=r"on CUDA device 0, and this accelerator is for device 1"):
        second.describe(slab.address, MIB)
    assert second.allocate(MIB).ordinal == 1


@pytest.mark.parametrize("length", [MIB, 5 * MIB])
def test_expandable_segments_are_refused_with_what_to_set(start: Open, length: int) -> None:
    accelerator, cuda = start()
    segment = cuda.mapped(64 * MIB, 8 * MIB, 2 * MIB)
    with pytest.raises(DeviceError, match=r"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"):
        accelerator.describe(segment, length)
    assert cuda.counts()["handles"] == 0


def test_what_one_handle_maps_whole_is_taken(start: Open) -> None:
    accelerator, cuda = start()
    address = cuda.mapped(8 * MIB, 8 * MIB, 8 * MIB)
    assert accelerator.describe(address, 8 * MIB).mapped
    assert cuda.counts()["handles"] == 0


def test_what_cards_can_not_reach_is_copied_and_said(start: Open, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, cuda = start()
    address = cuda.mapped(8 * MIB, 8 * MIB, 8 * MIB, capable=False)
    with caplog.at_level(logging.WARNING):
        memory = accelerator.describe(address, 8 * MIB)
    assert not memory.mapped
    assert "allocated without GPUDirect RDMA" in caplog.text
    assert accelerator.export(memory) is None
    assert accelerator.nics(memory) == ()


def test_a_device_out_of_reach_gives_no_memory_to_cards(start: Open) -> None:
    accelerator, cuda = start(dmabuf=0, rdma=0)
    slab = accelerator.allocate(MIB)
    assert not slab.mapped
    assert not accelerator.describe(slab.address, MIB).mapped
    assert not cuda.synchronous(slab.address)
    assert "out of other devices' reach" in accelerator.hint


@pytest.mark.parametrize("pcie", [0, 1])
@pytest.mark.parametrize("offset", [0, 512, PAGE, 2 * MIB + 4097])
def test_every_export_is_a_descriptor_of_its_own_for_whole_pages(start: Open, offset: int, pcie: int) -> None:
    accelerator, cuda = start(pcie=pcie)
    slab = accelerator.allocate(6 * MIB)
    part = accelerator.describe(slab.address + offset, 3 * MIB)
    ctypes.memmove(part.address, b"begin", 5)
    ctypes.memmove(part.address + part.length - 3, b"end", 3)
    first, second = accelerator.export(part), accelerator.export(part)
    assert first is not None
    assert second is not None
    assert first.fd != second.fd
    for dmabuf in (first, second):
        begin, size = cuda.exported(dmabuf.fd)
        assert begin % PAGE == size % PAGE == 0
        assert dmabuf.offset == offset % PAGE
        assert dmabuf.offset + part.length <= size < dmabuf.offset + part.length + PAGE
        assert file_content(dmabuf.fd, begin + dmabuf.offset, 5) == b"begin"
        assert file_content(dmabuf.fd, begin + dmabuf.offset + part.length - 3, 3) == b"end"
        os.close(dmabuf.fd)


@pytest.mark.parametrize(("kind", "dmabuf"), [("new", 0), ("old", 1)])
def test_without_dmabufs_nothing_is_exported_and_the_hint_says_why(start: Open, kind: str, dmabuf: int) -> None:
    accelerator, _ = start(kind, dmabuf=dmabuf)
    slab = accelerator.allocate(MIB)
    assert accelerator.export(slab) is None
    if kind == "new":
        assert slab.mapped
        assert "efa_nv_peermem" in accelerator.hint


def test_an_export_that_fails_is_an_error(start: Open) -> None:
    accelerator, _ = start()
    slab = accelerator.allocate(MIB)
    accelerator.free(slab)
    with pytest.raises(DeviceError, match="cuMemGetHandleForAddressRange failed with CUDA_ERROR_INVALID_VALUE"):
        accelerator.export(slab)
