"""Checks of settings, files, limits and variables, on machines that the tests make."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv import versions
from neuron_pushkv.config import ConnectorSettings, FleetSettings, parse
from neuron_pushkv.doctor import configuration, environment, host
from neuron_pushkv.doctor.findings import Finding, Id, Level

from .machines import machine

TCP, EFA = ConnectorSettings(provider="tcp"), ConnectorSettings(provider="efa")


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
            ({"FI_HMEM": "cuda,system"}, EFA, "neuron", Level.ERROR),
            ({"FI_HMEM": "neuron,system"}, EFA, "neuron", Level.OK),
        ],
    )
    def test_what_hides_the_network(
        self, values: dict[str, str], settings: ConnectorSettings, device: str, level: Level
    ) -> None:
        said(environment.fabric(values, settings, device), level, *(values if level is Level.ERROR else ()))

    def test_shared_memory_and_devices(self) -> None:
        off = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}
        said(environment.shm(off, EFA, "neuron"), Level.OK)
        said(environment.shm({}, EFA, "cuda"), Level.WARNING, "FI_EFA_ENABLE_SHM_TRANSFER is not set", "=0")
        said(environment.shm({}, EFA, "cpu"), Level.OK)
        said(environment.shm(off, ConnectorSettings(provider="shm"), "neuron"), Level.ERROR, "'efa'")


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
