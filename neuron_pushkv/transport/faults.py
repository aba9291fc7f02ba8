"""A transport that goes wrong on purpose, around any other: for tests, and for rehearsing failures on real engines.

Every write of a batch becomes a ticket of its own at the transport within, so that faults can be dealt out per write.
They are drawn from a seed, and a write is numbered by the order in which it was asked for; so the same calls meet the
same faults again.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from neuron_pushkv.device.base import Memory, ReadyWord
from neuron_pushkv.device.steps import is_reached
from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import (
    Arrived,
    Batch,
    Event,
    Failed,
    Peer,
    Product,
    Registration,
    SpanTable,
    Ticket,
    Transport,
    TransportCounters,
    Written,
)
from neuron_pushkv.transport.fates import Delay, FailBatches, Fate, Fault

_PERIOD = 0.002
"""Seconds between looks at what only time or another thread changes: delays, stalls, ready words."""


@dataclass
class _Write:
    product: Product
    fate: Fate
    due: float


@dataclass(eq=False)
class _Task:
    """A ticket of ours under way."""

    id: int
    peer: Peer
    immediate: int
    ready: ReadyWord | None
    left: deque[_Write]
    writes: int
    lost: int = 0
    written: int = 0
    in_doubt: int = 0
    detail: str | None = None
    inner: set[int] = field(default_factory=set)


class FaultyTransport(Transport):
    """``inner`` with ``faults``, drawn from ``seed``. Closing it closes ``inner``.

    Two are wanted so often that they have short forms: ``delay``, seconds by which every write is posted late, and
    ``fail_batches``, numbers of the batches that fail.
    """

    def __init__(
        self, inner: Transport, *faults: Fault, seed: int = 0, delay: float = 0.0, fail_batches: Collection[int] = ()
    ) -> None:
        self.inner = inner
        self.provider = inner.provider
        self.library = inner.library
        self.fence_is_final = inner.fence_is_final
        self.flushes = inner.flushes
        self.reads_late = inner.reads_late
        self._faults: tuple[Fault, ...] = (*faults, Delay(delay, delay), FailBatches(fail_batches))
        self._chance = random.Random(seed)
        self._never = ctypes.c_uint32(0)  # a ready word that is not reached
        self._lock = threading.RLock()
        self._happened = threading.Condition(self._lock)
        self._tasks: dict[int, _Task] = {}
        self._by_inner: dict[int, tuple[_Task, bool]] = {}
        """Tickets within: whose they are, and whether they are the write itself or a copy of it."""
        self._events: deque[Event] = deque()
        self._writes = 0
        self._tickets = 0
        self._woken = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        """What the transport within refuses at once is refused at once: nothing is posted then."""
        # Within, this checks everything, posts nothing, and is taken back.
        trial = self.inner.write(peer, batch, immediate, ReadyWord(ctypes.addressof(self._never), 1))
        self.inner.cancel(trial.id)
        singles = [
            Product(SpanTable([span]), product.runs[i : i + 1])
            for product in batch
            for span in product.spans
            for i in range(len(product.runs))
        ]
        with self._lock:
            for fault in self._faults:
                fault.arrange(singles, self._chance)
            now = time.monotonic()
            left: deque[_Write] = deque()
            for single in singles:
                fate = Fate(self._writes, self._tickets)
                for fault in self._faults:
                    fault.befall(fate, self._chance)
                self._writes += 1
                left.append(_Write(single, fate, now + fate.delay))
            self._tickets += 1
            task = _Task(self._tickets, peer, immediate, ready, left, len(left))
            self._tasks[task.id] = task
            self._settle(task)
        self.inner.wake()
        return Ticket(task.id, peer, task.writes, trial.bytes)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                waiting = self._post()
            try:
                events = self.inner.poll(_PERIOD if waiting else 0.05)
            except TransportError:
                return  # closed under us, by close()
            with self._lock:
                for event in events:
                    self._take(event)

    def _post(self) -> bool:
        """Post what may be posted; whether anything is left that may be later."""
        now = time.monotonic()
        for task in list(self._tasks.values()):
            if task.detail is not None or not is_reached(task.ready):
                continue
            for _ in range(len(task.left)):
                if not all(fault.permits(len(self._by_inner)) for fault in self._faults):
                    return True
                write = task.left.popleft()
                if write.due > now:
                    task.left.append(write)
                elif not self._post_one(task, write):
                    break
        return any(task.left for task in self._tasks.values())

    def _post_one(self, task: _Task, write: _Write) -> bool:
        """False if that was the ticket's last."""
        if write.fate.failure is not None:
            task.detail = write.fate.failure
            self._settle(task)
            return False
        if write.fate.dropped:
            task.lost += 1
            return True
        for copy in range(write.fate.copies):
            try:
                ticket = self.inner.write(task.peer, [write.product], task.immediate).id
            except TransportError as error:
                task.detail = str(error)
                self._settle(task)
                return False
            self._by_inner[ticket] = (task, copy == 0)
            task.inner.add(ticket)
        return True

    def _take(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._tell(event)
            return
        task, counts = self._by_inner.pop(event.ticket, (None, False))
        if task is None:
            return  # a trial, or of a ticket that a fence has ended
        task.inner.remove(event.ticket)
        if isinstance(event, Written):
            task.written += counts
        else:
            task.in_doubt += event.in_doubt
            task.detail = task.detail or event.detail
        self._settle(task)

    def _settle(self, task: _Task) -> None:
        """Tell its end if that has come."""
        if task.inner or task.lost or (task.left and task.detail is None):
            return
        if task.written == task.writes:
            self._end(task, Written(task.id))
        else:
            self._end(task, Failed(task.id, task.written, task.in_doubt, task.detail or ""))

    def _end(self, task: _Task, event: Event) -> None:
        del self._tasks[task.id]
        for ticket in task.inner:
            del self._by_inner[ticket]
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._happened.notify_all()

    def fence(self, peer: Peer) -> None:
        """What was dropped is in doubt like all that is under way: here only we know better."""
        with self._lock:
            tasks = [task for task in self._tasks.values() if task.peer == peer]
            for task in tasks:
                task.detail = task.detail or "the peer was fenced"
            self.inner.fence(peer)
            for task in tasks:
                doubtful = task.in_doubt + len(task.inner) + task.lost
                self._end(task, Failed(task.id, task.written, doubtful, task.detail or ""))

    def cancel(self, ticket: int) -> None:
        """What was dropped is under way for ever, so such a ticket does not end by this."""
        with self._lock:
            task = self._tasks.get(ticket)
            if task is not None:
                task.detail = task.detail or "cancelled"
                self._settle(task)

    def poll(self, timeout: float) -> list[Event]:
        """Raises :class:`TransportError` once the transport is closed."""
        with self._lock:
            self._happened.wait_for(lambda: self._events or self._woken or self._closed, timeout)
            if self._closed:
                raise TransportError("the transport is closed")
            self._woken = False
            events = list(self._events)
            self._events.clear()
            return events

    def wake(self) -> None:
        """May be called after close."""
        with self._lock:
            self._woken = True
            self._happened.notify_all()

    def close(self) -> None:
        """Waits for the thread."""
        with self._lock:
            self._closed = True
            self._happened.notify_all()
        self.inner.close()
        self._thread.join()

    def register(self, memory: Memory) -> Registration:
        """As within."""
        return self.inner.register(memory)

    def deregister(self, registration: Registration) -> None:
        """Raises :class:`TransportError` also while a ticket of ours is going to read from it."""
        with self._lock:
            for task in self._tasks.values():
                if any(write.product.spans[0].registration == registration for write in task.left):
                    raise TransportError("writes from that memory are under way")
            self.inner.deregister(registration)

    def open_peer(self) -> Peer:
        """As within."""
        return self.inner.open_peer()

    def address(self, peer: Peer) -> bytes:
        """As within."""
        return self.inner.address(peer)

    def connect(self, peer: Peer, address: bytes) -> None:
        """As within."""
        self.inner.connect(peer, address)

    def attach(self, peer: Peer, description: bytes) -> int:
        """As within."""
        return self.inner.attach(peer, description)

    def expect(self, slot: int, epoch: int) -> None:
        """As within."""
        self.inner.expect(slot, epoch)

    def goal(self, slot: int, epoch: int, count: int) -> None:
        """As within."""
        self.inner.goal(slot, epoch, count)

    def count(self, slot: int, epoch: int) -> int:
        """As within."""
        return self.inner.count(slot, epoch)

    def forget(self, slot: int) -> None:
        """As within."""
        self.inner.forget(slot)

    def counters(self) -> TransportCounters:
        """As within."""
        return self.inner.counters()
