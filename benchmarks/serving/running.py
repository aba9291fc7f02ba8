"""One contestant, running: its engines, the proxy in front of them, and what they count."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.rows import LOOPBACK
from benchmarks.serving.contestants import (
    DECODE,
    PREFILL,
    UNDIVIDED,
    Arrangement,
    Contestant,
    Engines,
    arrange,
    free_port,
)
from neuron_pushkv.fleet import Fleet
from neuron_pushkv.fleet.client import Answer, Metrics, complete
from neuron_pushkv.fleet.commands import Command

REQUEST_SECONDS = 300
PROXY = "proxy"


class Running:
    """A context manager: engines and proxy are ready inside it, and gone after it. ``logs``: a folder of its own."""

    def __init__(self, contestant: Contestant, engines: Engines, cores: tuple[int, ...], logs: Path) -> None:
        self.contestant = contestant
        self.logs = logs
        self._arrangement: Arrangement = arrange(contestant, engines, cores)
        self._fleet = Fleet(self._arrangement.settings, logs)
        self.client = httpx.Client(timeout=REQUEST_SECONDS, trust_env=False)
        self.members = (PREFILL, DECODE) if contestant.divided else (UNDIVIDED,)
        self.front = f"http://{LOOPBACK}:{free_port()}"

    def __enter__(self) -> Running:
        try:
            self._fleet.start()
            self._fleet.start_commands([self._proxy()])
            self._fleet.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._fleet.stop()

    @property
    def first(self) -> str:
        """The engine that prompts are computed on."""
        return self.members[0]

    @property
    def last(self) -> str:
        """The engine that tokens come from."""
        return self.members[-1]

    def ask(self, prompt: Sequence[int], count: int) -> Answer:
        """Through the proxy."""
        return complete(self.client, self.front, prompt, count)

    def ask_prefill(self, prompt: Sequence[int]) -> float:
        """Seconds that the prefill engine alone takes for the prompt and one token, asked directly."""
        return complete(self.client, self._arrangement.url(self.first), prompt, 1).first_seconds

    def forget_on_decode(self) -> None:
        """Empty decode's prefix cache. Raises :class:`RuntimeError` if something still holds blocks of it."""
        response = self.client.post(self._arrangement.url(self.last) + "/reset_prefix_cache")
        response.raise_for_status()

    def metrics(self, member: str, client: httpx.Client | None = None) -> Metrics:
        """What that engine has counted. ``client``: another thread's own."""
        return Metrics.of(client or self.client, self._arrangement.url(member))

    def written(self) -> float:
        """Writes that the connector says it has made, or what it calls descriptors, whichever side counts them."""
        if not self.contestant.divided:
            return 0.0
        if self.contestant.connector == "PushKVConnector":
            return self.metrics(self.last).total("vllm:pushkv_writes_total")
        return sum(self.metrics(member).total("vllm:nixl_num_descriptors_sum") for member in self.members)

    def cpu_seconds(self) -> Mapping[str, float]:
        """Processor time of each member's processes so far."""
        tick = os.sysconf("SC_CLK_TCK")
        found = {}
        for member in (*self.members, PROXY):
            ticks = 0
            for process in self._fleet.processes(member):
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
            found[member] = ticks / tick
        return found

    def log(self, member: str) -> str:
        """What it has written so far."""
        return (self.logs / f"{member}.log").read_text(errors="replace")

    def legs(self) -> list[dict[str, Any]]:
        """What the proxy has noted of each request so far."""
        log = self.logs / "proxy.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def _proxy(self) -> Command:
        settings = {
            "host": LOOPBACK,
            "port": int(self.front.rpartition(":")[2]),
            "order": self.contestant.order,
            "source": dict(self._arrangement.source),
            "log": str(self.logs / "proxy.jsonl"),
            **{member: self._arrangement.url(member) for member in self.members},
        }
        path = self.logs / "proxy.json"
        path.write_text(json.dumps(settings))
        command = (sys.executable, "-m", "benchmarks.serving.proxy", str(path))
        return Command(PROXY, command, {}, self.front, "/health")
