"""Every fault in a setting is one sentence that names the place and says what is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv.config import (
    FLEET_KEY_VARIABLE,
    ConnectorSettings,
    FleetSettings,
    RouterSettings,
    Security,
    is_loopback,
    load_fleet,
    parse,
)
from neuron_pushkv.errors import ConfigError

ENGINE = {"name": "p", "role": "prefill", "port": 8100, "connector": {"provider": "tcp"}}
FLEET: dict[str, Any] = {"model": "tiny", "engines": [ENGINE]}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLEET_KEY_VARIABLE, raising=False)


def fault(settings: type[Any], values: Any) -> str:
    """The sentence that ``values`` are refused with."""
    with pytest.raises(ConfigError) as error:
        parse(settings, values, "here")
    sentence = str(error.value)
    assert sentence.startswith("here: ")
    assert "\n" not in sentence
    return sentence.removeprefix("here: ")


def test_defaults_work() -> None:
    settings = parse(ConnectorSettings, {}, "here")
    assert (settings.host, settings.port, settings.provider) == ("127.0.0.1", 14600, "efa")
    assert settings.key() is None
    assert parse(RouterSettings, {}, "here").port == 8000
    assert parse(FleetSettings, FLEET, "here").engines[0].connector is not None


def test_the_shipped_fleets_are_valid() -> None:
    files = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
    assert files
    for file in files:
        assert load_fleet(file).engines


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"prot": 1}, "unknown setting 'prot'; known here: "),
        ({"port": "x"}, "port: Input should be a valid integer, unable to parse string as an integer"),
        ({"port": 0}, "port: Input should be greater than or equal to 1"),
        ({"port": 65536}, "port: Input should be less than or equal to 65535"),
        ({"provider": "verbs"}, "provider: Input should be 'efa', 'efa-direct', 'tcp' or 'shm'"),
        ({"connect_seconds": 0}, "connect_seconds: Input should be greater than 0"),
        ({"connect_seconds": float("nan")}, "connect_seconds: Input should be a finite number"),
        ({"no_progress_seconds": float("inf")}, "no_progress_seconds: Input should be a finite number"),
        ({"fleet_key": ""}, "fleet_key: String should have at least 1 character"),
        ({"fleet_key": 12345}, "fleet_key: must be text; put 12345 in quotes"),
        ({"fleet_key": "k", "fleet_key_file": "f"}, "fleet_key and fleet_key_file are both set; keep one of them"),
        ({"allowed_remote_hosts": "10.0.0.0/8"}, "allowed_remote_hosts: Input should be a valid tuple"),
        (
            {"allowed_remote_hosts": ["10.0.0.0/33"]},
            "allowed_remote_hosts: '10.0.0.0/33' does not appear to be an IPv4 or IPv6 network",
        ),
        ("efa", "must be a mapping of settings to values"),
        (None, "must be a mapping of settings to values"),
    ],
)
def test_faults_of_a_connector(values: Any, sentence: str) -> None:
    assert fault(ConnectorSettings, values).startswith(sentence)


def test_an_unknown_setting_lists_all_that_are_known() -> None:
    sentence = fault(ConnectorSettings, {"hots": "x"})
    for name in ConnectorSettings.model_fields:
        assert name in sentence


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_a_reachable_host_needs_a_key(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = fault(ConnectorSettings, {"host": host})
    assert sentence == (
        f"host {host} can be reached from other machines, so a fleet key is needed: set fleet_key_file "
        "or PUSHKV_FLEET_KEY"
    )
    missing = tmp_path / "missing"
    assert fault(ConnectorSettings, {"host": host, "fleet_key_file": str(missing)}) == (
        f"fleet_key_file {missing} can't be read: No such file or directory"
    )
    assert parse(ConnectorSettings, {"host": host, "fleet_key": "k"}, "here").host == host
    monkeypatch.setenv(FLEET_KEY_VARIABLE, "k")
    assert parse(ConnectorSettings, {"host": host}, "here").host == host


def test_keys_come_from_the_setting_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("  from a file\n")
    assert Security().key() is None
    monkeypatch.setenv(FLEET_KEY_VARIABLE, "from the environment\n")
    assert Security().key() == b"from the environment"
    assert Security(fleet_key_file=file).key() == b"from a file"
    assert Security(fleet_key="from the setting").key() == b"from the setting"
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty; put the fleet's shared secret in it"):
        Security(fleet_key_file=file).key()


def test_a_key_does_not_show_in_logs() -> None:
    assert "hush" not in repr(ConnectorSettings(fleet_key="hush"))
    assert "hush" not in fault(ConnectorSettings, {"fleet_key": "hush", "port": 0})


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("localhost", True),
        ("LocalHost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_loopback(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"prefill": ["http://a:1"]}, "prefill_push must list one host:port for each of prefill's 1 URLs"),
        ({"decode_push": ["a:1"]}, "decode_push must list one host:port for each of decode's 0 URLs"),
        ({"request_seconds": -1}, "request_seconds: Input should be greater than 0"),
        ({"prefil": []}, "unknown setting 'prefil'; known here: connect_seconds, decode, decode_push, "),
    ],
)
def test_faults_of_a_router(values: Any, sentence: str) -> None:
    assert fault(RouterSettings, values).startswith(sentence)


def engine(**changes: Any) -> dict[str, Any]:
    return {**FLEET, "engines": [{**ENGINE, **changes}]}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"engines": [ENGINE]}, "model: is missing"),
        ({"modle": "tiny", "engines": [ENGINE]}, "unknown setting 'modle'; known here: arguments, engines, "),
        ({"model": "tiny"}, "engines: is missing"),
        ({**FLEET, "engines": []}, "engines: Tuple should have at least 1 item after validation, not 0"),
        ({**FLEET, "engines": [7]}, "engines.0: must be a mapping of settings to values"),
        (engine(name="Not Good"), "engines.0.name: String should match pattern"),
        (engine(role="both"), "engines.0.role: Input should be 'prefill', 'decode' or 'undivided'"),
        (engine(connector=None), "engines.0: engine p: prefill and decode need a connector section"),
        (engine(role="undivided"), "engines.0: engine p: prefill and decode need a connector section"),
        (engine(prot=1), "unknown setting 'engines.0.prot'; known here: arguments, connector, "),
        (engine(connector={"hots": 1}), "unknown setting 'engines.0.connector.hots'; known here: allowed_remote_hosts"),
        (engine(connector={"host": "0.0.0.0"}), "engines.0.connector: host 0.0.0.0 can be reached"),
        (engine(arguments=["--port", 1]), "engines.0.arguments.1: must be text; put 1 in quotes"),
        (engine(environment={"X": True}), "engines.0.environment.X: must be text; put True in quotes"),
        ({**FLEET, "router": {"x": 1}}, "unknown setting 'router.x'; known here: connect_seconds, "),
        ({**FLEET, "engines": [ENGINE, {**ENGINE, "port": 8200}]}, "engines must have different names"),
        ({**FLEET, "engines": [ENGINE, {**ENGINE, "name": "q"}]}, "port 8100 is used twice"),
        (engine(connector={"port": 8100}), "port 8100 is used twice"),
        ({**FLEET, "router": {"port": 14600}}, "port 14600 is used twice"),
    ],
)
def test_faults_of_a_fleet(values: Any, sentence: str) -> None:
    assert fault(FleetSettings, values).startswith(sentence)


def test_files_that_are_no_fleet(tmp_path: Path) -> None:
    def said(content: bytes | None) -> str:
        path = tmp_path / "fleet.yaml"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as error:
            load_fleet(path)
        assert "\n" not in str(error.value)
        assert str(error.value).startswith(str(path))
        return str(error.value).removeprefix(str(path))

    assert said(None) == " can't be read: No such file or directory"
    assert said(b"a: [").startswith(" is not YAML: while parsing")
    assert said(b"\xff\xfe\x00bad").startswith(" is not YAML: ")
    assert said(b"") == ": must be a mapping of settings to values"
    assert said(b"just words") == ": must be a mapping of settings to values"
    assert said(b"model: tiny\n") == ": engines: is missing"
    with pytest.raises(ConfigError, match="Is a directory"):
        load_fleet(tmp_path)


def test_settings_can_not_be_changed_afterwards() -> None:
    settings = parse(ConnectorSettings, {}, "here")
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]
