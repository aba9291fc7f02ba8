"""What is compared: the same engines, each time with another connector between them."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.rows import LOOPBACK
from benchmarks.serving.model import DTYPE
from neuron_pushkv.config import EngineSettings, FleetSettings, parse

PREFILL, DECODE, UNDIVIDED = "prefill", "decode", "undivided"
START_SECONDS = 400

Order = Literal["together", "prefill first", "undivided"]


@dataclass(frozen=True)
class Engines:
    """What is the same for every contestant. ``chunk``: the most prompt tokens (and all others) in one step."""

    model: Path
    chunk: int
    max_tokens: int
    kv_bytes: int
    sequences: int
    bytes_per_token: int
    nixl: Path | None
    """Folder to import NIXL from, where it isn't installed."""


@dataclass(frozen=True)
class Contestant:
    """A connector and the order in which it wants its two legs: the only thing that the proxy must know of it."""

    name: str
    order: Order
    connector: str = ""
    extra: Mapping[str, Any] | None = None
    worn: bool = False
    """Whether its block pools are to be used up first."""

    @property
    def divided(self) -> bool:
        """Whether prefill and decode are engines of their own."""
        return self.order != "undivided"


CONTESTANTS = (
    Contestant("pushkv", "together", "PushKVConnector", {"provider": "shm"}),
    Contestant("pushkv-tcp", "together", "PushKVConnector", {"provider": "tcp"}),
    Contestant("nixl-push", "together", "NixlPushConnector", {"backends": ["UCX"]}),
    Contestant("nixl-pull", "prefill first", "NixlConnector", {"backends": ["UCX"]}),
    Contestant("undivided", "undivided"),
)


@dataclass(frozen=True)
class Arrangement:
    """One contestant's engines, as a fleet, and where a proxy finds what decode must be told about prefill."""

    settings: FleetSettings
    source: Mapping[str, Any]

    def url(self, name: str) -> str:
        """The HTTP server of that engine."""
        (engine,) = (engine for engine in self.settings.engines if engine.name == name)
        return f"http://{engine.host}:{engine.port}"


def arrange(contestant: Contestant, engines: Engines, cores: tuple[int, ...]) -> Arrangement:
    """Prefill on the first core and decode on the second, or one undivided engine on both; free ports for all."""
    if not contestant.divided:
        return Arrangement(_fleet(engines, [_engine(UNDIVIDED, contestant, engines, cores[:2], 0)]), {})
    ports = {name: free_port() for name in (PREFILL, DECODE)}
    members = [
        _engine(name, contestant, engines, (core,), ports[name])
        for name, core in zip((PREFILL, DECODE), cores, strict=False)
    ]
    source = {
        "remote_engine_id": PREFILL,
        "remote_host": LOOPBACK,
        "remote_port": ports[PREFILL],
        "tp_size": 1,
        "pp_size": 1,
    }
    return Arrangement(_fleet(engines, members), source)


def free_port() -> int:
    """Below the ports of outgoing connections, for it is bound only when vLLM has loaded."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) != 0:
                return port


def _fleet(engines: Engines, members: list[EngineSettings]) -> FleetSettings:
    arguments = [
        "--served-model-name=tiny",
        f"--dtype={DTYPE}",
        f"--max-model-len={engines.max_tokens}",
        f"--max-num-batched-tokens={engines.chunk}",
        f"--max-num-seqs={engines.sequences}",
        f"--kv-cache-memory-bytes={engines.kv_bytes}",
        "--enforce-eager",
        "--distributed-executor-backend=uni",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]
    values = {
        "model": str(engines.model),
        "arguments": arguments,
        "engines": [member.model_dump(exclude_unset=True) for member in members],
        "start_seconds": START_SECONDS,
    }
    return parse(FleetSettings, values, "the benchmark's fleet")


def _engine(name: str, contestant: Contestant, engines: Engines, cores: tuple[int, ...], port: int) -> EngineSettings:
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores that the process begins with are all that it gets
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_SERVER_DEV_MODE": "1",  # for resetting decode's prefix cache
        "VLLM_NO_USAGE_STATS": "1",
    }
    arguments: list[str] = []
    if contestant.divided:
        transfer: dict[str, Any] = {
            "kv_connector": contestant.connector,
            "kv_role": "kv_both",
            "engine_id": name,
            "kv_connector_extra_config": dict(contestant.extra or {}),
        }
        if contestant.connector == "PushKVConnector":
            transfer["kv_connector_extra_config"]["port"] = port
        else:
            transfer["kv_buffer_device"] = "cpu"
            environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            if engines.nixl:
                environment["PYTHONPATH"] = str(engines.nixl)
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    # The fleet's own role for engines that it shall not give a connector to.
    return EngineSettings(
        name=name,
        role="undivided",
        port=free_port(),
        arguments=tuple(arguments),
        environment=environment,
        cores=cores,
    )
