"""Checks of settings, files, limits and variables, on machines that the tests make."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv import versions
from neuron_pushkv.config import ConnectorSettings, FleetSettings, parse
from neuron_pushkv.doctor import configuration, environment, host
from neuron_pushkv.doctor.examination import at_start
from neuron_pushkv.doctor.findings import Finding, Id, Level

from .machines import machine

TCP, EFA = ConnectorSettings(provider="tcp"), ConnectorSettings(provider="efa")
BOUNCED = ConnectorSettings(provider="efa", bounce="always")
MAPPED = {"NEURON_RT_MAP_HBM": "1"}


def said(finding: Finding, level: Level, *texts: str) -> None:
    """That level, and whatever isn't fine says what to do."""
    assert finding.level is level, finding
    assert bool(finding.fix) == (level is not Level.OK)
    for text in texts:
        assert text in finding.sentence


class TestHost:
    def test_what_only_efa_needs_is_asked_of_efa_only(self, tmp_path: Path) -> None:
        bare = machine(tmp_path, locked=8 << 20)
        for check in (host.infiniband, host.memlock, host.hugepages):
            said(check(bare, "tcp"), Level.OK)
        said(host.infiniband(bare, "efa"), Level.ERROR, "no /dev/infiniband/uverbs*")
        said(host.memlock(bare, "efa-direct"), Level.ERROR, "0.00781 GiB", "unlimited")
        said(host.hugepages(bare, "efa"), Level.WARNING, "no huge page")

    def test_an_efa_node_in_order(self, tmp_path: Path) -> None:
        node = machine(tmp_path, devices="infiniband/uverbs0 infiniband/uverbs1", huge=5128)
        for check in (host.infiniband, host.memlock, host.hugepages):
            said(check(node, "efa"), Level.OK)
        assert host.infiniband(node, "efa").evidence == {"devices": ("uverbs0", "uverbs1")}

    def test_a_device_that_is_shut_matters_only_if_all_are(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node = machine(tmp_path, devices="infiniband/uverbs0 infiniband/uverbs1")
        shut = {"uverbs1"}
        monkeypatch.setattr(host.os, "access", lambda path, mode: Path(path).name not in shut)
        some = host.infiniband(node, "efa")
        said(some, Level.WARNING, "uverbs1 of the 2 devices", "permissions")
        assert some.evidence["shut"] == ["uverbs1"]
        shut.add("uverbs0")
        said(host.infiniband(node, "efa"), Level.ERROR, "uverbs0, uverbs1 of the 2 devices")

    def test_a_limit_that_leaves_room_for_something_is_a_warning(self, tmp_path: Path) -> None:
        said(host.memlock(machine(tmp_path, locked=4 << 30), "efa"), Level.WARNING, "4 GiB")

    def test_ports(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            said(
                host.port("the router", "127.0.0.1", port), Level.ERROR, f"the router can't listen on 127.0.0.1:{port}"
            )
        said(host.port("the router", "127.0.0.1", port), Level.OK)
        said(host.port("it", "192.0.2.1", 4000), Level.ERROR, "cannot assign requested address")

    @pytest.mark.parametrize(
        ("version", "level"),
        [("0.23.1", Level.ERROR), ("0.24.0", Level.OK), ("0.32.4+cpu", Level.OK), ("0.33.0", Level.WARNING)],
    )
    def test_vllm_by_its_version(self, monkeypatch: pytest.MonkeyPatch, version: str, level: Level) -> None:
        monkeypatch.setattr(versions, "vllm", lambda: ("vllm", version))
        monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: object())
        said(host.vllm(needed=True), level, version)

    @pytest.mark.parametrize(("needed", "level"), [(True, Level.ERROR), (False, Level.WARNING)])
    def test_no_vllm(self, monkeypatch: pytest.MonkeyPatch, needed: bool, level: Level) -> None:
        monkeypatch.setattr(versions, "vllm", lambda: ("", ""))
        said(host.vllm(needed), level, "not installed")

    def test_a_list_of_plugins_without_ours(self, tmp_path: Path) -> None:
        shut = host.connector(machine(tmp_path, VLLM_PLUGINS="neuron"))
        said(shut, Level.WARNING, "VLLM_PLUGINS is 'neuron'", "kv_connector_module_path")
        assert host.connector(machine(tmp_path, VLLM_PLUGINS="neuron,pushkv")).level is Level.OK


class TestAcceleratorEnvironment:
    def test_neuron(self) -> None:
        said(environment.accelerator({}, "neuron"), Level.WARNING, "NEURON_RT_MAP_HBM is not set")
        said(environment.accelerator({"NEURON_RT_MAP_HBM": "0"}, "neuron"), Level.WARNING, "is 0")
        mapped = {"NEURON_RT_MAP_HBM": "1"}
        said(environment.accelerator(mapped, "neuron"), Level.WARNING, "claims every core")
        said(environment.accelerator({**mapped, "NEURON_RT_VISIBLE_CORES": "8-15"}, "neuron"), Level.OK)
        said(environment.accelerator({**mapped, "NEURON_VISIBLE_DEVICES": "8-15"}, "neuron"), Level.OK)
        said(environment.accelerator({**mapped, "NEURON_RT_NUM_CORES": "1"}, "neuron"), Level.OK)

    @pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
    def test_cuda(self, name: str) -> None:
        value = "max_split_size_mb:64, expandable_segments: True"
        said(environment.accelerator({name: value}, "cuda"), Level.ERROR, name, "expandable")
        said(environment.accelerator({name: "expandable_segments:False"}, "cuda"), Level.OK)

    def test_host_memory_asks_for_nothing(self) -> None:
        said(environment.accelerator({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "cpu"), Level.OK)


class TestFabricEnvironment:
    @pytest.mark.parametrize(
        ("values", "settings", "device", "level"),
        [
            ({}, EFA, "neuron", Level.OK),
            ({"FI_PROVIDER": "tcp"}, EFA, "cpu", Level.ERROR),
            ({"FI_PROVIDER": "efa"}, EFA, "cpu", Level.OK),
            ({"FI_PROVIDER": "tcp,efa"}, EFA, "cpu", Level.OK),
            ({"FI_PROVIDER": "^psm3"}, EFA, "cpu", Level.OK),
            ({"FI_PROVIDER": "efa"}, TCP, "cpu", Level.ERROR),
            ({"FI_EFA_USE_DEVICE_RDMA": "0"}, EFA, "cpu", Level.ERROR),
            ({"FI_EFA_USE_DEVICE_RDMA": "0"}, TCP, "cpu", Level.OK),
            ({"FI_HMEM_DISABLE_P2P": "1"}, EFA, "cuda", Level.ERROR),
            ({"FI_HMEM_DISABLE_P2P": "1"}, EFA, "cpu", Level.OK),
            ({"FI_HMEM_DISABLE_P2P": "1"}, EFA, "neuron", Level.ERROR),
            ({"FI_HMEM_DISABLE_P2P": "1"}, BOUNCED, "neuron", Level.OK),
            ({"FI_HMEM_DISABLE_P2P": "1"}, BOUNCED, "cuda", Level.OK),
            ({"FI_HMEM": "cuda,system"}, EFA, "neuron", Level.ERROR),
            ({"FI_HMEM": "cuda,system"}, BOUNCED, "neuron", Level.OK),
            ({"FI_HMEM": "neuron,system"}, EFA, "neuron", Level.OK),
        ],
    )
    def test_what_hides_the_network(
        self, values: dict[str, str], settings: ConnectorSettings, device: str, level: Level
    ) -> None:
        told = values if level is Level.ERROR else ()
        said(environment.fabric({**MAPPED, **values}, settings, device), level, *told)

    @pytest.mark.parametrize("values", [{"FI_HMEM_DISABLE_P2P": "1"}, {"FI_HMEM": "system"}])
    def test_memory_that_is_not_mapped_is_not_shown(self, values: dict[str, str]) -> None:
        said(environment.fabric({**MAPPED, **values}, EFA, "neuron"), Level.ERROR)
        said(environment.fabric(values, EFA, "neuron"), Level.OK)
        said(environment.fabric({**values, "NEURON_RT_MAP_HBM": "0"}, EFA, "neuron"), Level.OK)
        said(environment.fabric(values, EFA, "cuda"), Level.ERROR)  # Its memory always has addresses.

    def test_shared_memory_is_turned_off_by_us_but_not_in_nixl(self) -> None:
        nixl = ConnectorSettings(provider="efa", transport="nixl", nixl_backend="LIBFABRIC")
        said(environment.shm({}, EFA, "cuda"), Level.OK, "turned off by us")
        said(environment.shm({"FI_EFA_ENABLE_SHM_TRANSFER": "1"} | MAPPED, EFA, "neuron"), Level.OK, "by us")
        said(environment.shm({}, nixl, "cuda"), Level.WARNING, "FI_EFA_ENABLE_SHM_TRANSFER is not set", "=0")
        said(environment.shm({"FI_EFA_ENABLE_SHM_TRANSFER": "0"}, nixl, "cuda"), Level.OK)
        said(environment.shm({}, nixl, "cpu"), Level.OK)
        said(environment.shm({}, nixl.model_copy(update={"bounce": "always"}), "cuda"), Level.OK)

    def test_the_cpu_can_not_copy_neurons_memory(self) -> None:
        settings = ConnectorSettings(provider="shm")
        said(environment.shm(MAPPED, settings, "neuron"), Level.ERROR, "'efa'")
        said(environment.shm({}, settings, "neuron"), Level.OK)
        said(environment.shm(MAPPED, ConnectorSettings(provider="shm", bounce="always"), "neuron"), Level.OK)


class TestNixl:
    """What moves KV there has another way to the network: nothing about libfabric may end such an engine."""

    ABOUT = (Id.FABRIC_ENVIRONMENT, Id.FABRIC_SHM, Id.HOST_MEMLOCK, Id.HOST_INFINIBAND)

    def levels(self, folder: Path, settings: ConnectorSettings, device: str = "cuda") -> list[Level]:
        broken = machine(folder, locked=8 << 20, FI_PROVIDER="tcp")
        found = {finding.id: finding for finding in at_start(broken, settings, device)}
        return [found[check].level for check in self.ABOUT]

    def test_libfabric_by_itself(self, tmp_path: Path) -> None:
        assert self.levels(tmp_path, EFA) == [Level.ERROR, Level.OK, Level.ERROR, Level.ERROR]

    def test_ucx(self, tmp_path: Path) -> None:
        asked = ConnectorSettings(provider="efa", transport="nixl")
        assert self.levels(tmp_path, asked) == [Level.OK] * 4
        assert self.levels(tmp_path, asked, "cpu") == [Level.OK] * 4

    def test_nixl_that_is_chosen_by_us(self, tmp_path: Path) -> None:
        broken = machine(tmp_path, locked=8 << 20, FI_PROVIDER="tcp")
        settings = ConnectorSettings(provider="shm")
        assert {finding.level for finding in at_start(broken, settings, "cuda")} == {Level.OK}
        assert Level.ERROR in {finding.level for finding in at_start(broken, settings, "cpu")}

    def test_its_backend_over_libfabric_is_warned(self, tmp_path: Path) -> None:
        settings = ConnectorSettings(provider="efa", transport="nixl", nixl_backend="LIBFABRIC")
        assert self.levels(tmp_path, settings) == [Level.WARNING] * 4


class TestKey:
    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "key"
        file.write_text("0123456789abcdef0123456789abcdef\n")
        file.chmod(0o600)
        settings = ConnectorSettings(host="10.0.1.10", fleet_key_file=file)
        said(configuration.key(settings), Level.OK, "fleet_key_file")
        file.chmod(0o644)
        said(configuration.key(settings), Level.WARNING, "read by others", f"chmod 600 {file}")
        file.write_text("short")
        file.chmod(0o600)
        said(configuration.key(settings), Level.WARNING, "5 bytes")
        file.unlink()
        said(configuration.key(settings), Level.ERROR, "can't be read")

    def test_none_is_needed_on_loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PUSHKV_FLEET_KEY", raising=False)
        said(configuration.key(TCP), Level.OK, "no fleet key")
        monkeypatch.setenv("PUSHKV_FLEET_KEY", "k" * 32)
        said(configuration.key(TCP), Level.OK, "PUSHKV_FLEET_KEY")


@pytest.mark.parametrize(
    ("more", "level", "text"),
    [
        ({}, Level.OK, ""),
        ({"keep_unclaimed_seconds": 5}, Level.WARNING, "keep_unclaimed_seconds is 5"),
        ({"no_progress_seconds": 4}, Level.WARNING, "no_progress_seconds (4)"),
        ({"quarantine_seconds": 0}, Level.WARNING, "quarantine_seconds is 0"),
        ({"quarantine_seconds": 0, "provider": "tcp"}, Level.OK, ""),
    ],
)
def test_deadlines(more: dict[str, Any], level: Level, text: str) -> None:
    said(configuration.deadlines(ConnectorSettings(**more)), level, text)


def fleet(*engines: dict[str, Any]) -> FleetSettings:
    listed = [
        {
            "name": f"e{number}",
            "role": "prefill",
            "port": 8100 + number,
            "connector": {"provider": "efa", "port": 14600 + 10 * number},
            **engine,
        }
        for number, engine in enumerate(engines)
    ]
    return parse(FleetSettings, {"model": "m", "engines": listed}, "here")


class TestFleet:
    def test_neuron_cores_belong_to_one_engine(self) -> None:
        cores = [{"environment": {"NEURON_RT_VISIBLE_CORES": text}} for text in ("0-7", "8-15", "7,16")]
        apart = list(configuration.engines(fleet(*cores[:2]), {}))
        assert {finding.level for finding in apart} == {Level.OK}
        shared = [f for f in configuration.engines(fleet(*cores), {}) if f.id is Id.ACCELERATOR_ENVIRONMENT]
        said(shared[0], Level.ERROR, "engines e0 and e2 both see Neuron core 7")

    def test_what_an_engine_is_started_with(self) -> None:
        own = {"arguments": ["--kv-transfer-config={}"]}
        findings = {f.level: f for f in configuration.engines(fleet(own, {"load_failure_policy": "fail"}), {})}
        said(findings[Level.ERROR], Level.ERROR, "engine e0", "--kv-transfer-config")
        said(findings[Level.WARNING], Level.WARNING, "engine e1", "'recompute'")

    @pytest.mark.parametrize(
        ("text", "cores"), [("", ()), ("3", (3,)), ("0-3", (0, 1, 2, 3)), ("0,2-3, 9", (0, 2, 3, 9)), ("x,-1,1-y", ())]
    )
    def test_how_cores_are_named(self, text: str, cores: tuple[int, ...]) -> None:
        assert configuration.neuron_cores({"NEURON_RT_VISIBLE_CORES": text}) == cores
        assert configuration.neuron_cores({"NEURON_VISIBLE_DEVICES": text}) == cores

    def test_a_workers_own_core_counts_before_its_engines(self) -> None:
        both = {"NEURON_VISIBLE_DEVICES": "8-15", "NEURON_RT_VISIBLE_CORES": "9"}
        assert configuration.neuron_cores(both) == (9,)
