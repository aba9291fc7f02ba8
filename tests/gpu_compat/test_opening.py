"""Finding the driver and a device; what it can do; processes that must not use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_compat import CudaAccelerator
from neuron_pushkv.device import topology
from neuron_pushkv.errors import DeviceError
from tests.fakes.build import compile_library
from tests.fakes.cuda import Open

ROOT = Path(__file__).resolve().parents[2]


def in_process(program: str, libraries: Path, **environment: str) -> str:
    """What a process prints that finds the stand-in where the loader looks; it must end well."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries), "OPENBLAS_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_facts_are_the_drivers(start: Open) -> None:
    accelerator, _ = start(index=1)
    facts = accelerator.facts()
    assert (facts.driver, facts.device, facts.index, facts.bus_id) == ("12.8", "Stand-in 1", 1, "0000:5b:00.0")
    assert facts.capability == (9, 0)
    assert (facts.dmabuf, facts.rdma, facts.stream_writes, facts.needs_flush) == (True, True, True, False)
    assert accelerator.name == "cuda"
    assert accelerator.hint == ""


@pytest.mark.parametrize(
    ("major", "ordering", "flush"), [(8, 0, True), (8, 100, False), (8, 200, False), (9, 0, False), (10, 0, False)]
)
def test_flushes_are_needed_before_hopper_unless_the_device_orders(
    start: Open, major: int, ordering: int, flush: bool
) -> None:
    accelerator, _ = start(major=major, ordering=ordering)
    assert accelerator.needs_flush is flush


def test_an_old_driver_knows_of_no_order(start: Open) -> None:
    accelerator, _ = start("old", major=8, ordering=100)
    assert accelerator.needs_flush
    assert not accelerator.facts().dmabuf


def test_the_nics_are_those_of_the_devices_place(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def cuda_nics(*where: object) -> tuple[str, ...]:
        asked.append(where)
        return ("rdmap1s0",)

    monkeypatch.setattr(topology, "cuda_nics", cuda_nics)
    monkeypatch.setattr(topology, "instance_family", lambda: "p5en")
    accelerator, _ = start(index=1)
    assert accelerator.nics(accelerator.allocate(64)) == ("rdmap1s0",)
    assert asked == [("0000:5b:00.0", 1, "p5en")]


def test_no_driver_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"the CUDA driver can't be loaded .* install NVIDIA's driver"):
        CudaAccelerator(0, tmp_path / "libcuda.so.1")


def test_another_library_is_named(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text('__attribute__((visibility("default"))) int other;\n')
    library = compile_library(source, tmp_path / "other.so", soname="other.so")
    with pytest.raises(DeviceError, match="has no cuInit; install NVIDIA's driver"):
        CudaAccelerator(0, library)


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("STUB", "1", "cuInit failed with CUDA_ERROR_STUB_LIBRARY: the toolkit's stub was loaded"),
        ("DEVICES", "0", "cuInit failed with CUDA_ERROR_NO_DEVICE: no device is to be seen"),
        ("DEVICES", "1", "there is no CUDA device 1, only 1; look at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_driver_of_no_use_says_what_to_do(
    driver: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, setting: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(f"FAKE_CUDA_{setting}", value)
    with pytest.raises(DeviceError, match=sentence):
        CudaAccelerator(1, driver())


def test_what_failed_half_way_is_let_go(start: Open, driver: Callable[[], Path]) -> None:
    _, cuda = start()
    before = cuda.counts()
    cuda.c.fake_fail_marks(1)
    with pytest.raises(DeviceError, match="cuStreamWriteValue32_v2 failed"):
        CudaAccelerator(0, driver())
    assert cuda.counts() == before


def test_calls_before_init_and_without_a_context_fail_in_the_stand_in(start: Open) -> None:
    accelerator, cuda = start()
    assert cuda.c.cuMemFree_v2(0) == 201
    accelerator.close()
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_CONTEXT"):
        accelerator.allocate(64)


USUAL = """
import sys
from neuron_pushkv.device import accelerator_for
accelerator = accelerator_for("cuda", -1)
print(type(accelerator).__module__, accelerator.facts().device, accelerator.allocate(64).ordinal)
print("torch" in sys.modules)
accelerator.close()
"""


def test_the_usual_library_is_found_by_the_loader_and_torch_is_left_alone(libraries: dict[str, Path]) -> None:
    assert in_process(USUAL, libraries["new"].parent) == "gpu_compat.accelerator Stand-in 0 0\nFalse\n"


FORKED = """
import os, sys
from gpu_compat import CudaAccelerator
from neuron_pushkv.errors import DeviceError

def said(call):
    try:
        call()
    except DeviceError as error:
        return str(error)

accelerator = CudaAccelerator(0)
slab = accelerator.allocate(64)
child = os.fork()
if child == 0:
    good = all(
        "start workers with 'spawn'" in (said(call) or "")
        for call in (lambda: CudaAccelerator(0), accelerator.mark_step, lambda: accelerator.free(slab))
    )
    os._exit(0 if good else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
accelerator.close()
"""


def test_a_forked_child_is_told_to_be_spawned(libraries: dict[str, Path]) -> None:
    assert in_process(FORKED, libraries["new"].parent) == "0\n"
