"""From a fleet file to the command line and environment of each process."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from neuron_pushkv import tinymodel
from neuron_pushkv.config import FLEET_KEY_VARIABLE, EngineSettings, FleetSettings, RouterSettings, Security
from neuron_pushkv.errors import ConfigError

CONNECTOR_MODULE = "neuron_pushkv.connector.connector"
TINY = "tiny"
"""The ``model`` that stands for the one that :mod:`neuron_pushkv.tinymodel` makes."""


@dataclass(frozen=True)
class Command:
    """One process of a fleet."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to the supervisor's own."""
    url: str
    ready_path: str
    """Answers 200 as soon as the process can do its work."""
    cores: tuple[int, ...] = ()
    """What it may run on; empty for any."""


def commands(settings: FleetSettings, model: str, folder: Path) -> list[Command]:
    """All processes of the fleet, engines first. ``model`` as :func:`locate_model` gave it; files go to ``folder``.

    Every process gets the fleet key in its environment, a fresh one where the settings have none: it stands on no
    command line and in no file of ours.
    """
    fresh = secrets.token_hex(32)
    result = [_engine(settings, engine, model, fresh) for engine in settings.engines]
    if router := fleet_router(settings):
        path = folder / "router.yaml"
        path.write_text(yaml.safe_dump(router.model_dump(mode="json", exclude={"fleet_key"}, exclude_none=True)))
        result.append(
            Command(
                name="router",
                arguments=(sys.executable, "-m", "neuron_pushkv.cli", "router", str(path)),
                environment={FLEET_KEY_VARIABLE: _key(router, fresh)},
                url=f"http://{router.host}:{router.port}",
                ready_path="/ready",
            )
        )
    return result


def fleet_router(settings: FleetSettings) -> RouterSettings | None:
    """The fleet's router section, with the fleet's own engines where it names none."""
    router = settings.router
    if router is None or router.prefill or router.decode:
        return router
    own: dict[str, tuple[str, ...]] = {}
    for role in ("prefill", "decode"):
        engines = [engine for engine in settings.engines if engine.role == role]
        own[role] = tuple(engine_url(engine) for engine in engines)
        own[f"{role}_push"] = tuple(f"{e.connector.host}:{e.connector.port}" for e in engines if e.connector)
    return router.model_copy(update=own)


def engine_url(engine: EngineSettings) -> str:
    """Where the engine's HTTP server answers."""
    return f"http://{engine.host}:{engine.port}"


def locate_model(settings: FleetSettings) -> str:
    """The model for vLLM's ``--model``: a folder, or a hub name as it is. Makes the tiny one if it is asked for.

    Raises :class:`ConfigError` if a folder is meant that is not there or holds no model.
    """
    if settings.model == TINY:
        return str(tinymodel.make(tiny_folder()))
    folder = Path(settings.model).expanduser()
    if not folder.is_dir() and not settings.model.startswith(("/", ".", "~")):
        return settings.model
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist; set `model` to a model folder, a hub name or `tiny`")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; download the whole model there")
    return str(folder.resolve())


def tiny_folder() -> Path:
    """Where the tiny model lies between runs."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "pushkv" / "tiny-model"


def argument(arguments: Sequence[str], name: str) -> str | None:
    """The value of the last ``--name value`` or ``--name=value`` among ``arguments``."""
    found = None
    for index, text in enumerate(arguments):
        if text == name and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif text.startswith(name + "="):
            found = text.removeprefix(name + "=")
    return found


def _engine(settings: FleetSettings, engine: EngineSettings, model: str, fresh: str) -> Command:
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", model, "--host", engine.host, "--port", str(engine.port)]
    if settings.model == TINY:
        arguments += ["--served-model-name", TINY]
    environment = {**settings.environment, **engine.environment}
    if Path(model).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    if engine.connector:
        transfer = {
            "kv_connector": "PushKVConnector",
            "kv_connector_module_path": CONNECTOR_MODULE,  # vllm-neuron doesn't find connectors by their names alone
            "kv_role": "kv_both",
            "engine_id": engine.name,
            "kv_load_failure_policy": engine.load_failure_policy,
            "kv_connector_extra_config": engine.connector.model_dump(
                mode="json", exclude_unset=True, exclude={"fleet_key"}
            ),
        }
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
        environment[FLEET_KEY_VARIABLE] = _key(engine.connector, fresh)
    return Command(
        name=engine.name,
        arguments=(*arguments, *settings.arguments, *engine.arguments),
        environment=environment,
        url=engine_url(engine),
        ready_path="/health",
        cores=engine.cores,
    )


def _key(section: Security, fresh: str) -> str:
    key = section.key()
    return fresh if key is None else key.decode(errors="surrogateescape")
