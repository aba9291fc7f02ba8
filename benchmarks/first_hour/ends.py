"""One side: memory of a device, a transport that it is registered with, an endpoint, and its part in each question."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.first_hour.channel import PATIENCE
from neuron_pushkv.device import accelerator_for
from neuron_pushkv.device.base import Memory, MemoryKind
from neuron_pushkv.device.topology import efa_nics, instance_family
from neuron_pushkv.transport.base import (
    Arrived,
    Event,
    Failed,
    Product,
    Registration,
    Span,
    SpanTable,
    Ticket,
    immediate,
)
from neuron_pushkv.transport.fabric import FabricTransport

THERE, BACK, FENCED = 1, 2, 3
"""Slots: of what the asking side writes, of answers, of what is cut off."""
SETTLING = 1.0
"""Seconds in which what was still under way at a fence would land."""


@dataclass(frozen=True)
class Settings:
    """What both sides are told on their command lines."""

    provider: str
    host: str
    library: Path | None
    device: str
    index: int
    size: int


def pattern(number: int, length: int) -> NDArray[np.uint8]:
    """``length`` bytes, unlike any other number's."""
    words = np.arange(-(-length // 4), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(number * 40503 & 0xFFFFFFFF)
    return words.view(np.uint8)[:length]


class End:
    """``settings.size`` bytes of device memory, registered anew with every transport."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.accelerator = accelerator_for(settings.device, settings.index)
        self.memory: Memory = self.accelerator.allocate(settings.size)
        self.transport: FabricTransport | None = None
        self._events: deque[Event] = deque()

    def about(self) -> dict[str, Any]:
        """The machine, its device and its cards."""
        nics = self.accelerator.nics(self.memory)
        return {
            "instance_family": instance_family(),
            "device": f"{self.accelerator.name}:{self.settings.index}",
            "memory": f"{self.memory.kind}, {'mapped' if self.memory.mapped else 'not mapped'}",
            "needs_flush": self.accelerator.needs_flush,
            "efa_nics": list(efa_nics()),
            "nearest_nics": list(nics),
            "hint": self.accelerator.hint,
        }

    def open(self, nics: list[str] | None = None, flush: bool | None = None) -> dict[str, Any]:
        """A new transport and endpoint in place of the old; what the other side has to know, and what was opened."""
        self.close_transport()
        if nics is None:
            nearest = self.accelerator.nics(self.memory)
            nics = list(nearest) if self.settings.provider.startswith("efa") else []
        self.transport = FabricTransport(
            self.settings.provider,
            self.settings.library,
            self.settings.host,
            nics=tuple(nics),
            flush=self.accelerator.needs_flush if flush is None else flush,
            device=self.memory.kind if self.memory.mapped else MemoryKind.HOST,
            export=self.accelerator.export,
            hint=self.accelerator.hint,
        )
        self.registration: Registration = self.transport.register(self.memory)
        self.peer = self.transport.open_peer()
        facts = self.transport.core.facts
        return {
            "address": self.transport.address(self.peer).hex(),
            "description": self.registration.description.hex(),
            "library": f"{self.transport.library} at {facts.library}",
            "provider": self.transport.provider,
            "nics": list(facts.nics),
            "announces_arrivals": facts.waits,
            "takes_dmabufs": facts.takes_dmabufs,
        }

    def connect(self, address: str, description: str, **_: Any) -> None:
        """To the other side, by what its :meth:`open` returned."""
        transport = self.open_transport
        transport.connect(self.peer, bytes.fromhex(address))
        self.target = transport.attach(self.peer, bytes.fromhex(description))
        self.span = SpanTable([Span(self.registration, self.memory.address, self.target, 0)])
        for slot in (THERE, BACK, FENCED):
            transport.expect(slot, 0)

    @property
    def open_transport(self) -> FabricTransport:
        """Raises RuntimeError before :meth:`open`."""
        if self.transport is None:
            raise RuntimeError("no transport is open")
        return self.transport

    def write(self, runs: list[tuple[int, int, int]] | NDArray[np.uint64], slot: int) -> Ticket:
        """``runs``: offset here, offset there, bytes."""
        product = Product(self.span, np.asarray(runs, dtype=np.uint64).reshape(-1, 3))
        return self.open_transport.write(self.peer, [product], immediate(slot, 0))

    def until(self, *wanted: type[Event], patience: float = PATIENCE) -> Event:
        """The next event of those types; others are dropped. Raises RuntimeError if there is none in time."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, wanted):
                    return event
                if isinstance(event, Failed):
                    raise RuntimeError(f"a write failed: {event.detail}")
            self._events += self.open_transport.poll(0.5)
        raise RuntimeError(f"nothing within {patience:.0f} s; the last write may never have arrived")

    def arrived(self, slot: int, count: int) -> None:
        """Wait until that many writes have come."""
        self.open_transport.goal(slot, 0, count)
        self.until(Arrived)

    def store(self, data: NDArray[np.uint8]) -> None:
        """At the start of the device's memory."""
        self.accelerator.write(np.array([(self.memory.address, data.ctypes.data, len(data))], dtype=np.uint64))

    def load(self, length: int) -> NDArray[np.uint8]:
        """From the start of the device's memory."""
        data: NDArray[np.uint8] = np.empty(length, dtype=np.uint8)
        self.accelerator.read(np.array([(self.memory.address, data.ctypes.data, length)], dtype=np.uint64))
        return data

    # The serving side's parts.

    def echo(self, count: int, length: int) -> None:
        """Answer each write with one of the same length."""
        for number in range(1, count + 1):
            self.arrived(THERE, number)
            self.write([(0, 0, length)], BACK)

    def watch(self, rounds: int, length: int, pieces: int) -> dict[str, int]:
        """Read back what has been written as soon as it is told, and compare."""
        wrong_rounds = wrong_bytes = 0
        for number in range(1, rounds + 1):
            self.arrived(THERE, number * pieces)
            wrong = int((self.load(length) != pattern(number, length)).sum())
            wrong_rounds += wrong > 0
            wrong_bytes += wrong
            self.write([(0, self.settings.size - 64, 64)], BACK)
        return {"rounds": rounds, "wrong_rounds": wrong_rounds, "wrong_bytes": wrong_bytes}

    def cut_off(self, after: int) -> dict[str, Any]:
        """Close the endpoint when that many writes have come; what changes in memory from then on."""
        self.arrived(FENCED, after)
        began = time.perf_counter()
        self.open_transport.fence(self.peer)
        seconds = time.perf_counter() - began
        before = self.load(self.settings.size)
        time.sleep(SETTLING)
        changed = int((self.load(self.settings.size) != before).sum())
        return {"fence_seconds": seconds, "bytes_changed_after_it": changed, "watched_seconds": SETTLING}

    def close_transport(self) -> None:
        """If there is one."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None
            self._events.clear()

    def close(self) -> None:
        """Give everything back."""
        self.close_transport()
        self.accelerator.close()


class Said(logging.Handler):
    """Collects what is logged of registrations."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        logger = logging.getLogger("neuron_pushkv.fabric.registering")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep its text."""
        self.texts.append(record.getMessage())
