"""Pushes from one endpoint of the stand-in for libfabric to another; run as ``-m``, with the case as JSON.

A process of its own, because a process loads one libfabric for good. Prints what came of it, as JSON.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from neuron_pushkv.device.base import Dmabuf, Memory, MemoryKind
from neuron_pushkv.errors import DeviceError, PushKVError
from neuron_pushkv.transport.base import Event, Product, Registration, Span, SpanTable, immediate
from neuron_pushkv.transport.fabric import FabricTransport

OFFSET = 8192
"""Where in its descriptor each exported part begins."""


class Side:
    """A transport and device memory, which is the process's own here."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.exported: list[tuple[int, int]] = []
        kind = MemoryKind(case.get("kind", "neuron"))
        self.transport = FabricTransport(
            case.get("provider", "efa"),
            case["library"] and Path(case["library"]),
            device=MemoryKind(case.get("opened_for", kind)),
            flush=case.get("flush", True),
            nics=tuple(case.get("nics", ())),
            preferred=case.get("preferred", False),
            export=self.export if "export" in case else None,
            hint=case.get("hint", ""),
        )
        self.bytes = mmap.mmap(-1, case.get("length", 1 << 20))
        self.view = np.frombuffer(self.bytes, dtype=np.uint8)
        self.memory = Memory(self.view.ctypes.data, len(self.view), kind, 3, case.get("mapped", True))
        self.registration: Registration = self.transport.register(self.memory)

    def export(self, memory: Memory) -> Dmabuf | None:
        self.exported.append((memory.address - self.view.ctypes.data, memory.length))
        after = self.case["export"]
        if after is not None and len(self.exported) > after:
            if self.case.get("raises"):
                raise DeviceError("no more of them")
            return None
        return Dmabuf(os.memfd_create("part"), OFFSET)


def wait(transport: FabricTransport, count: int) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + 20
    while len(events) < count and time.monotonic() < deadline:
        events += transport.poll(0.2)
    return events


def push(near: Side, far: Side, runs: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Connect, write ``runs``, wait until both sides have been told; whether the target has what it should then."""
    ours, theirs = near.transport.open_peer(), far.transport.open_peer()
    near.transport.connect(ours, far.transport.address(theirs))
    time.sleep(0.05 if near.case.get("late") else 0)
    far.transport.connect(theirs, near.transport.address(ours))
    near.view[:] = np.resize(np.random.default_rng(1).integers(1, 256, 65521, dtype=np.uint8), len(near.view))
    span = Span(near.registration, near.memory.address, near.transport.attach(ours, far.registration.description), 0)
    expected = far.view.copy()
    for local, remote, length in runs:
        expected[remote : remote + length] = near.view[local : local + length]
    far.transport.expect(1, 0)
    batch = [Product(SpanTable([span]), np.array(runs, dtype=np.uint64))]
    ticket = near.transport.write(ours, batch, immediate(1, 0))
    far.transport.goal(1, 0, ticket.writes)
    events = [type(event).__name__ for event in wait(near.transport, 1) + wait(far.transport, 1)]
    return {"events": events, "writes": ticket.writes, "equal": bool((far.view == expected).all())}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def main(case: dict[str, Any]) -> dict[str, Any]:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    sides: list[Side] = []
    result: dict[str, Any] = {"warnings": warnings}
    try:
        sides += [Side(case), Side(case)]
        before = descriptors()
        for side in sides:
            side.transport.register(side.memory)
        result["kept"] = descriptors() - before
        if case.get("runs"):
            result |= push(*sides, case["runs"])
        near = sides[0]
        result["exported"] = near.exported
        result["base"] = near.memory.address
        result["max_message"] = near.transport.core.facts.max_message
        result["flushes"] = sides[1].transport.counters().extra["flushes"]
    except PushKVError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    for side in sides:
        side.transport.close()
    return result


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
