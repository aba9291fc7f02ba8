"""The fleet files that are shipped: they parse, and their commands are what the machines need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuron_pushkv.config import ConnectorSettings, FleetSettings, is_loopback, load_fleet
from neuron_pushkv.doctor import configuration, environment
from neuron_pushkv.doctor.findings import Level
from neuron_pushkv.fleet.commands import Command, argument, commands

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
KEY_FILE = "/etc/pushkv/fleet.key"
SETUPS = {
    "local-cpu.yaml",
    "trn2-1p1d/prefill.yaml",
    "trn2-1p1d/decode.yaml",
    "trn2-4p4d-single-node/fleet.yaml",
    "p5en-1p1d/prefill.yaml",
    "p5en-1p1d/decode.yaml",
    "mixed-trn2-prefill-p5en-decode/prefill.yaml",
    "mixed-trn2-prefill-p5en-decode/decode.yaml",
}


def load(path: Path, folder: Path) -> FleetSettings:
    """With a key of ours where the file names one of the machines'."""
    key = folder / "fleet.key"
    key.write_text("0123456789abcdef0123456789abcdef")
    key.chmod(0o600)
    copy = folder / path.name
    copy.write_text(path.read_text().replace(KEY_FILE, str(key)))
    return load_fleet(copy)


def device(settings: FleetSettings, command: Command) -> str:
    if any(name.startswith("NEURON_") for name in command.environment):
        return "neuron"
    return "cpu" if settings.model == "tiny" else "cuda"


def test_all_setups_are_there() -> None:
    assert {str(path.relative_to(CONFIGS)) for path in FILES} == SETUPS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_engine_is_started_as_its_machine_needs(path: Path, tmp_path: Path) -> None:
    settings = load(path, tmp_path)
    started = {command.name: command for command in commands(settings, "some/model", tmp_path)}
    for engine in settings.engines:
        command, connector = started[engine.name], engine.connector
        assert connector is not None
        transfer = json.loads(argument(command.arguments, "--kv-transfer-config") or "")
        assert transfer["kv_connector"] == "PushKVConnector"
        assert transfer["kv_connector_module_path"] == "neuron_pushkv.connector.connector"
        assert transfer["kv_role"] == "kv_both"
        assert transfer["kv_load_failure_policy"] == "recompute"
        assert ConnectorSettings.model_validate(transfer["kv_connector_extra_config"]) == connector
        assert argument(command.arguments, "--block-size") == "32"
        kind = device(settings, command)
        assert connector.provider == ("tcp" if kind == "cpu" else "efa")
        for host in (engine.host, connector.host):
            assert is_loopback(host) or connector.fleet_key_file is not None
        for finding in (
            environment.accelerator(command.environment, kind),
            environment.fabric(command.environment, connector, kind),
            environment.shm(command.environment, connector, kind),
            *configuration.engines(settings, {}),
        ):
            assert finding.level is Level.OK, finding
        if kind == "cuda":
            assert command.environment["VLLM_KV_CACHE_LAYOUT"] == "HND"
        if kind == "neuron":
            cores = configuration.neuron_cores(command.environment)
            assert len(cores) == int(argument(command.arguments, "--tensor-parallel-size") or "0")
            assert max(cores) < 64  # logical cores of a trn2.48xlarge at LNC 2


@pytest.mark.parametrize("folder", ["trn2-1p1d", "p5en-1p1d", "mixed-trn2-prefill-p5en-decode"])
def test_the_files_of_two_nodes_belong_together(folder: str, tmp_path: Path) -> None:
    prefill, decode = (load(CONFIGS / folder / f"{role}.yaml", tmp_path) for role in ("prefill", "decode"))
    assert prefill.model == decode.model
    for name in ("--dtype", "--block-size", "--tensor-parallel-size"):
        assert argument(prefill.arguments, name) == argument(decode.arguments, name)
    router, engines = prefill.router, (prefill.engines[0], decode.engines[0])
    assert router is not None
    assert decode.router is None
    assert [engine.role for engine in engines] == ["prefill", "decode"]
    urls = [f"http://{engine.host}:{engine.port}" for engine in engines]
    pushes = [f"{engine.connector.host}:{engine.connector.port}" for engine in engines if engine.connector]
    assert [*router.prefill, *router.decode] == urls
    assert [*router.prefill_push, *router.decode_push] == pushes
    assert (
        engines[0].host.rpartition(".")[0] == engines[1].host.rpartition(".")[0]
    )  # in allowed_remote_hosts by default


def test_one_node_of_eight_engines_uses_every_core_once(tmp_path: Path) -> None:
    settings = load(CONFIGS / "trn2-4p4d-single-node/fleet.yaml", tmp_path)
    cores = [core for engine in settings.engines for core in configuration.neuron_cores(engine.environment)]
    assert sorted(cores) == list(range(64))
    for engine in settings.engines:
        # vllm-neuron refuses engines of several workers that are started with the runtime's own variable.
        assert "NEURON_RT_VISIBLE_CORES" not in {**settings.environment, **engine.environment}
        assert "NEURON_VISIBLE_DEVICES" in engine.environment
    assert [engine.role for engine in settings.engines] == ["prefill"] * 4 + ["decode"] * 4
