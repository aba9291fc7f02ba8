"""A running fleet as the end-to-end tests see it, and the questions that they ask it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from neuron_pushkv import tinymodel
from neuron_pushkv.config import FleetSettings, load_fleet, parse
from neuron_pushkv.directory import query_status
from neuron_pushkv.fleet import Fleet
from neuron_pushkv.fleet.client import Metrics
from neuron_pushkv.fleet.commands import engine_url

ROOT = Path(__file__).parent.parent.parent
BLOCK = 32
FLEET_KEY = "known to the tests, which ask directories for their state"
PREFILL, DECODE, UNDIVIDED, ROUTER = "prefill-0", "decode-0", "undivided", "router"


@dataclass(frozen=True)
class Question:
    """One greedy request. Asked with ``salt``, it shares no prefix cache with itself asked without."""

    prompt: tuple[int, ...] = ()
    chat: str = ""
    stream: bool = False
    max_tokens: int = 16  # enough for any one wrong block to show
    salt: str = ""
    more: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        content = {"messages": [{"role": "user", "content": self.chat}]} if self.chat else {"prompt": self.prompt}
        return {
            "model": "tiny",
            **content,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
            "return_token_ids": True,
            **({"cache_salt": self.salt} if self.salt else {}),
            **self.more,
        }


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """A random prompt; two that differ in count or seed share no first block."""
    return tuple(random.Random(f"{seed} {count}").choices(range(3, tinymodel.VOCABULARY), k=count))


def whole_blocks(first_missing: int, count: int) -> int:
    """Bytes of the blocks that hold the tokens from ``first_missing`` to ``count``."""
    assert first_missing % BLOCK == 0
    return (-(-count // BLOCK) - first_missing // BLOCK) * BLOCK * tinymodel.BYTES_PER_TOKEN


def poll(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until the condition is true and return what it gave."""
    give_up = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < give_up, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return result


class Deployment:
    """A fleet with its URLs. ``prompt_tokens`` remembers how many tokens each question's prompt had."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        settings = fleet.settings
        self.urls = {engine.name: engine_url(engine) for engine in settings.engines}
        if settings.router:
            self.urls[ROUTER] = f"http://{settings.router.host}:{settings.router.port}"
        self.client = httpx.Client(timeout=60.0, trust_env=False, limits=httpx.Limits(keepalive_expiry=2.0))
        self.prompt_tokens: dict[Question, int] = {}

    def ask(self, name: str, question: Question, **headers: str) -> tuple[int, ...]:
        """The answer's tokens from that member of the fleet."""
        body, url = question.body(), self.urls[name] + question.path
        if not question.stream:
            response = self.client.post(url, json=body, headers=headers)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            self.prompt_tokens[question] = response.json()["usage"]["prompt_tokens"]
            return tuple(choice["token_ids"])
        found: list[int] = []
        with self.client.stream("POST", url, json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    found += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        return tuple(found)

    def ask_all(self, name: str, questions: Iterable[Question], at_once: int = 1) -> list[tuple[int, ...]]:
        """All answers, in order."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda question: self.ask(name, question), questions))

    def golden(self, question: Question) -> tuple[int, ...]:
        """The undivided engine's answer."""
        return self.ask(UNDIVIDED, replace(question, stream=False))

    def metrics(self, name: str) -> Metrics:
        return Metrics.of(self.client, self.urls[name])

    def rpc(self, name: str, method: str, *arguments: str) -> Any:
        """Call a method of that engine's only worker."""
        response = self.client.post(
            self.urls[name] + "/collective_rpc", json={"method": method, "args": list(arguments)}
        )
        assert response.status_code == 200, response.text
        return response.json()["results"][0]

    def cpu_seconds(self, name: str) -> float:
        """Processor time that all processes of that member have used so far."""
        ticks = 0
        for pid in self.fleet.processes(name):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


class Watch:
    """What an engine has counted since this was made."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        self._deployment = deployment
        self._name = name
        self._before = deployment.metrics(name)

    def grown(self, metric: str, **labels: str) -> int:
        now = self._deployment.metrics(self._name)
        return round(now.total(metric, **labels) - self._before.total(metric, **labels))

    def transfers(self, direction: str, **labels: str) -> int:
        return self.grown("vllm:pushkv_transfers_total", direction=direction, **labels)

    def bytes(self, direction: str) -> int:
        return self.grown("vllm:pushkv_bytes_total", direction=direction)

    def source(self, source: str) -> int:
        return self.grown("vllm:prompt_tokens_by_source_total", source=source)

    def settle(self, transfers: int, prompts: int | None = None) -> None:
        """Wait until that many transfers to it, and prompts of it, have been counted: engines tell with a delay."""
        prompts = transfers if prompts is None else prompts
        poll(lambda: self.transfers("in") >= transfers, 10, f"{transfers} transfers, have {self.transfers('in')}")
        poll(lambda: self.grown("vllm:request_prompt_tokens_count") >= prompts, 10, f"{prompts} prompts")


def legs(
    deployment: Deployment, transfer: str, *, source: str = PREFILL, tp_size: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of a prefill leg for ``source`` and of its decode leg, for sending them without the router."""
    (engine,) = (e for e in deployment.fleet.settings.engines if e.name == source)
    assert engine.connector
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": source,
        "remote_host": engine.connector.host,
        "remote_port": engine.connector.port,
        "remote_request_id": "any",
        "tp_size": tp_size,
        "pp_size": 1,
        "transfer_id": transfer,
    }
    return prefill, decode


def kept(deployment: Deployment, name: str = PREFILL) -> int:
    """How many finished requests' KV that engine keeps, which it tells without taking a step."""
    (engine,) = (e for e in deployment.fleet.settings.engines if e.name == name)
    assert engine.connector
    status = asyncio.run(query_status(engine.connector.host, engine.connector.port, engine.connector.key(), 2.0))
    return status.kept_requests


def asked(question: Question, parameters: dict[str, Any], **more: Any) -> Question:
    return Question(question.prompt, salt=question.salt, more={"kv_transfer_params": parameters, **more})


def fleet_settings(change: Callable[[dict[str, Any]], None]) -> FleetSettings:
    """The shipped CPU fleet on free ports, after ``change`` to its values."""
    values = load_fleet(ROOT / "configs" / "local-cpu.yaml").model_dump(mode="json", exclude_unset=True)
    change(values)
    for section in [*[e["connector"] for e in values["engines"] if e.get("connector")], values.get("router")]:
        if section:
            section["fleet_key"] = FLEET_KEY
    listeners = [*values["engines"], *[e["connector"] for e in values["engines"] if e.get("connector")]]
    listeners += [values["router"]] if values.get("router") else []
    for listener, port in zip(listeners, free_ports(len(listeners)), strict=True):
        listener["port"] = port
    return parse(FleetSettings, values, "the test's fleet")


def free_ports(count: int) -> list[int]:
    """Below what the kernel gives to outgoing connections, for they are bound only when vLLM has loaded."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 32768), 1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError("no free ports")
