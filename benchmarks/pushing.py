"""Our engines, without vLLM: directory, cache and PushEngine each, driven as the connector drives them."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from benchmarks.gil import Probe
from benchmarks.work import BLOCK_BYTES, BLOCK_TOKENS, REGIONS, Cache, Work
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.content import Content, seed
from neuron_pushkv.device.base import Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.directory import Directory
from neuron_pushkv.engine import PushEngine
from neuron_pushkv.layout import Layout, Region
from neuron_pushkv.orders import Finish, Offer, Ready, Receive, StepOrders
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.wire import Rank

MODEL = "benchmark"
REPORT_SECONDS = 30


def prompt(tokens: int) -> Content:
    """What all transfers move."""
    return Content.of(seed(MODEL), range(tokens))


class Side:
    """What both have."""

    def __init__(self, name: str, provider: str, library: Path | None, port: int, work: Work) -> None:
        self.work = work
        self.cache = Cache(work)
        self.probe = Probe()
        self.content = prompt(work.tokens)
        self.table: list[int] = []
        regions = tuple(
            Region(f"region.{index}", self.cache.region(index), BLOCK_BYTES, work.cache_blocks)
            for index in range(REGIONS)
        )
        settings = ConnectorSettings(port=port)
        incarnation = secrets.randbits(63)
        self.transport = FabricTransport(provider, library)
        self.directory = Directory(settings, engine_id=name, incarnation=incarnation, port=port, ranks=1)
        self.engine = PushEngine(
            settings=settings,
            engine_id=name,
            incarnation=incarnation,
            rank=Rank(),
            model=MODEL,
            layout=Layout("benchmark", BLOCK_TOKENS, work.cache_blocks, regions),
            memory=[Memory(self.cache.address, self.cache.bytes)],
            transport=self.transport,
            accelerator=HostAccelerator(),
            directory=(settings.host, settings.port),
        )

    def close(self) -> None:
        """End both."""
        self.engine.close()
        self.directory.close()

    def versions(self) -> str:
        """What moves the bytes."""
        return f"{self.transport.library} {self.transport.provider}"

    def watch(self) -> None:
        """Count from now on how long the GIL is held."""
        self.probe.start()

    def watched(self) -> float:
        """Milliseconds for which it was."""
        return self.probe.stop()

    def step(self, orders: StepOrders | None = None) -> None:
        """One engine step that computes nothing."""
        self.engine.begin_step(orders or StepOrders())
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

    def seal(self, number: int, pause: float) -> int:
        """Its KV is ready: push it. Returns when that was. There is nothing to look for every ``pause`` seconds."""
        del pause
        self.engine.begin_step(StepOrders())
        ready = time.monotonic_ns()
        self.engine.advance((Ready(f"p{number}", self.work.tokens, (tuple(self.table),)),))
        self.engine.end_step()
        return ready

    def finish(self, number: int) -> None:
        """vLLM is done with the request."""
        self.step(StepOrders(finished=(Finish(f"p{number}", kept=False),)))
        self.engine.take_stats()

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

    def receive(self, number: int, host: str, port: int) -> None:
        """Register with the sender."""
        end = self.work.tokens
        at = self.content.at
        self.step(
            StepOrders(
                receives=(
                    Receive(f"d{number}", f"t{number}", host, port, 0, end, at(0), at(end), (tuple(self.table),)),
                )
            )
        )

    def report(self, number: int, pause: float) -> int:
        """Look every ``pause`` seconds whether the worker reports it; returns when it did."""
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline:
            results = self.engine.take_results()
            if f"d{number}" in results.failed:
                raise RuntimeError("the transfer failed")
            if f"d{number}" in results.finished:
                now = time.monotonic_ns()
                self.engine.take_stats()
                return now
            time.sleep(pause)
        raise RuntimeError(f"no report within {REPORT_SECONDS} s")
