"""The command line: what it prints, and that bad input ends in one line and status 2."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result

from neuron_pushkv import cli
from neuron_pushkv.config import FLEET_KEY_VARIABLE, load_fleet

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
FLEET: dict[str, Any] = {
    "model": "some/model",
    "engines": [{"name": "p0", "role": "prefill", "port": 8100, "connector": {"provider": "tcp"}}],
}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def write(folder: Path, **more: Any) -> str:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({**FLEET, **more}))
    return str(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid_and_print_as_such(path: Path, tmp_path: Path) -> None:
    result = call("config", str(path))
    assert result.exit_code == 0
    again = tmp_path / "again.yaml"
    again.write_text(result.stdout)
    assert load_fleet(again).engines == load_fleet(path).engines


def test_secrets_are_masked(tmp_path: Path) -> None:
    engine = {**FLEET["engines"][0], "connector": {"provider": "tcp", "fleet_key": "hush hush"}}
    path = write(tmp_path, engines=[engine], environment={"HF_TOKEN": "hush hush", "OMP_NUM_THREADS": "1"})
    result = call("config", path)
    assert "hush" not in result.output
    shown = yaml.safe_load(result.stdout)
    assert shown["environment"] == {"HF_TOKEN": cli.MASK, "OMP_NUM_THREADS": "1"}
    assert shown["engines"][0]["connector"]["fleet_key"] == cli.MASK
    assert shown["engines"][0]["connector"]["fleet_key_file"] is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"modle": "x"}, "unknown setting 'modle'; known here: arguments, engines,"),
        ({"engines": []}, "engines: "),
        ({"engines": [{**FLEET["engines"][0], "port": 14600}]}, "port 14600 is used twice"),
        ({"model": "/no/such/folder"}, "model folder /no/such/folder does not exist; set `model`"),
    ],
)
@pytest.mark.parametrize("command", ["up", "demo"])
def test_bad_fleet_file_is_one_line_and_status_2(
    tmp_path: Path, command: str, change: dict[str, Any], sentence: str
) -> None:
    result = call(command, write(tmp_path, **change), "--logs", str(tmp_path / "logs"))
    if command == "demo" and "model" in change:
        sentence = "the demo needs exactly one decode engine"
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("pushkv: ")
    assert sentence in line


def test_absent_fleet_file() -> None:
    result = call("up", "/no/such/fleet.yaml")
    assert (result.exit_code, result.stderr) == (
        2,
        "pushkv: /no/such/fleet.yaml can't be read: No such file or directory\n",
    )


@pytest.mark.parametrize("text", ["- a list", "just text", "", "{", "a: \x00"])
@pytest.mark.parametrize("command", ["up", "router", "config"])
def test_nonsense_in_a_file_is_one_line(tmp_path: Path, command: str, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    result = call(command, str(path))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("pushkv: ")


def test_up_refuses_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        engine = {**FLEET["engines"][0], "port": port}
        result = call("up", write(tmp_path, engines=[engine]), "--logs", str(tmp_path / "logs"))
    assert result.exit_code == 2
    assert f"engine p0 can't listen on 127.0.0.1:{port} (address already in use); end what uses it" in result.stderr


class TestRouter:
    def test_options_go_before_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import neuron_pushkv.router

        served: list[Any] = []
        monkeypatch.setattr(neuron_pushkv.router, "serve", served.append)
        path = tmp_path / "router.yaml"
        path.write_text("port: 8123\nprefill: [http://a:1]\nprefill_push: ['a:2']\n")
        options = ["--port", "8124", "--decode", "http://b:1", "--decode-push", "b:2"]
        assert call("router", str(path), *options).exit_code == 0
        (settings,) = served
        assert settings.port == 8124
        assert (settings.prefill, settings.decode, settings.decode_push) == (("http://a:1",), ("http://b:1",), ("b:2",))

    def test_bad_option(self) -> None:
        result = call("router", "--prefill", "http://a:1")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "pushkv: router: prefill_push must list one host:port for each of prefill's 1 URLs\n"

    def test_serves_until_sigterm(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        command = [sys.executable, "-m", "neuron_pushkv.cli", "router", "--port", str(port)]
        for role in ("prefill", "decode"):
            command += [f"--{role}", "http://127.0.0.1:9", f"--{role}-push", "127.0.0.1:9"]
        with (tmp_path / "log").open("wb") as log:
            router = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, FLEET_KEY_VARIABLE: "a key of this fleet"}
            )
        try:
            give_up = time.monotonic() + 20
            while True:
                try:
                    assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
                    break
                except httpx.TransportError:
                    assert time.monotonic() < give_up, (tmp_path / "log").read_text()
                    assert router.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(0.05)
            assert httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 503
            router.send_signal(signal.SIGTERM)
            assert router.wait(15) in {0, -signal.SIGTERM}
        finally:
            router.kill()
            router.wait()
        assert "Traceback" not in (tmp_path / "log").read_text()
