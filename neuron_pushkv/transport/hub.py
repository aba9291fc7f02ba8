"""What the transports on a loopback network share: endpoints, memory that may be written to, and counts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from neuron_pushkv.device.base import Memory, ReadyWord
from neuron_pushkv.transport.base import EPOCHS, Arrived, Batch, Event, TransportCounters


@dataclass
class Slot:
    """What is expected there, and how far it is."""

    epoch: int
    count: int = 0
    goal: int | None = None


@dataclass
class Piece:
    """One write."""

    source: int
    key: int
    remote: int
    length: int


@dataclass
class Task:
    """A ticket under way."""

    id: int
    immediate: int
    ready: ReadyWord | None
    writes: int
    pieces: Iterator[Piece]
    next: Piece | None
    handles: frozenset[int]
    written: int = 0


class Port:
    """What one transport shows to the others on its network: where their writes land and are counted."""

    def __init__(self, lock: threading.RLock) -> None:
        self.work = threading.Condition(lock)
        self.happened = threading.Condition(lock)
        self.memories: dict[int, Memory] = {}
        """By key."""
        self.slots: dict[int, Slot] = {}
        self.events: deque[Event] = deque()
        self.counters = TransportCounters()

    def arrive(self, immediate: int, writes: int = 1) -> None:
        """Count a write, or several at once."""
        number, epoch = divmod(immediate, EPOCHS)
        slot = self.slots.get(number)
        if slot is None or slot.epoch != epoch:
            self.counters.stale_arrivals += writes
            return
        self.counters.arrivals += writes
        slot.count += writes
        self.reach(number, slot)

    def reach(self, number: int, slot: Slot) -> None:
        """Tell whether the goal is reached."""
        if slot.goal is not None and slot.count >= slot.goal:
            slot.goal = None
            self.tell(Arrived(number, slot.epoch, slot.count))

    def tell(self, event: Event) -> None:
        """For the next poll."""
        self.events.append(event)
        self.happened.notify_all()


@dataclass(eq=False)
class Endpoint:
    """One transport's end of a pair."""

    port: Port
    address: bytes
    other: bytes | None = None
    attached: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Length and key of the other side's memories, by what we call these."""
    tasks: deque[Task] = field(default_factory=deque)


def expand(batch: Batch, attached: Mapping[int, tuple[int, int]]) -> Iterator[Piece]:
    """A batch's writes; ``attached`` as in :class:`Endpoint`."""
    for product in batch:
        runs = product.runs.tolist()
        for span in product.spans:
            for local, remote, length in runs:
                yield Piece(span.local + local, attached[span.target][1], span.offset + remote, length)
