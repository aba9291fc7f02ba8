"""Checks of accelerators, of libfabric, and of which cards are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Dmabuf, Memory, MemoryKind
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.doctor import accelerators, network, rates, starting
from neuron_pushkv.doctor.findings import Finding, Id, Level, fine, warning
from neuron_pushkv.errors import ConfigError, DeviceError
from neuron_pushkv.fabric import discovery
from tests.fakes.nrt import compile_nrt

from .machines import card, instance, machine
from .test_node import said

MARK = "/memfd:pushkv-doctor-test (deleted)"


def open_files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # The one that lists the folder.
            found.append(str(path.readlink()))
    return found


class FakeDevice(HostAccelerator):
    """Host memory that says it is a device's."""

    name = "neuron"  # type: ignore[assignment]

    def __init__(self, *, hint: str = "", dmabuf: bool | DeviceError = True, room: bool = True) -> None:
        super().__init__()
        self.hint = hint  # type: ignore[misc]
        self.dmabuf = dmabuf
        self.room = room
        self.closed = False
        self.descriptors: list[int] = []

    def allocate(self, length: int) -> Memory:
        if not self.room:
            raise DeviceError("no device memory is left; end what uses it")
        memory = super().allocate(length)
        return Memory(memory.address, length, MemoryKind.NEURON, 0, mapped=not self.hint)

    def export(self, memory: Memory) -> Dmabuf | None:
        if isinstance(self.dmabuf, DeviceError):
            raise self.dmabuf
        if not self.dmabuf:
            return None
        self.descriptors.append(os.memfd_create("pushkv-doctor-test"))
        return Dmabuf(self.descriptors[-1], 0)

    def facts(self) -> dict[str, Any]:
        return {"version": "2.31.24", "family": "trn2"}

    def close(self) -> None:
        self.closed = True
        super().close()


def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: FakeDevice) -> list[Finding]:
    monkeypatch.setattr(accelerators, "accelerator_for", lambda kind, index: device)
    found = accelerators.open_device(machine(tmp_path, devices="neuron0 neuron1 neuron_core"), "neuron", 1 << 20)
    found.close()
    assert device.closed
    return found.findings


class TestAccelerators:
    def test_one_in_order(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        device = FakeDevice()
        runtime, memory = opened(monkeypatch, tmp_path, device)
        said(runtime, Level.OK, "neuron 2.31.24")
        assert runtime.evidence["facts"]["family"] == "trn2"
        said(memory, Level.OK, "exported as a dmabuf")
        assert len(device.descriptors) == 1
        assert MARK not in open_files()

    def test_memory_without_an_address_is_tried_out_in_the_hosts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        runtime, memory = opened(monkeypatch, tmp_path, FakeDevice(hint="HBM is not mapped"))
        said(runtime, Level.WARNING, "HBM is not mapped")
        said(memory, Level.WARNING, "no address", "NEURON_RT_MAP_HBM=1")

    def test_an_export_that_fails_is_no_error(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        said(opened(monkeypatch, tmp_path, FakeDevice(dmabuf=False))[1], Level.OK, "not as a dmabuf")
        broken = FakeDevice(dmabuf=DeviceError("the export has failed"))
        said(opened(monkeypatch, tmp_path, broken)[1], Level.WARNING, "the export has failed")

    def test_no_memory_left(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        said(opened(monkeypatch, tmp_path, FakeDevice(room=False))[1], Level.ERROR, "no device memory is left")

    def test_what_a_machine_has(self, tmp_path: Path) -> None:
        assert machine(tmp_path).device_type() == "cpu"
        assert machine(tmp_path, devices="nvidiactl nvidia0").device_type() == "cuda"
        assert machine(tmp_path, devices="neuron0").device_type() == "neuron"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnrt."""
    return compile_nrt(tmp_path_factory.mktemp("nrt"), defines=("DMABUF_V2",)).parent


@pytest.mark.parametrize(
    ("mapped", "level", "text"), [("1", "ok", "device memory is mapped"), ("0", "warning", "NEURON_RT_MAP_HBM")]
)
def test_neuron_over_a_stand_in_runtime(runtime: Path, mapped: str, level: str, text: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEURON_")}
    environment |= {"LD_LIBRARY_PATH": str(runtime), "NEURON_RT_MAP_HBM": mapped, "NEURON_RT_VISIBLE_CORES": "4-7"}
    script = (
        "import json, os\n"
        "from neuron_pushkv.doctor.accelerators import one_core, open_device\n"
        "from neuron_pushkv.doctor.machine import Machine\n"
        "one_core('neuron', 1, (4, 5, 6, 7))\n"
        "device = open_device(Machine(), 'neuron', 1 << 20)\n"
        "print(json.dumps([[f.document() for f in device.findings], os.environ['NEURON_RT_VISIBLE_CORES']]))\n"
        "device.close()\n"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    (device, memory), core = json.loads(ran.stdout)
    assert core == "5"
    assert (device["id"], memory["id"]) == ("accelerator.runtime", "accelerator.memory")
    assert device["evidence"]["facts"]["visible_cores"] == 1
    assert device["evidence"]["facts"]["version"]
    assert (device["level"], memory["level"]) == (level, level)
    assert text in f"{memory['what']}; {memory['fix']}"


@pytest.mark.skipif(discovery.in_wheel() is None, reason="needs the libfabric of the 'mpich' package")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("cores", "kinds"), [("4-7", ["neuron", "neuron"]), ("4", ["neuron", "cpu"])])
def test_device_memory_is_written_to_over_a_stand_in_runtime(runtime: Path, cores: str, kinds: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NEURON_", "FI_"))}
    environment |= {"LD_LIBRARY_PATH": str(runtime), "NEURON_RT_MAP_HBM": "1", "NEURON_RT_VISIBLE_CORES": cores}
    script = (
        "import json\n"
        "from neuron_pushkv.config import ConnectorSettings\n"
        "from neuron_pushkv.device.neuron import NeuronAccelerator\n"
        "from neuron_pushkv.doctor import accelerators, trial\n"
        "from neuron_pushkv.doctor.examination import Patient, examine\n"
        "from neuron_pushkv.doctor.machine import Machine\n"
        "accelerators.LEAST_BYTES = NeuronAccelerator.slab_bytes = 4 << 20\n"
        "seen, meet = [], trial.Side.meet\n"
        "def met(side, about):\n"
        "    seen.extend([side._device.accelerator.name, about.device])\n"
        "    meet(side, about)\n"
        "trial.Side.meet = met\n"
        "who = Patient(ConnectorSettings(provider='tcp'), Machine(), 'neuron')\n"
        "print(json.dumps([[finding.document() for finding in examine(who, [])], seen]))\n"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    findings, met = json.loads(ran.stdout)
    levels = {finding["id"]: finding["level"] for finding in findings}
    assert met == kinds
    assert (levels["accelerator.memory"], levels["transfer.bytes"], levels["transfer.latency"]) == ("ok", "ok", "ok")


class TestProvider:
    @pytest.mark.parametrize(
        ("asked", "found", "level"),
        [
            ("tcp", "tcp", Level.OK),
            ("tcp", "tcp;ofi_rxm", Level.OK),
            ("efa", "efa", Level.OK),
            ("efa-direct", "efa-direct", Level.OK),
            ("efa", "tcp", Level.ERROR),
            ("efa", "tcp;ofi_rxm", Level.ERROR),
            ("efa-direct", "efa", Level.ERROR),
            ("shm", "nixl/UCX", Level.OK),
            ("efa", "nixl/UCX", Level.WARNING),
        ],
    )
    def test_falling_back_is_never_silent(self, asked: str, found: str, level: Level) -> None:
        said(network.provider(asked, found), level, found)

    def test_libfabric(self) -> None:
        said(network.libfabric("2.5", "/x", "tcp", "cpu"), Level.OK, "/x")
        said(network.libfabric("1.17", "/x", "efa", "cpu"), Level.OK)
        said(network.libfabric("1.17", "/x", "efa", "neuron"), Level.WARNING, "dmabuf")
        said(network.libfabric("1.17", "/x", "tcp;ofi_rxm", "cpu"), Level.WARNING, "mpich")

    @pytest.mark.parametrize(("provider", "check"), [("efa", Id.FABRIC_PROVIDER), ("tcp", Id.FABRIC_LIBRARY)])
    def test_what_can_not_be_opened(self, tmp_path: Path, provider: str, check: Id) -> None:
        settings = ConnectorSettings(provider=provider, libfabric=None if provider == "efa" else tmp_path / "none.so")
        transport, (finding,) = network.open_network(settings, HostAccelerator(), [])
        assert transport is None
        assert finding.id is check
        said(finding, Level.ERROR, "'efa' was asked for" if provider == "efa" else "none.so")


class TestRails:
    def test_the_nearest_are_used(self, tmp_path: Path) -> None:
        node = machine(tmp_path)
        instance(tmp_path, "trn2.48xlarge")
        card(tmp_path, "rdmap201s0", "0000:c9:00.0", node=1)
        card(tmp_path, "rdmap180s0", "0000:b4:00.0", "0000:b0:00.0")
        near = network.rails("efa", ["rdmap201s0-rdm"], ["rdmap201s0"], "neuron", node)
        said(near, Level.OK, "1 rails, over rdmap201s0-rdm")
        assert near.evidence["family"] == "trn2"
        assert near.evidence["places"]["rdmap201s0-rdm"] == {
            "bdf": "0000:c9:00.0",
            "node": "1",
            "bridges": ["0000:c0:00.0"],
        }
        far = network.rails("efa", ["rdmap180s0-rdm"], ["rdmap201s0"], "neuron", node)
        said(far, Level.WARNING, "rdmap180s0, which are not the cards nearest")
        said(network.rails("efa", ["a-rdm", "b-rdm"], [], "neuron", node), Level.WARNING, "all 2 are used")
        said(network.rails("efa", ["a-rdm", "b-rdm"], [], "cpu", node), Level.OK)
        said(network.rails("tcp", ["lo"], [], "cpu", node), Level.OK, "lo")

    @pytest.mark.parametrize(
        ("family", "rails", "rate"),
        [("trn2", 1, 25e9), ("trn2u", 1, 25e9), ("trn1", 1, 12.5e9), ("p5en", 2, 50e9), ("p6-b300", 2, 100e9)],
    )
    def test_line_rates(self, family: str, rails: int, rate: float) -> None:
        assert rates.line_rate(family, rails) == rate

    @pytest.mark.parametrize("family", [None, "m7i"])
    def test_nothing_is_made_up(self, family: str | None) -> None:
        assert rates.line_rate(family, 1) is None


class TestStart:
    def test_errors_end_it_and_warnings_are_logged_with_their_ids(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        node = machine(tmp_path, devices="infiniband/uverbs0")
        starting.before_opening(ConnectorSettings(provider="efa"), FakeDevice(), node)
        assert "[accelerator.environment]" in caplog.text
        assert "[fabric.shm]" not in caplog.text
        bare = machine(tmp_path / "bare")
        with pytest.raises(ConfigError, match=r"no EFA device.*\[host.infiniband\]$"):
            starting.before_opening(ConnectorSettings(provider="efa"), HostAccelerator(), bare)
        starting.before_opening(ConnectorSettings(provider="tcp"), HostAccelerator(), bare)
        starting.before_opening(ConnectorSettings(provider="efa", transport="nixl"), HostAccelerator(), bare)

    def test_what_is_fine_is_not_said(self, caplog: pytest.LogCaptureFixture) -> None:
        starting.act([fine(Id.HOST_VLLM, "all well"), warning(Id.HOST_PORTS, "so so", "mend it")])
        assert caplog.messages == ["so so; mend it [host.ports]"]
