"""Engines of several ranks with caches in any layout, and no vLLM: what is pushed is compared row by row."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence

import msgspec

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.directory import Directory
from neuron_pushkv.engine import PushEngine
from neuron_pushkv.layout import Group, Layout
from neuron_pushkv.orders import Finish, Intent, Offer, Ready, Receive, Release, Remote, StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.wire import Rank
from tests.engine.hidden import HiddenAccelerator
from tests.engine.sides import DEADLINE, MODEL, content, until
from tests.layouts import Cache, cache

BLANK = 0xEE


class Engine:
    """One engine: a directory, and a PushEngine with a cache for each rank. ``caches`` are by rank; with
    ``hidden`` they are on that device."""

    def __init__(
        self,
        name: str,
        caches: dict[Rank, Cache],
        transport: Callable[[], Transport],
        settings: ConnectorSettings,
        hidden: HiddenAccelerator | None = None,
    ) -> None:
        self.name, self.caches, self.settings = name, caches, settings
        self.sizes = 1 + max(rank.pp for rank in caches), 1 + max(rank.tp for rank in caches)
        self.directory = Directory(
            settings, engine_id=name, incarnation=secrets.randbits(64), port=settings.port, ranks=len(caches)
        )
        shown = {rank: (cache.layout, cache.memory) for rank, cache in caches.items()}
        if hidden is not None:
            shown = {rank: hide(cache, hidden) for rank, cache in caches.items()}
        self.ranks = {
            rank: PushEngine(
                settings=settings,
                engine_id=name,
                incarnation=secrets.randbits(64),
                rank=rank,
                model=MODEL,
                layout=layout,
                memory=[memory],
                transport=transport(),
                accelerator=hidden or HostAccelerator(),
                directory=(settings.host, settings.port),
                sizes=self.sizes,
            )
            for rank, (layout, memory) in shown.items()
        }
        self.reports: dict[str, dict[Rank, bool]] = {}
        self.freed: list[str] = []
        self.writes = 0
        for held in caches.values():
            held.bytes[:] = bytes([BLANK]) * len(held.bytes)

    def close(self) -> None:
        for engine in self.ranks.values():
            engine.close()
        self.directory.close()

    @property
    def remote(self) -> Remote:
        return Remote(self.settings.host, self.settings.port, self.sizes[1], self.sizes[0])

    @property
    def groups(self) -> tuple[Group, ...]:
        return next(iter(self.caches.values())).layout.groups

    def step(self, orders: StepOrders | None = None, ready: tuple[Ready, ...] = (), layers: Sequence[str] = ()) -> None:
        """One step of all ranks. ``layers``: those whose hook vLLM calls before the step is over."""
        for rank, engine in self.ranks.items():
            engine.begin_step(orders or StepOrders())
            for layer in layers:
                engine.advance_layer(layer, ready)
            engine.advance(ready)
            results = engine.take_results()
            engine.end_step()
            for request in results.finished:
                told = self.reports.setdefault(request, {})
                assert rank not in told, "vLLM was told twice"
                told[rank] = request not in results.failed
            self.writes += engine.take_stats().get("writes", {}).get("out", 0)
        self.freed += self.directory.take_freed()

    # As a sender.

    def offer(self, request: str, prompt: int, tokens: int, transfer: str = "t", deliveries: int = 1) -> None:
        self.step(StepOrders(offers=(Offer(request, transfer, content(prompt, tokens), deliveries),)))

    def compute(
        self, request: str, prompt: int, tokens: int, tables: Sequence[Sequence[int]], layers: Sequence[str] = ()
    ) -> None:
        """A step after which the prompt's first ``tokens`` are there."""
        self.fill(prompt, tokens, tables)
        ready = Ready(request, tokens, tuple(tuple(table) for table in tables))
        self.step(ready=(ready,), layers=layers)

    def fill(self, prompt: int, tokens: int, tables: Sequence[Sequence[int]]) -> None:
        for layer, part, group, token, head, row in self._rows(range(tokens)):
            if tables[group]:
                size = self.groups[group].block_size
                block = tables[group][token // size]
                if block >= 0:
                    row(block, token % size)[:] = pattern(prompt, layer, part, token, head, len(row(block, 0)))

    def finish(self, request: str, kept: bool = True) -> None:
        if kept:
            self.directory.keep(request)
        self.step(StepOrders(finished=(Finish(request, kept),)))

    # As a receiver.

    def intend(self, request: str, prompt: int, tokens: int, sender: Engine, transfer: str = "t") -> None:
        text = content(prompt, tokens)
        self.step(StepOrders(intents=(Intent(request, transfer, sender.remote, tokens, text.at(tokens)),)))

    def receive(
        self,
        request: str,
        prompt: int,
        tokens: int,
        tables: Sequence[Sequence[int]],
        sender: Engine,
        transfer: str = "t",
        start: int = 0,
    ) -> None:
        text = content(prompt, tokens)
        blocks = tuple(tuple(table) for table in tables)
        order = Receive(request, transfer, sender.remote, start, tokens, text.at(start), text.at(tokens), blocks)
        self.step(StepOrders(receives=(order,)))

    def release(self, sender: Engine, transfer: str = "t") -> None:
        self.step(StepOrders(releases=(Release(transfer, sender.remote),)))

    def received(self, request: str, seconds: float = DEADLINE) -> bool:
        """Step until every rank has reported it; whether all of them have it."""

        def told() -> bool:
            self.step()
            return len(self.reports.get(request, {})) == len(self.ranks)

        until(told, f"the report of {request}", seconds)
        return all(self.reports[request].values())

    def check(self, prompt: int, first: int, end: int, tables: Sequence[Sequence[int]]) -> None:
        """Every row of those tokens is there, and every other block is blank. Tables begin with first's block."""
        for layer, part, group, token, head, row in self._rows(range(first, end)):
            size = self.groups[group].block_size
            begins = self.groups[group].first_token(first, end) // size
            if token // size >= begins:
                place = row(tables[group][token // size - begins], token % size)
                expected = pattern(prompt, layer, part, token, head, len(place))
                assert bytes(place) == expected, (layer, part, token, head)
        used = [set(table) for table in tables]
        blocks = range(next(iter(self.caches.values())).layout.blocks)
        for _, _, group, token, _, row in self._rows(range(max(group.block_size for group in self.groups))):
            for block in blocks:
                if block not in used[group] and token < self.groups[group].block_size:
                    assert set(row(block, token)) == {BLANK}, "written outside of what was registered"

    def _rows(
        self, tokens: Iterable[int]
    ) -> Iterable[tuple[str, str, int, int, int, Callable[[int, int], memoryview]]]:
        for held in self.caches.values():
            for region in held.layout.regions:
                for head in range(region.first_head, region.end_head):

                    def row(
                        block: int, token: int, region: object = region, head: int = head, held: Cache = held
                    ) -> memoryview:
                        return held.row(region.layer, region.part, block, token, head)  # type: ignore[attr-defined]

                    for token in tokens:
                        yield region.layer, region.part, region.group, token, head, row


def hide(held: Cache, hidden: HiddenAccelerator) -> tuple[Layout, Memory]:
    """That cache as a device's: its layout at the device's addresses. Its rows stay where they are."""
    (buffer,) = held.buffers
    memory = hidden.hide(buffer)
    moved = memory.address - held.memory.address
    regions = tuple(msgspec.structs.replace(region, address=region.address + moved) for region in held.layout.regions)
    return msgspec.structs.replace(held.layout, regions=regions), memory


def pattern(prompt: int, layer: str, part: str, token: int, head: int, length: int) -> bytes:
    """A row's canary."""
    text = f"{prompt}/{layer}/{part}/{token}/{head};".encode()
    return (text * (1 + length // len(text)))[:length]


def ranks(tp: int, **shape: object) -> dict[Rank, Cache]:
    """The caches of an engine with that tensor parallel size."""
    return {Rank(tp=rank): cache(tp=(rank, tp), **shape) for rank in range(tp)}  # type: ignore[arg-type]


def table(tokens: int, block_size: int, first: int = 0, step: int = 1) -> list[int]:
    """Blocks for that many tokens, in descending order as vLLM hands them out."""
    count = -(-tokens // block_size)
    return [first + step * (count - 1 - index) for index in range(count)]
