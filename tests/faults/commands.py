"""What an engine in a process of its own can be told to do."""

from __future__ import annotations

import gc
import json
import logging
import random
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.contacts import home
from neuron_pushkv.ledger import sources
from neuron_pushkv.orders import Intent, Release, Remote, StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.fates import Delay, Fate, Fault, Reorder
from neuron_pushkv.transport.faults import FaultyTransport
from tests.engine.sides import Side, content, order, until

from .measures import descriptors, native_bytes, resident_bytes


@dataclass
class Some(Fault):
    """A share of the writes fails, and another is lost."""

    failed: float
    lost: float

    def befall(self, fate: Fate, chance: random.Random) -> None:
        """Each write by itself."""
        if chance.random() < self.failed:
            fate.failure = f"write {fate.number} was made to fail"
        fate.dropped |= chance.random() < self.lost


def cut(side: Side, chance: random.Random) -> int:
    """Cut one of its connections to other workers, as a network does: without a word. How many were cut."""
    core = side.engine._contacts._node._core
    peers = list(side.engine._contacts.links._links)
    links = [core.links[connection] for connection in peers if connection in core.links]
    if not links:
        return 0
    transport = chance.choice(links)._transport
    try:
        transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    except (AttributeError, OSError):
        return 0  # It has just ended by itself.
    return 1


class Commands:
    """What isn't a method of :class:`Side` already, or takes an engine that is in another process."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._chance = random.Random(1)

    def receive(
        self, request: str, prompt: int, tokens: int, blocks: list[int], port: int, transfer: str, start: int = 0
    ) -> None:
        """As the side's own, from the engine whose directory listens at ``port``."""
        sender = ConnectorSettings(port=port)
        text = order(request, prompt, tokens, blocks, sender, transfer, start)
        self.side.step(StepOrders(receives=(text,)))

    def intend(self, request: str, prompt: int, tokens: int, port: int, transfer: str) -> None:
        """It has no blocks for that request yet."""
        remote, end = Remote(ConnectorSettings().host, port), content(prompt, tokens).at(tokens)
        self.side.step(StepOrders(intents=(Intent(request, transfer, remote, tokens, end),)))

    def release(self, transfer: str, port: int) -> None:
        """It will not ask for that transfer."""
        self.side.step(StepOrders(releases=(Release(transfer, Remote(ConnectorSettings().host, port)),)))

    def preempt(self, request: str) -> None:
        """Its blocks are another's when this returns."""
        self.side.step(StepOrders(preempted=(request,)))

    def freed(self, request: str) -> None:
        """Wait until that source is let go."""
        until(lambda: (self.side.step(), request in self.side.freed)[1], f"letting go of {request}")

    def turn(self) -> tuple[list[str], list[str], list[str]]:
        """One step; all reports since the last turn: finished, failed, freed."""
        side = self.side
        side.step()
        told = list(side.finished), list(side.failed), list(side.freed)
        for kind in (side.finished, side.failed, side.freed):
            kind.clear()
        return told

    def cut(self) -> bool:
        """Cut a connection to another engine."""
        return bool(cut(self.side, self._chance))

    def clocks(self) -> tuple[float, float]:
        """Wall and monotonic."""
        return time.time(), time.monotonic()

    def tables(self) -> tuple[int, int, int, int]:
        """Deliveries in and out, sources, and requests kept by the directory."""
        engine = self.side.engine
        return len(engine._inbound), len(engine._outbound), len(engine._outbound.sources), self.side.directory.kept()

    def usage(self) -> tuple[int, int, int, int]:
        """Descriptors, Python objects, bytes of malloc, bytes resident."""
        gc.collect()
        return descriptors(), sys.getallocatedblocks(), native_bytes(), resident_bytes()

    def bugs(self) -> int:
        """How often the engine caught an exception of its own."""
        return self.side.stats.get("events", {}).get("internal_error", 0)


def serve(name: str, provider: str, trouble: int | None, settings: dict[str, object], **_: object) -> None:
    """Carry out what comes in, until it ends."""
    transport: Transport = FabricTransport(provider=provider)
    if trouble is not None:
        logging.basicConfig(level=logging.ERROR)
        # Bounded by design, at sizes that a short run doesn't reach.
        sources.REMEMBERED_TRANSFERS = home.REPEATED_REQUESTS = 64
        faults = Delay(0, 0.02, share=0.1), Some(failed=0.001, lost=0.0001), Reorder()
        transport = FaultyTransport(transport, *faults, seed=trouble)
    with Side(name, transport, ConnectorSettings.model_validate(settings)) as side:
        commands = Commands(side)
        print('"ready"', flush=True)
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            result: Any = getattr(commands if hasattr(commands, command) else side, command)(*arguments)
            print(json.dumps(result if isinstance(result, (bool, int, list, tuple)) else None), flush=True)
