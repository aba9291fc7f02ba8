"""Engines with canary caches and no vLLM: every byte of a block says whose prompt, layer and position it holds."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable
from typing import Any

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.content import Content, seed
from neuron_pushkv.device.base import Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.directory import Directory
from neuron_pushkv.engine import PushEngine, Results
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.orders import Finish, Offer, Ready, Receive, Remote, StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.wire import Rank

from .hidden import HiddenAccelerator

BLOCK_SIZE = 16
BLOCK_BYTES = 512
BLOCKS = 128
LAYERS = 4
MODEL = "test-model"
DEADLINE = 10.0
COUNTS = ("transfers", "bytes", "writes", "tokens", "refusals", "events")
BLANK = 0xEE


def content(prompt: int, tokens: int) -> Content:
    """A prompt named by a number; prompts with other numbers differ from the first token on."""
    return Content.of(seed(MODEL), [prompt * 1000 + index for index in range(tokens)])


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """Wait for a condition; its value, or a failure that says what did not happen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.002)
    raise AssertionError(f"{what} did not happen within {seconds} s")


class Side:
    """One engine of one rank: directory, cache and PushEngine. ``reports`` is all that vLLM would have been told.

    With ``hidden`` the cache is on that device.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        settings: ConnectorSettings,
        layout: str = "test",
        model: str = MODEL,
        hidden: HiddenAccelerator | None = None,
    ) -> None:
        self.name = name
        self.cache = ctypes.create_string_buffer(LAYERS * BLOCKS * BLOCK_BYTES)
        ctypes.memset(self.cache, BLANK, len(self.cache))
        memory = hidden.hide(self.cache) if hidden else Memory(ctypes.addressof(self.cache), len(self.cache))
        base = memory.address
        regions = tuple(
            Region(f"layer.{layer}", "kv", 0, base + layer * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, 0, 0, BLOCK_BYTES)
            for layer in range(LAYERS)
        )
        incarnation = secrets.randbits(64)
        self.settings = settings
        self.transport = transport
        self.directory = Directory(settings, engine_id=name, incarnation=incarnation, port=settings.port, ranks=1)
        self.engine = PushEngine(
            settings=settings,
            engine_id=name,
            incarnation=incarnation,
            rank=Rank(),
            model=model,
            layout=Layout(layout, BLOCKS, (Group(BLOCK_SIZE),), regions),
            memory=[memory],
            transport=transport,
            accelerator=hidden or HostAccelerator(),
            directory=(settings.host, settings.port),
        )
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.freed: list[str] = []
        self.stats: dict[str, dict[str, int]] = {}
        self.gauges: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()
        self.directory.close()

    def step(self, orders: StepOrders | None = None, ready: tuple[Ready, ...] = ()) -> Results:
        """One engine step, as the connector drives it."""
        self.engine.begin_step(orders or StepOrders())
        self.engine.advance(ready)
        results = self.engine.take_results()
        self.engine.end_step()
        self.finished += results.finished
        self.failed += results.failed
        assert results.failed <= results.finished
        assert len(set(self.finished)) == len(self.finished), "vLLM was told twice"
        for name, counts in self.engine.take_stats().items():
            if name == "gauges":
                self.gauges.update(counts)
            if name in COUNTS:
                mine = self.stats.setdefault(name, {})
                for key, count in counts.items():
                    mine[key] = mine.get(key, 0) + count
        self.freed += self.directory.take_freed()
        return results

    # As a sender.

    def prefill(self, request: str, prompt: int, tokens: int, blocks: list[int], transfer: str = "t") -> None:
        """Offer it, and compute it in one step."""
        self.offer(request, prompt, tokens, transfer)
        self.seal(request, prompt, blocks, tokens)

    def offer(self, request: str, prompt: int, tokens: int, transfer: str = "t") -> None:
        self.step(StepOrders(offers=(Offer(request, transfer, content(prompt, tokens), 1),)))

    def seal(self, request: str, prompt: int, blocks: list[int], tokens: int | None = None) -> None:
        """The step that computes the prompt's last tokens; ``tokens`` where the last block isn't full."""
        self.fill(prompt, blocks)
        self.advance(request, BLOCK_SIZE * len(blocks) if tokens is None else tokens, blocks)

    def advance(self, request: str, tokens: int, blocks: list[int]) -> None:
        self.step(ready=(Ready(request, tokens, (tuple(blocks),)),))

    def finish(self, request: str, kept: bool = True) -> None:
        if kept:
            self.directory.keep(request)
        self.step(StepOrders(finished=(Finish(request, kept),)))

    def fill(self, prompt: int, blocks: list[int], first: int = 0) -> None:
        for index, block in enumerate(blocks, first):
            for layer in range(LAYERS):
                self._block(layer, block)[:] = pattern(prompt, layer, index)

    # As a receiver.

    def receive(
        self,
        request: str,
        prompt: int,
        tokens: int,
        blocks: list[int],
        sender: Side,
        transfer: str = "t",
        start: int = 0,
    ) -> None:
        self.step(StepOrders(receives=(order(request, prompt, tokens, blocks, sender.settings, transfer, start),)))

    def withdraw(self, request: str) -> None:
        self.step(StepOrders(withdrawn=(request,)))

    def await_report(self, request: str, seconds: float = DEADLINE) -> bool:
        """Step until the request is reported; whether it succeeded."""

        def reported() -> bool:
            self.step()
            return request in self.finished

        until(reported, f"the report of {request}", seconds)
        return request not in self.failed

    def holds(self, prompt: int, blocks: list[int], first: int = 0) -> bool:
        """Whether those blocks hold exactly that prompt's KV, from its block ``first`` on, in every layer."""
        return all(
            bytes(self._block(layer, block)) == pattern(prompt, layer, index)
            for index, block in enumerate(blocks, first)
            for layer in range(LAYERS)
        )

    def blank(self, blocks: list[int]) -> bool:
        """Whether nothing was ever written there."""
        return all(set(bytes(self._block(layer, block))) == {BLANK} for block in blocks for layer in range(LAYERS))

    def others_blank(self, used: list[int]) -> bool:
        return self.blank([block for block in range(BLOCKS) if block not in used])

    def _block(self, layer: int, block: int) -> memoryview:
        start = (layer * BLOCKS + block) * BLOCK_BYTES
        return memoryview(self.cache).cast("B")[start : start + BLOCK_BYTES]


def order(
    request: str, prompt: int, tokens: int, blocks: list[int], sender: ConnectorSettings, transfer: str, start: int = 0
) -> Receive:
    """What a receiver's scheduler side would say."""
    text = content(prompt, tokens)
    remote = Remote(sender.host, sender.port)
    return Receive(request, transfer, remote, start, tokens, text.at(start), text.at(tokens), (tuple(blocks),))


def pattern(prompt: int, layer: int, index: int) -> bytes:
    """A block's canary: prompt, layer and position, repeated."""
    return (prompt.to_bytes(4, "little") + layer.to_bytes(2, "little") + index.to_bytes(2, "little")) * (
        BLOCK_BYTES // 8
    )
