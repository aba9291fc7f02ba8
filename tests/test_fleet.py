"""Fleets: commands, checks before the start, and supervision (with small servers in the engines' place)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv.config import FLEET_KEY_VARIABLE, FleetSettings, parse
from neuron_pushkv.errors import ConfigError, FleetError
from neuron_pushkv.fleet import Fleet, State, checks, keeper, reasons
from neuron_pushkv.fleet.commands import Command, argument, commands, fleet_router, locate_model

SERVER = """
import http.server, os, signal, subprocess, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["WHO"].encode())
    def log_message(self, *arguments): pass
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
# A child in a session of its own that a kill -9 of its parent does not reach: what an engine core is.
sleeper = "import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "did not happen in time"
        time.sleep(0.02)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if state_of(pid) not in {"", "Z"}]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def fleet_values(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "arguments": ["--dtype", "float32", "--kv-cache-memory-bytes", "64M"],
        "environment": {"OMP_NUM_THREADS": "1"},
        "engines": [
            {"name": "p0", "role": "prefill", "port": free_port(), "connector": connector()},
            {"name": "d0", "role": "decode", "port": free_port(), "connector": connector(), "arguments": ["--seed=3"]},
        ],
        "router": {"port": free_port()},
        **more,
    }


def connector() -> dict[str, Any]:
    return {"provider": "tcp", "port": free_port()}


def fleet_settings(**more: Any) -> FleetSettings:
    return parse(FleetSettings, fleet_values(**more), "test")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., tuple[Fleet, list[Command]]]]:
    """Makes fleets of small servers; stops them afterwards."""
    fleets = []

    def make(*more: str, count: int = 2, start_seconds: float = 20.0) -> tuple[Fleet, list[Command]]:
        members = []
        for name in ("a", "b")[:count]:
            port = free_port()
            arguments = (sys.executable, "-c", SERVER, str(port), *more)
            members.append(Command(name, arguments, {"WHO": name}, f"http://127.0.0.1:{port}", "/health"))
        fleet = Fleet(fleet_settings(start_seconds=start_seconds), tmp_path, grace_seconds=1.0)
        fleets.append(fleet)
        return fleet, members

    yield make
    for fleet in fleets:
        fleet.stop()


class TestCommands:
    def test_engine_gets_common_then_own_arguments_and_the_connector(self, tmp_path: Path) -> None:
        settings = fleet_settings()
        prefill, decode, router = commands(settings, str(tmp_path), tmp_path)
        assert prefill.arguments[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
        assert decode.arguments[-5:] == ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--seed=3")
        transfer = json.loads(argument(prefill.arguments, "--kv-transfer-config") or "")
        assert transfer == {
            "kv_connector": "PushKVConnector",
            "kv_connector_module_path": "neuron_pushkv.connector.connector",
            "kv_role": "kv_both",
            "engine_id": "p0",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"provider": "tcp", "port": settings.engines[0].connector.port},  # type: ignore[union-attr]
        }
        assert prefill.environment["OMP_NUM_THREADS"] == "1"
        assert router.ready_path == "/ready"

    def test_undivided_engine_has_no_connector(self, tmp_path: Path) -> None:
        settings = fleet_settings(engines=[{"name": "u0", "role": "undivided", "port": free_port()}], router=None)
        (command,) = commands(settings, "some/model", tmp_path)
        assert argument(command.arguments, "--kv-transfer-config") is None
        assert FLEET_KEY_VARIABLE not in command.environment

    def test_fresh_key_reaches_all_and_stands_nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(FLEET_KEY_VARIABLE, raising=False)
        processes = commands(fleet_settings(), "some/model", tmp_path)
        keys = {command.environment[FLEET_KEY_VARIABLE] for command in processes}
        assert len(keys) == 1
        (key,) = keys
        assert len(key) == 64
        assert not any(key in text for command in processes for text in command.arguments)
        assert not any(key in file.read_text() for file in tmp_path.iterdir())

    def test_key_from_settings_stands_on_no_command_line(self, tmp_path: Path) -> None:
        secret = "a very secret thing"
        values = fleet_values()
        for engine in values["engines"]:
            engine["connector"]["fleet_key"] = secret
        values["router"]["fleet_key"] = secret
        processes = commands(parse(FleetSettings, values, "test"), "some/model", tmp_path)
        assert {command.environment[FLEET_KEY_VARIABLE] for command in processes} == {secret}
        assert not any(secret in text for command in processes for text in command.arguments)
        assert secret not in (tmp_path / "router.yaml").read_text()

    def test_router_takes_the_fleets_own_engines(self) -> None:
        settings = fleet_settings()
        router = fleet_router(settings)
        assert router is not None
        assert router.prefill == (f"http://127.0.0.1:{settings.engines[0].port}",)
        assert router.decode_push == (f"127.0.0.1:{settings.engines[1].connector.port}",)  # type: ignore[union-attr]


class TestChecks:
    def test_model_folder_is_absent(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"model folder .*nowhere does not exist; set `model`"):
            locate_model(fleet_settings(model=str(tmp_path / "nowhere")))

    def test_model_folder_holds_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            locate_model(fleet_settings(model=str(tmp_path)))

    def test_hub_name_is_left_alone(self) -> None:
        assert locate_model(fleet_settings(model="some/model")) == "some/model"

    def test_core_is_not_to_be_had(self) -> None:
        settings = fleet_settings(
            engines=[{"name": "u0", "role": "undivided", "port": free_port(), "cores": [100_000]}], router=None
        )
        with pytest.raises(ConfigError, match=r"engine u0 is to run on core 100000, but only cores .* are to be had"):
            checks.check_cores(settings)

    def test_port_is_taken(self) -> None:
        settings = fleet_settings()
        assert settings.engines[1].connector
        port = settings.engines[1].connector.port
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ConfigError, match=rf"the connector of engine d0 can't listen on 127\.0\.0\.1:{port} \(addr"),
        ):
            checks.check(settings, "some/model")

    def test_memory_is_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "available_bytes", lambda: 1 << 30)
        with pytest.raises(ConfigError, match=r"memory is short: 2 engines need about 3\.\d GiB and 1\.0 GiB are"):
            checks.check_memory(fleet_settings(), "some/model")

    def test_workers_and_cache_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "_computes_on_host", lambda: True)
        one = fleet_settings()
        two = fleet_settings(arguments=["--tensor-parallel-size=2", "--kv-cache-memory-bytes", "1G"])
        more = checks.engine_bytes(two, two.engines[0], "m") - checks.engine_bytes(one, one.engines[0], "m")
        assert more == checks.WORKER_BYTES + 2 * (1 << 30) - (64 << 20)

    def test_vllm_is_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="vLLM is not installed"):
            checks.check(fleet_settings(), "some/model")


class TestReasons:
    @pytest.mark.parametrize(
        ("line", "status", "expected"),
        [
            ("OSError: [Errno 98] Address already in use", 1, "its port is taken"),
            (
                "api_server.py: error: unrecognized arguments: --nonsense 3",
                2,
                "bad argument: unrecognized arg",
            ),
            ("OSError: Can't load the configuration of '/x'.", 1, "the model is missing"),
            ("ModuleNotFoundError: No module named 'cffi'", 1, "the Python package cffi is not installed"),
            ("(EngineCore pid=3) ERROR 01-02 03:04:05 [core.py:9] MemoryError", 1, "memory is short"),
            ("neuron_pushkv.errors.ProviderMismatch: asked for efa, found tcp", 1, "asked for efa, found tcp"),
            ("pushkv: port 8000 is used twice", 2, "port 8000 is used twice"),
            (
                "ValueError: block size 7 is odd\nRuntimeError: Engine core initialization failed.",
                1,
                "ValueError: bl",
            ),
            ("working\nworking on", 137, r"killed \(signal 9\)"),
            ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", 1, "engine core has died"),
            ("working", 139, "ended by signal 11"),
            ("one\ntwo", 3, r"status 3; its last lines were:\nstarting\none\ntwo"),
        ],
    )
    def test_reason(self, tmp_path: Path, line: str, status: int, expected: str) -> None:
        log = tmp_path / "log"
        log.write_text(f"INFO 01-02 03:04:05 [x.py:1] starting\n{line}\n")
        text = reasons.reason(log, status)
        assert re.search(expected, text), text

    def test_only_the_end_of_a_long_log_is_read(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("Address already in use\n" + "x" * 79 + "\n" * 1 + ("y" * 79 + "\n") * 2000)
        assert "status 1" in reasons.reason(log, 1)


class TestSupervision:
    def test_ready_then_stopped_without_a_trace(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers()
        seen: list[list[State]] = []
        fleet.start_commands(members)
        fleet.wait_ready(lambda states: seen.append(list(states)))
        assert [state.ready for state in seen[-1]] == [True, True]
        pids = fleet.processes("a") + fleet.processes("b")
        assert len(pids) == 4
        fleet.stop()
        assert alive(pids) == []

    def test_one_that_ignores_sigterm_is_killed(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers("deaf", count=1)
        fleet.start_commands(members)
        fleet.wait_ready()
        pids = fleet.processes("a")
        begun = time.monotonic()
        fleet.stop()
        assert alive(pids) == []
        assert 1.0 <= time.monotonic() - begun < 5.0

    def test_death_while_starting_names_the_reason(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers()
        with socket.create_server(("127.0.0.1", int(members[1].arguments[3]))):
            fleet.start_commands(members)
            with pytest.raises(FleetError, match=r"b has ended: its port is taken.*\(log: .*b\.log\)"):
                fleet.wait_ready()

    def test_never_ready(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers(count=1, start_seconds=0.5)
        silent = Command("a", (sys.executable, "-c", "import time; time.sleep(600)"), {}, members[0].url, "/health")
        fleet.start_commands([silent])
        with pytest.raises(FleetError, match=r"not ready after 0\.5 s: a; see the logs"):
            fleet.wait_ready()

    def test_members_stay_on_their_cores(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers()
        allowed = os.sched_getaffinity(0)
        first = replace(members[0], cores=(min(allowed),))
        fleet.start_commands([first, members[1]])
        fleet.wait_ready()
        assert {tuple(os.sched_getaffinity(pid)) for pid in fleet.processes("a")} == {(min(allowed),)}
        assert os.sched_getaffinity(fleet.processes("b")[0]) == allowed
        assert os.sched_getaffinity(0) == allowed

    def test_later_death_is_reported_and_its_orphans_end(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers()
        fleet.start_commands(members)
        fleet.wait_ready()
        parent, child = fleet.processes("a")
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(FleetError, match=r"a has ended: it was killed \(signal 9\)"):
            fleet.watch()
        assert alive([child]) == []

    def test_killed_member_starts_again_under_its_name(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers()
        fleet.start_commands(members)
        fleet.wait_ready()
        pids, others = fleet.processes("a"), fleet.processes("b")
        fleet.kill("a")
        assert alive(pids) == []
        fleet.restart("a")
        fleet.wait_ready()
        assert fleet.processes("b") == others

    def test_command_that_can_not_be_run(self, servers: Callable[..., Any]) -> None:
        fleet, members = servers(count=1)
        fleet.start_commands([Command("a", ("/nowhere/at-all",), {}, members[0].url, "/health")])
        with pytest.raises(FleetError, match="/nowhere/at-all: No such file or directory"):
            fleet.wait_ready()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    def test_nothing_outlives_the_supervisor(self, tmp_path: Path, number: signal.Signals) -> None:
        port = free_port()
        program = f"""
import sys, time
from pathlib import Path
from neuron_pushkv.config import FleetSettings
from neuron_pushkv.fleet import Fleet
from neuron_pushkv.fleet.commands import Command
settings = FleetSettings(model="m", engines=[dict(name="a", role="undivided", port={port})])
fleet = Fleet(settings, Path({str(tmp_path)!r}), grace_seconds=1.0)
fleet.start_commands([Command("a", (sys.executable, "-c", {SERVER!r}, "{port}"), {{"WHO": "a"}},
                              "http://127.0.0.1:{port}", "/health")])
fleet.wait_ready()
print("ready", flush=True)
fleet.watch()
"""
        supervisor = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert supervisor.stdout
        with supervisor.stdout:
            assert supervisor.stdout.readline() == b"ready\n"
            below = keeper.descendants(supervisor.pid)
            assert len(below) == 3  # the keeper, the server, its child
            supervisor.send_signal(number)
            supervisor.wait(10)
            wait_for(lambda: not alive(below))
