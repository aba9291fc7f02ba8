"""``pushkv doctor`` as people call it, most of it in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from neuron_pushkv import cli
from neuron_pushkv.config import FLEET_KEY_VARIABLE, ConnectorSettings, load_fleet
from neuron_pushkv.doctor import examination, worth
from neuron_pushkv.doctor.examination import Patient, examine
from neuron_pushkv.doctor.findings import Id, Level
from neuron_pushkv.fabric import discovery
from neuron_pushkv.transport.loopback import LoopbackNetwork, LoopbackTransport
from tests.engine.sides import Side, until

from .machines import machine
from .test_node import said

HOST = "127.0.0.1"
PATIENCE = 50.0
COMMAND = [sys.executable, "-W", "error", "-m", "neuron_pushkv.cli", "doctor", "--device", "cpu"]
needs_fabric = pytest.mark.skipif(discovery.in_wheel() is None, reason="needs the libfabric of the 'mpich' package")


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FI_", "PUSHKV_"))}
    return {**kept, **more}


def doctor(*arguments: str, **more: str) -> tuple[int, dict[str, Mapping[str, Any]], str]:
    """Exit status, findings by id, and what was said beside them."""
    command = [*COMMAND, "--json", *arguments]
    ran = subprocess.run(
        command, check=False, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE
    )
    found = json.loads(ran.stdout)["findings"] if ran.stdout else []
    return ran.returncode, {finding["id"]: finding for finding in found}, ran.stderr


def levels(
    found: Mapping[str, Mapping[str, Any]], *, but: tuple[str, ...] = ("host.vllm", "host.connector")
) -> set[str]:
    """Of all findings but those that depend on what else is installed here."""
    return {finding["level"] for check, finding in found.items() if check not in but}


@needs_fabric
@pytest.mark.timeout(180)
class TestProcesses:
    def test_tcp_is_fine_where_it_is_asked_for(self) -> None:
        status, found, stderr = doctor("--provider", "tcp", "--port", str(free_port()))
        assert levels(found) == {"ok"}, found
        assert status == {"ok": 0, "warning": 1}[max(finding["level"] for finding in found.values())]
        assert found["fabric.provider"]["evidence"] == {"asked": "tcp", "found": "tcp"}
        assert found["transfer.bytes"]["evidence"]["rounds"] == 3
        assert found["transfer.bandwidth"]["evidence"]["out_bytes_per_second"] > 0
        assert stderr == ""

    @pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="needs a machine without such cards")
    def test_efa_is_broken_where_there_is_none(self) -> None:
        status, found, _ = doctor("--port", str(free_port()))
        assert status == 2
        assert "provider 'efa' was asked for" in found["fabric.provider"]["what"]
        assert found["fabric.provider"]["level"] == found["host.infiniband"]["level"] == "error"
        assert "transfer.bytes" not in found

    def test_two_doctors_on_two_nodes(self, tmp_path: Path) -> None:
        key = tmp_path / "key"
        key.write_text("k" * 32)
        key.chmod(0o600)
        common = ["--provider", "tcp", "--fleet-key-file", str(key)]
        with serving(tmp_path, common) as (port, server):
            status, found, _ = doctor(*common, "--port", str(free_port()), "--peer", f"{HOST}:{port}")
            assert levels(found) == {"ok"}, found
            assert status in (0, 1)
            assert list(found)[-3:] == ["transfer.bytes", "transfer.bandwidth", "transfer.latency"]
            assert found["security.key"]["evidence"] == {"source": "fleet_key_file"}
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 128 + signal.SIGTERM
        log = (tmp_path / "log").read_text()
        assert "has tried out transfers" in log
        assert "Traceback" not in log


@contextmanager
def serving(folder: Path, arguments: list[str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*COMMAND, "--serve", "--port", str(port), *arguments],
            env=environment(PYTHONUNBUFFERED="1"),
            stdout=log,
            stderr=log,
        )
    try:
        give_up = time.monotonic() + PATIENCE
        while "waiting for others" not in (folder / "log").read_text():
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < give_up, (folder / "log").read_text()
            time.sleep(0.05)
        yield port, server
    finally:
        server.kill()
        server.wait()


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("--config", "/no/such.yaml"), "/no/such.yaml can't be read"),
            (("--provider", "carrier-pigeon"), "doctor: provider: "),
            (("--port", "0"), "doctor: port: "),
            (("--host", "10.0.1.10"), "a fleet key is needed"),
            (("--peer", "nowhere"), "--peer: 'nowhere' is not host:port"),
            (("--engine", "p0"), "name its file with --config"),
            (("--serve", "--json"), "--serve waits for others"),
            (("--serve", "--peer", "a:1"), "--serve waits for others"),
        ],
    )
    def test_one_sentence_and_status_2(
        self, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
    ) -> None:
        monkeypatch.delenv(FLEET_KEY_VARIABLE, raising=False)
        result = CliRunner().invoke(cli.main, ["doctor", *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert sentence in line

    @pytest.mark.parametrize("text", ["- a list", "{", "engines: 3", "modle: x"])
    def test_a_garbage_file(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        result = CliRunner().invoke(cli.main, ["doctor", "--config", str(path)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1

    def test_settings_twice_and_an_engine_that_is_not_there(self, tmp_path: Path) -> None:
        path = fleet_file(tmp_path, {})
        both = CliRunner().invoke(cli.main, ["doctor", "--config", path, "--provider", "tcp"])
        assert (both.exit_code, "--provider and --config are both given" in both.stderr) == (2, True)
        absent = CliRunner().invoke(cli.main, ["doctor", "--config", path, "--engine", "x"])
        assert (absent.exit_code, "no engine x; engines with one: p0" in absent.stderr) == (2, True)


def fleet_file(folder: Path, engine: dict[str, Any], port: int = 14600) -> str:
    path = folder / "fleet.yaml"
    connector = {"provider": "tcp", "port": port}
    first = {"name": "p0", "role": "prefill", "port": free_port(), "connector": connector, **engine}
    path.write_text(yaml.safe_dump({"model": "m", "engines": [first], "environment": {"FI_PROVIDER": "efa"}}))
    return str(path)


def test_a_fleet_files_engine_is_seen_with_its_environment(tmp_path: Path) -> None:
    settings = load_fleet(Path(fleet_file(tmp_path, {"environment": {"FI_HMEM": "system"}})))
    who = examination.patient(settings, None, ConnectorSettings(), "cpu")
    assert (who.name, who.settings.provider, who.device) == ("p0", "tcp", "cpu")
    found = {finding.id: finding for finding in examination.static(who)}
    said(found[Id.FABRIC_ENVIRONMENT], Level.ERROR, "FI_PROVIDER is 'efa'", "'tcp'")
    assert found[Id.CONFIG_ENGINE].level is Level.OK


@pytest.mark.parametrize(("cores", "ours", "others"), [("", "0", "1"), ("4-7", "4", "5"), ("4,9", "4", "9")])
def test_the_other_end_takes_another_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: str, ours: str, others: str
) -> None:
    named = {"NEURON_RT_VISIBLE_CORES": cores} if cores else {}
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "until it is set")
    who = Patient(ConnectorSettings(provider="tcp"), machine(tmp_path, **named), "neuron")
    examination.apply_environment(who, 0)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == ours
    other = replace(who, machine=machine(tmp_path, **examination._environment(who)))
    examination.apply_environment(other, 1)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == others


def test_what_libraries_print_is_not_taken_for_the_other_ends_answer() -> None:
    script = (
        "import contextlib, os\n"
        "from neuron_pushkv.doctor import opposite\n"
        "@contextlib.contextmanager\n"
        "def opened(who):\n"
        "    os.write(1, b'from C\\n')\n"
        "    print('from Python', flush=True)\n"
        "    yield None, None, []\n"
        "opposite.opened = opened\n"
        "opposite.main('cpu')\n"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    ran = subprocess.run(command, check=False, input="{}\n", capture_output=True, text=True, timeout=PATIENCE)
    assert (ran.returncode, ran.stdout) == (0, "no network\n"), ran.stderr
    assert ran.stderr.splitlines() == ["from C", "from Python"]


def test_a_port_that_the_engine_itself_has_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> tuple[None, list[Any]]:
        return None, []

    monkeypatch.setattr(examination.network, "open_network", no_network)
    monkeypatch.setattr(examination, "apply_environment", lambda who, place: None)
    settings = ConnectorSettings(provider="tcp", port=free_port())
    who = Patient(settings, machine(tmp_path), "cpu")
    with Side("running", LoopbackTransport(LoopbackNetwork()), settings):
        ports = until(
            lambda: [f for f in examine(who, []) if f.id is Id.HOST_PORTS and "runs at" in f.what], "it came up"
        )
        said(ports[0], Level.OK, "the connector runs at")
    with socket.create_server((HOST, settings.port)):
        (taken,) = [f for f in examine(replaced(who, connect_seconds=0.2), []) if f.id is Id.HOST_PORTS]
        said(taken, Level.ERROR, "can't listen on")


def replaced(who: Patient, **more: float) -> Patient:
    return Patient(who.settings.model_copy(update=more), who.machine, who.device)


METRICS = """
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0"} 1000.0
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_sum{engine="0"} 0.1
# TYPE vllm:pushkv_bytes counter
vllm:pushkv_bytes_total{direction="out"} 262144000.0
vllm:pushkv_bytes_total{direction="in"} 1.0
# TYPE vllm:pushkv_tokens counter
vllm:pushkv_tokens_total{direction="out"} 1000.0
"""


class TestWorth:
    @pytest.mark.parametrize(("rate", "level"), [(25e9, Level.OK), (1e9, Level.WARNING)])
    def test_moving_is_held_against_computing(self, rate: float, level: Level) -> None:
        found = worth.judge(METRICS, rate)
        assert found is not None
        said(found, level)
        assert found.evidence["compute_microseconds_per_token"] == 100.0
        assert found.evidence["move_microseconds_per_token"] == pytest.approx(262144 / rate * 1e6, rel=1e-3)
        assert found.evidence["bytes_per_token"] == 262144

    @pytest.mark.parametrize("text", ["", METRICS.replace("1000.0", "0.0"), METRICS.replace("pushkv", "other")])
    def test_nothing_is_known_before_something_was_served(self, text: str) -> None:
        assert worth.judge(text, 1e9) is None

    def test_no_engine_answers(self, tmp_path: Path) -> None:
        settings = load_fleet(Path(fleet_file(tmp_path, {})))
        said(worth.worth(settings, 1e9), Level.OK, "not known")
