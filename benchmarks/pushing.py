"""Our engines, without vLLM: directory, cache and PushEngine each, driven as the connector drives them."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gil import watch
from benchmarks.work import BLOCK_TOKENS, REGIONS, Cache, Work
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.content import Content, seed
from neuron_pushkv.device.base import Accelerator, Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.directory import Directory
from neuron_pushkv.engine import PushEngine
from neuron_pushkv.layout import ROWS, Group, Layout, Part, Region
from neuron_pushkv.orders import Finish, Offer, Ready, Receive, Remote, StepOrders
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.wire import Rank

MODEL = "benchmark"
PARTS: tuple[Part, ...] = ("k", "v")
REPORT_SECONDS = 30
WATCHED_PAUSE = 0.03
"""How often the end of a transfer whose GIL is watched is looked for: looking takes the GIL too."""
LEAD_SECONDS = 0.03
"""How long a registration precedes the end of the prefill."""


def prompt(tokens: int, first: int = 0) -> Content:
    """A prompt of that many tokens; unlike prompts begin with unlike ones."""
    return Content.of(seed(MODEL), range(first, first + tokens))


class Side:
    """What both have. ``settings`` are the connector's, beside the port."""

    engine_class: type[PushEngine] = PushEngine

    def __init__(
        self,
        name: str,
        provider: str,
        library: Path | None,
        port: int,
        work: Work,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.provider, self.library, self.port, self.work = name, provider, library, port, work
        self.settings = ConnectorSettings(port=port, **(settings or {}))
        self.cache = Cache(work)
        self.content = prompt(work.tokens)
        self.table: list[int] = []
        self.open()

    def open(self) -> None:
        """A new incarnation."""
        incarnation = secrets.randbits(63)
        self.transport = FabricTransport(self.provider, self.library)
        self.directory = Directory(self.settings, engine_id=self.name, incarnation=incarnation, port=self.port, ranks=1)
        self.engine = self.engine_class(
            settings=self.settings,
            engine_id=self.name,
            incarnation=incarnation,
            rank=Rank(),
            model=MODEL,
            layout=self.layout(),
            memory=[self.memory()],
            transport=self.transport,
            accelerator=self.accelerator(),
            directory=(self.settings.host, self.settings.port),
        )

    def memory(self) -> Memory:
        """What the cache lies in."""
        return Memory(self.cache.address, self.cache.bytes)

    def accelerator(self) -> Accelerator:
        """Whose memory that is."""
        return HostAccelerator()

    def layout(self) -> Layout:
        """K and V apart, each with one head whose tokens are rows."""
        size = self.work.block_bytes
        row = size // BLOCK_TOKENS
        regions = tuple(
            Region(f"layer.{index // 2}", PARTS[index % 2], 0, self.cache.region(index), size, 0, row, row)
            for index in range(REGIONS)
        )
        return Layout(ROWS, self.work.cache_blocks, (Group(BLOCK_TOKENS),), regions)

    def close(self) -> None:
        """End it; its cache stays, for another."""
        self.engine.close()
        self.directory.close()

    def versions(self) -> str:
        """What moves the bytes."""
        return f"{self.transport.library} {self.transport.provider}"

    def step(self, orders: StepOrders | None = None, ready: Sequence[Ready] = ()) -> None:
        """One engine step that computes nothing."""
        self.engine.begin_step(orders or StepOrders())
        self.engine.advance(ready)
        self.engine.end_step()


class Sender(Side):
    """Has the prompt, once it is sealed."""

    def prepare(self, order: str, salt: int) -> None:
        """Put the prompt where the block table of that order says."""
        self.table = self.work.table(order, "sender")
        self.cache.fill(self.table, salt)

    def offer(self, number: int) -> None:
        """The request is known; its KV isn't there yet."""
        self.step(StepOrders(offers=(Offer(f"p{number}", f"t{number}", self.content, 1),)))

    def ready(self, number: int, tokens: int) -> Ready:
        """That much of its KV is there."""
        return Ready(f"p{number}", tokens, (tuple(self.table[: -(-tokens // BLOCK_TOKENS)]),))

    def seal(self, number: int, pause: float = 0) -> int:
        """Its KV is ready: push it. Returns when that was. There is nothing to look for every ``pause`` seconds."""
        del pause
        self.engine.begin_step(StepOrders())
        ready = time.monotonic_ns()
        self.engine.advance((self.ready(number, self.work.tokens),))
        self.engine.end_step()
        return ready

    def seal_at_random(self, numbers: Sequence[int], seconds: float) -> list[int]:
        """Seal one after the other, up to twice ``seconds`` apart; returns when each was."""
        sealed = []
        for number in numbers:
            time.sleep(random.uniform(0, 2 * seconds))
            sealed.append(self.seal(number))
        return sealed

    def prefill(self, number: int, steps: int, seconds: float, streamed: bool) -> tuple[int, int]:
        """That many steps, each as long; what each has filled is pushed as it ends, or all of it as the last one ends.

        Returns when the last one ended, and how many bytes had not been written by then.
        """
        before = self.transport.counters().bytes
        for step in range(1, steps + 1):
            self.engine.begin_step(StepOrders())
            time.sleep(seconds)
            if step == steps:
                left = self.work.bytes - (self.transport.counters().bytes - before)
                ended = time.monotonic_ns()
            done = streamed or step == steps
            self.engine.advance((self.ready(number, self.work.tokens * step // steps),) if done else ())
            self.engine.end_step()
        return ended, left

    def finish(self, number: int) -> None:
        """vLLM is done with the request."""
        self.step(StepOrders(finished=(Finish(f"p{number}", kept=False),)))
        self.engine.take_stats()

    def watch(self, number: int, probed: bool) -> float:
        """One transfer from offer to finish; see :func:`benchmarks.gil.watch`."""
        return watch(lambda: self._whole(number), probed=probed)

    def _whole(self, number: int) -> None:
        goal = self.transport.counters().bytes + self.work.bytes
        self.offer(number)
        time.sleep(LEAD_SECONDS)
        self.seal(number)
        deadline = time.monotonic() + REPORT_SECONDS
        while self.transport.counters().bytes < goal and time.monotonic() < deadline:
            time.sleep(WATCHED_PAUSE)
        self.finish(number)

    def writes(self) -> int:
        """Since it was opened."""
        return self.transport.counters().writes


class Receiver(Side):
    """Wants the prompt's KV."""

    def prepare(self, order: str) -> None:
        """Clear the cache, and choose blocks by the table of that order."""
        self.table = self.work.table(order, "receiver")
        self.cache.blank()

    def holds(self, salt: int) -> bool:
        """Whether it has come, every byte of it."""
        return self.cache.holds(self.table, salt)

    def wanted(self, number: int, port: int, content: Content | None = None, transfer: str | None = None) -> Receive:
        """The whole prompt, from the engine of that port."""
        content = content or self.content
        end = content.length
        return Receive(
            f"d{number}",
            f"t{number}" if transfer is None else transfer,
            Remote(self.settings.host, port),
            0,
            end,
            content.at(0),
            content.at(end),
            (tuple(self.table[: -(-end // BLOCK_TOKENS)]),),
        )

    def receive(self, numbers: Sequence[int], port: int) -> None:
        """Register with the sender."""
        self.step(StepOrders(receives=tuple(self.wanted(number, port) for number in numbers)))

    def report(self, number: int, pause: float) -> int:
        """Look every ``pause`` seconds whether the worker reports it; returns when it did."""
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline:
            if f"d{number}" in self.finished():
                now = time.monotonic_ns()
                self.engine.take_stats()
                return now
            time.sleep(pause)
        raise RuntimeError(f"no report within {REPORT_SECONDS} s")

    def finished(self) -> frozenset[str]:
        """What the worker reports now. Raises :class:`RuntimeError` for a transfer that has failed."""
        results = self.engine.take_results()
        if results.failed:
            raise RuntimeError(f"transfers failed: {', '.join(sorted(results.failed))}")
        return results.finished

    def steps(self, numbers: Sequence[int], seconds: float) -> tuple[list[int], list[float]]:
        """Engine steps of that length, as vLLM's worker makes them, until all are reported.

        Returns when each was, and how many seconds lay between the count of its last write and its report.
        """
        reported: dict[str, int] = {}
        self.engine.take_stats()
        deadline = time.monotonic() + REPORT_SECONDS
        while len(reported) < len(numbers) and time.monotonic() < deadline:
            self.engine.begin_step(StepOrders())
            time.sleep(seconds)
            self.engine.advance(())
            finished = self.finished()
            now = time.monotonic_ns()
            self.engine.end_step()
            reported |= dict.fromkeys(finished, now)
        waited = self.engine.take_stats()["phases"]["in:report"]
        return [reported[f"d{number}"] for number in numbers], waited

    def watch(self, number: int, probed: bool, port: int) -> float:
        """One transfer from its registration to its report; see :func:`benchmarks.gil.watch`."""
        return watch(lambda: self._whole(number, port), probed=probed)

    def _whole(self, number: int, port: int) -> None:
        self.receive([number], port)
        self.report(number, WATCHED_PAUSE)
