"""What happens in one process with one runtime. ``stage.py`` plays each in a child of its own."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from neuron_pushkv.device import accelerator_for
from neuron_pushkv.device.base import SLAB_ALIGNMENT, Copies, HearsOutputs, Memory, MemoryKind
from neuron_pushkv.device.neuron import NeuronAccelerator, maps
from neuron_pushkv.device.neuron.declarations import ffi
from neuron_pushkv.device.neuron.library import Library
from neuron_pushkv.errors import (
    DeviceError,
    NeuronClosed,
    NeuronError,
    NeuronInvalid,
    NeuronOutOfMemory,
    NeuronUninitialized,
)
from neuron_pushkv.fabric import discovery

MIB = 1 << 20


class Framework:
    """Somebody else in this process who uses the runtime, as vllm-neuron does."""

    def __init__(self, library: Path) -> None:
        self.nrt: Any = ffi.dlopen(str(library))
        self.fake = ctypes.CDLL(str(library))

    def initialise(self, **environment: str) -> None:
        os.environ.update(environment)
        assert self.nrt.nrt_init(self.nrt.NRT_FRAMEWORK_TYPE_NO_FW, b"1", b"1") == 0

    def tensor(self, length: int, core: int = 0) -> tuple[int, Any]:
        handle = ffi.new("nrt_tensor_t **")
        assert self.nrt.nrt_tensor_allocate(self.nrt.NRT_TENSOR_PLACEMENT_DEVICE, core, length, b"kv", handle) == 0
        return int(ffi.cast("uintptr_t", self.nrt.nrt_tensor_get_va(handle[0]))), handle


def view(memory: Memory) -> memoryview:
    return memoryview((ctypes.c_char * memory.length).from_address(memory.address)).cast("B")


def copies(*rows: tuple[int, int, int]) -> Copies:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)


def host(content: bytes) -> Any:
    return ctypes.create_string_buffer(content, len(content))


def opened_here(library: Path) -> None:
    accelerator = NeuronAccelerator(3, library)
    assert isinstance(accelerator, HearsOutputs)
    assert (os.environ["NEURON_RT_MAP_HBM"], os.environ["NEURON_RT_VISIBLE_CORES"]) == ("1", "3")
    assert accelerator.hint == ""
    memory = accelerator.allocate(5 * MIB)
    assert (memory.kind, memory.ordinal, memory.mapped) == (MemoryKind.NEURON, 3, True)
    assert memory.address % SLAB_ALIGNMENT == 0
    assert not any(view(memory))
    facts = accelerator.facts()
    assert (facts.library, facts.version, facts.family, facts.architecture) == (
        str(library),
        "2.34.10.0",
        "trn2",
        "NCv3",
    )
    assert (facts.cores, facts.visible_cores, facts.initialised_here) == (64, 1, True)
    assert (facts.bytes_used, facts.bytes_limit) == (6 * MIB, 1024 * MIB)  # The slab ends with a page of 2 MiB.
    assert (facts.dmabuf, facts.attached_nic, facts.hint) == ("nrt_get_dmabuf_fd_v2", True, "")
    assert accelerator.describe(memory.address + 4096, MIB) == Memory(
        memory.address + 4096, MIB, MemoryKind.NEURON, 3, mapped=True
    )
    with pytest.raises(DeviceError, match="beyond the end of their slab"):
        accelerator.describe(memory.address + 4096, 5 * MIB)
    accelerator.free(memory)
    with pytest.raises(DeviceError, match="free each slab once"):
        accelerator.free(memory)
    accelerator.allocate(MIB)
    accelerator.close()
    accelerator.close()
    assert Framework(library).fake.fake_tensors() == 0
    with pytest.raises(NeuronClosed, match="restart the process"):
        NeuronAccelerator(3, library)


def opened_by_others(library: Path) -> None:
    framework = Framework(library)
    framework.initialise(NEURON_RT_MAP_HBM="1", NEURON_RT_VISIBLE_CORES="8-11")
    accelerator = accelerator_for("neuron", 2)
    assert isinstance(accelerator, NeuronAccelerator)
    facts = accelerator.facts()
    assert (facts.library, facts.visible_cores, facts.initialised_here) == (str(library), 4, False)
    address, handle = framework.tensor(4 * MIB, core=2)
    assert accelerator.facts().bytes_used == 4 * MIB
    assert accelerator.describe(address, 4 * MIB) == Memory(address, 4 * MIB, MemoryKind.NEURON, 2)
    with pytest.raises(DeviceError, match="NEURON_RT_VISIBLE_CORES"):
        NeuronAccelerator(4)
    accelerator.allocate(MIB)
    accelerator.close()
    assert framework.fake.fake_init_calls() == 1
    assert framework.fake.fake_tensors() == 1
    framework.nrt.nrt_tensor_free(handle)
    framework.tensor(MIB)  # The runtime is still open.


def one_core_by_its_rank(library: Path) -> None:
    """vllm-neuron shows each worker one core and calls it ``neuron:<rank>``."""
    framework = Framework(library)
    framework.initialise(NEURON_RT_MAP_HBM="1", NEURON_RT_VISIBLE_CORES="5")
    accelerator = NeuronAccelerator(5)
    assert accelerator.allocate(MIB).ordinal == 5
    assert accelerator.facts().bytes_used == 2 * MIB


def unmapped(library: Path) -> None:
    accelerator = NeuronAccelerator(0, library)
    assert "NEURON_RT_MAP_HBM is '0' here" in accelerator.hint
    memory = accelerator.allocate(3 * MIB)
    assert not memory.mapped
    assert memory.address % SLAB_ALIGNMENT == 0
    assert accelerator.describe(memory.address + 64, 64) == Memory(
        memory.address + 64, 64, MemoryKind.NEURON, 0, mapped=False
    )
    (line,) = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= memory.address < int(line.split("-")[1].split()[0], 16)
    ]
    assert line.split()[1].startswith("---")
    assert accelerator.export(memory) is None
    content = os.urandom(1000)
    source, target = host(content), host(bytes(1000))
    accelerator.write(copies((memory.address + 2 * MIB, ctypes.addressof(source), 1000)))
    accelerator.read(copies((memory.address + 2 * MIB, ctypes.addressof(target), 1000)))
    assert target.raw == content
    with pytest.raises(DeviceError, match=r"data_ptr\(\) is 0.*NEURON_RT_MAP_HBM=1"):
        accelerator.describe(0, 64)
    with pytest.raises(DeviceError, match="one mapping"):
        accelerator.describe(0x10000, 64)
    accelerator.close()
    assert maps.holding(memory.address, 64) is None


def mapped_too_late(library: Path) -> None:
    """The environment is right, but was not when the framework initialised the runtime."""
    framework = Framework(library)
    framework.initialise(NEURON_RT_MAP_HBM="")
    os.environ["NEURON_RT_MAP_HBM"] = "1"
    accelerator = NeuronAccelerator(0)
    assert accelerator.hint == ""
    assert not accelerator.allocate(MIB).mapped
    assert "before the Neuron runtime is initialised" in accelerator.hint


def libfabric(library: Path, first: str) -> None:
    """Both orders, and neither known."""
    other = discovery.in_wheel()
    assert other is not None
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("neuron_pushkv.device.neuron").addHandler(handler)
    if first == "libfabric":
        ctypes.CDLL(str(other))
        hint = NeuronAccelerator(0, library).hint
        assert hint.startswith("libfabric was initialised before libnrt: FI_HMEM_NEURON is lost for this process")
        assert said == [hint]
        return
    framework = Framework(library)
    framework.initialise(NEURON_RT_MAP_HBM="1")
    assert NeuronAccelerator(0).hint == ""
    ctypes.CDLL(str(other))
    assert "if libfabric came first" in NeuronAccelerator(0).hint
    assert said == []


def forked(library: Path) -> None:
    accelerator = NeuronAccelerator(0, library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # That forking with threads is dangerous, it says.
        child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        accelerator.allocate(MIB)
        return
    with pytest.raises(NeuronError, match=r"this side of a fork.*spawn") as caught:
        accelerator.allocate(MIB)
    assert caught.value.status == 1
    with pytest.raises(NeuronError, match=r"this side of a fork.*spawn") as caught:
        NeuronAccelerator(0, library)
    assert caught.value.status == 1
    os._exit(0)


def exports(library: Path) -> None:
    """Each export is a descriptor of its own, since a card that has attached to one keeps others off it."""
    accelerator, fake = NeuronAccelerator(0, library), ctypes.CDLL(str(library))
    slab = accelerator.allocate(4 * MIB)
    view(slab)[:] = bytes(range(256)) * (len(view(slab)) // 256)
    view(slab)[3 * MIB : 3 * MIB + 4] = b"here"
    part = accelerator.describe(slab.address + 3 * MIB, MIB)
    first, second = accelerator.export(part), accelerator.export(part)
    assert first is not None
    assert second is not None
    assert first.offset == second.offset == 3 * MIB
    with mmap.mmap(first.fd, 0) as shown:
        assert shown[first.offset : first.offset + 4] == b"here"
    assert fake.fake_attach(first.fd) == 0
    assert fake.fake_attach(os.dup(first.fd)) != 0
    assert fake.fake_attach(second.fd) == 0


def exports_without_offset(library: Path) -> None:
    """The older function names no offset, and may refuse what doesn't begin an allocation: then there is none."""
    accelerator = NeuronAccelerator(0, library)
    assert accelerator.facts().dmabuf == "nrt_get_dmabuf_fd"
    slab = accelerator.allocate(4 * MIB)
    whole = accelerator.export(slab)
    assert whole is not None
    assert whole.offset == 0
    head = accelerator.export(accelerator.describe(slab.address + 100, MIB))
    assert head is not None
    assert head.offset == 100  # Into the page that the export begins with.
    assert accelerator.export(accelerator.describe(slab.address + MIB, MIB)) is None


def no_exports(library: Path) -> None:
    accelerator = NeuronAccelerator(0, library)
    slab = accelerator.allocate(MIB)
    assert accelerator.export(slab) is None
    os.environ["FAKE_NRT_DMABUF"] = "resource"
    with pytest.raises(NeuronOutOfMemory, match="NRT_RESOURCE") as caught:
        accelerator.export(slab)
    assert caught.value.status == 4


def out_of_memory(library: Path) -> None:
    accelerator = NeuronAccelerator(0, library)
    held = accelerator.allocate(6 * MIB)
    with pytest.raises(NeuronOutOfMemory, match="nrt_tensor_allocate failed with NRT_RESOURCE: free device memory"):
        accelerator.allocate(4 * MIB)
    accelerator.free(held)
    accelerator.allocate(8 * MIB)
    assert ctypes.CDLL(str(library)).fake_tensors() == 1


def addresses_off_alignment(library: Path) -> None:
    accelerator, fake = NeuronAccelerator(0, library), ctypes.CDLL(str(library))
    memory = accelerator.allocate(3 * MIB)
    assert memory.address % SLAB_ALIGNMENT == 0
    assert accelerator.facts().bytes_used == 6 * MIB
    content = os.urandom(3 * MIB)
    source = host(content)
    accelerator.write(copies((memory.address, ctypes.addressof(source), 3 * MIB)))
    assert bytes(view(memory)) == content
    accelerator.free(memory)
    assert fake.fake_tensors() == 0


def moves(library: Path, batches: str) -> None:
    """Rows of several slabs in any order, in one call where the runtime has it."""
    accelerator, fake = NeuronAccelerator(0, library), ctypes.CDLL(str(library))
    slabs = [accelerator.allocate(MIB) for _ in range(3)]
    content = os.urandom(6 * 100)
    source, target = host(content), host(bytes(600))
    places = [(slabs[index % 3].address + 1000 * index, index * 100) for index in (5, 0, 3, 1, 4, 2)]
    accelerator.write(copies(*((device, ctypes.addressof(source) + at, 100) for device, at in places)))
    for device, at in places:
        assert ctypes.string_at(device, 100) == content[at : at + 100]
    accelerator.read(copies(*((device, ctypes.addressof(target) + at, 100) for device, at in places)))
    assert target.raw == content
    accelerator.read(copies())
    accelerator.read(copies((slabs[0].address, ctypes.addressof(target), 0)))
    assert (fake.fake_batch_calls(), fake.fake_batches()) == ((2, 6) if batches == "in batches" else (0, 0))
    with pytest.raises(DeviceError, match="beyond the end of their slab"):
        accelerator.read(copies((slabs[0].address + MIB - 50, ctypes.addressof(target), 100)))


def moves_of_others(library: Path, writes: str) -> None:
    """Memory that the framework has allocated is moved through its mapping."""
    framework = Framework(library)
    framework.initialise(NEURON_RT_MAP_HBM="1")
    accelerator = NeuronAccelerator(0)
    address, _ = framework.tensor(MIB)
    source, target = host(b"kv" * 50), host(bytes(100))
    row = copies((address + 10, ctypes.addressof(source), 100))
    if writes == "refused":
        with pytest.raises(DeviceError, match="nrt_memcpy_to_device"):
            accelerator.write(row)
        ctypes.memmove(address + 10, source, 100)
    else:
        accelerator.write(row)
    accelerator.read(copies((address + 10, ctypes.addressof(target), 100)))
    assert target.raw == source.raw
    with pytest.raises(DeviceError, match="neither a slab of ours nor mapped"):
        accelerator.read(copies((0x10000, ctypes.addressof(target), 100)))


def nics(library: Path, devices: str) -> None:
    asked: list[tuple[Any, ...]] = []
    topology: Any = ModuleType("neuron_pushkv.device.topology")
    topology.neuron_nics = lambda *arguments, sys: (asked.append((*arguments, sys)), ("rdmap0s0",))[1]
    sys.modules["neuron_pushkv.device.topology"] = topology
    accelerator = NeuronAccelerator(1, library, device_folder=Path(devices), sys=Path("/elsewhere"))
    memory = accelerator.allocate(MIB)
    assert accelerator.nics(memory) == ("rdmap0s0",)
    del os.environ["FAKE_NRT_BDF"]
    os.environ["FAKE_NRT_FAMILY"] = "99"
    assert accelerator.nics(memory) == ("rdmap0s0",)
    # Core 14 of 64 on 16 devices is on the container's device 3, the machine's fifth.
    assert asked == [(5, "0000:c9:00.0", "trn2", Path("/elsewhere")), (5, None, None, Path("/elsewhere"))]


def behaves_like_the_real_one(library: Path) -> None:
    """Of the stand-in itself, what nothing of ours gets to see."""
    nrt, fake = Library(library), Framework(library)
    one, two = ffi.new("nrt_tensor_t **"), ffi.new("nrt_tensor_t **")
    device, count = nrt.c.NRT_TENSOR_PLACEMENT_DEVICE, ffi.new("uint32_t *")
    nrt.call("nrt_get_total_vnc_count", count)
    assert count[0] == 64
    with pytest.raises(NeuronUninitialized):
        nrt.call("nrt_tensor_allocate", device, 0, 64, b"", one)
    fake.initialise(NEURON_RT_NUM_CORES="2")
    fake.initialise()
    with pytest.raises(NeuronInvalid):
        nrt.call("nrt_tensor_allocate", device, 2, 64, b"", one)
    nrt.call("nrt_tensor_allocate", device, 0, 64, b"", one)
    nrt.call("nrt_tensor_allocate", device, 1, 64, b"", two)
    assert nrt.c.nrt_tensor_get_va(one[0]) == ffi.NULL
    with pytest.raises(NeuronInvalid):  # Cores don't reach each other's memory.
        nrt.call("nrt_tensor_copy", one[0], 0, two[0], 0, 64)
    for offset, length in ((0, 65), (65, 0), (1, 64), (1 << 63, 1 << 63)):
        with pytest.raises(NeuronInvalid):
            nrt.call("nrt_tensor_memset", one[0], offset, 1, length)
    nrt.call("nrt_tensor_memset", one[0], 0, 7, 64)
    nrt.call("nrt_tensor_copy", one[0], 0, one[0], 32, 32)
    buffer = ffi.new("char[]", 64)
    nrt.call("nrt_tensor_read", one[0], buffer, 0, 64)
    assert ffi.buffer(buffer)[:] == bytes([7]) * 64
    nrt.c.nrt_close()
    with pytest.raises(NeuronClosed):
        nrt.call("nrt_tensor_read", one[0], buffer, 0, 64)
    with pytest.raises(NeuronClosed):
        nrt.call("nrt_init", nrt.c.NRT_FRAMEWORK_TYPE_NO_FW, b"", b"")


def from_several_threads(library: Path) -> None:
    accelerator, failed = NeuronAccelerator(0, library), list[BaseException]()

    def work(number: int) -> None:
        try:
            for _ in range(20):
                memory = accelerator.allocate(MIB)
                source, target = host(bytes([number]) * 5000), host(bytes(5000))
                accelerator.write(copies((memory.address + number, ctypes.addressof(source), 5000)))
                accelerator.read(copies((memory.address + number, ctypes.addressof(target), 5000)))
                assert target.raw == source.raw
                accelerator.free(memory)
        except BaseException as error:  # noqa: BLE001 -- told by the main thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert ctypes.CDLL(str(library)).fake_tensors() == 0
