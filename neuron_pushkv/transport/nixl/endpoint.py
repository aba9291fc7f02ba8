"""One peer of a NIXL transport: an agent of our own, the tickets that it serves, and what it has heard."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from neuron_pushkv.device.base import ReadyWord
from neuron_pushkv.device.steps import is_reached
from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Failed, Written
from neuron_pushkv.transport.hub import Port
from neuron_pushkv.transport.nixl.agent import Agent
from neuron_pushkv.transport.nixl.parts import Part
from neuron_pushkv.transport.nixl.wire import Notification, Place, Window, unpack_notification

UNDER_WAY = 8
"""Parts of one peer that NIXL has at a time."""


@dataclass(eq=False)
class Task:
    """A ticket under way."""

    id: int
    immediate: int
    ready: ReadyWord | None
    writes: int
    handles: frozenset[int]
    """Of the registrations that it reads from."""
    parts: Iterator[Part]
    detail: str | None = None
    """Why no more of it is posted, if so."""
    posted: list[tuple[int, Part]] = field(default_factory=list)
    """NIXL's handles of what it has now."""
    exhausted: bool = False
    written: int = 0
    in_doubt: int = 0


@dataclass(eq=False)
class Endpoint:
    """``lock`` is held by whoever uses the agent, and taken before the transport's ``guard``, which is for the rest."""

    agent: Agent
    port: Port
    guard: threading.RLock
    lock: threading.Lock = field(default_factory=threading.Lock)
    connected: bool = False
    fenced: bool = False
    targets: dict[int, Place] = field(default_factory=dict)
    tasks: deque[Task] = field(default_factory=deque)
    _seen: Window = field(default_factory=Window)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def check(self) -> None:
        """Raises :class:`TransportError` if it is fenced."""
        if self.fenced:
            raise TransportError("that peer was never opened, or is fenced")

    def look(self) -> bool:
        """Take what has arrived, and take tickets as far as they will go now. Whether anything has happened."""
        if not self.connected or self.fenced:
            return False
        return self._receive() | self._send()

    def fence(self) -> None:
        """What NIXL has of its tickets is in doubt; the agent is gone when this returns."""
        self.fenced = True
        for task in self.tasks:
            for handle, part in task.posted:
                self.agent.release(handle)
                task.in_doubt += part.writes
        self.agent.close()
        with self.guard:
            for task in self.tasks:
                self.port.tell(Failed(task.id, task.written, task.in_doubt, task.detail or "the peer was fenced"))
            self.tasks.clear()

    def _receive(self) -> bool:
        try:
            arrived = self.agent.notifications()
        except TransportError:
            self._count_error()
            return False
        with self.guard:
            for sender, messages in arrived.items():
                for message in messages:
                    said = unpack_notification(message)
                    if said is None or sender != self.agent.remote or not self._seen.is_new(said.number):
                        self.port.counters.errors += 1
                    else:
                        self.port.arrive(said.immediate, said.writes)
        return bool(arrived)

    def _send(self) -> bool:
        moved = False
        with self.guard:
            tasks = list(self.tasks)
        for task in tasks:
            before = task.written, task.in_doubt
            self._settle(task)
            moved |= (task.written, task.in_doubt) != before
            under_way = sum(len(other.posted) for other in tasks)
            while under_way < UNDER_WAY and task.detail is None and not task.exhausted and is_reached(task.ready):
                under_way += self._post(task)
                moved = True
            if not task.posted and (task.exhausted or task.detail is not None):
                self._end(task)
        return moved

    def _settle(self, task: Task) -> None:
        """See what has become of the parts that NIXL has."""
        for entry in list(task.posted):
            handle, part = entry
            try:
                if not self.agent.is_done(handle):
                    continue
            except TransportError as error:
                self._lose(task, part, str(error))
            else:
                task.written += part.writes
                with self.guard:
                    self.port.counters.writes += part.writes
                    self.port.counters.bytes += part.bytes
            self.agent.release(handle)
            task.posted.remove(entry)

    def _post(self, task: Task) -> bool:
        """Give NIXL the next part; whether it has one more now."""
        part = next(task.parts, None)
        if part is None:
            task.exhausted = True
            return False
        notification = Notification(next(self._numbers), task.immediate, part.writes)
        try:
            handle = self.agent.prepare(part, notification.pack())
        except TransportError as error:
            self._lose(task, None, str(error))
            return False
        try:
            self.agent.post(handle)
        except TransportError as error:
            self._lose(task, part, str(error))
            self.agent.release(handle)
            return False
        task.posted.append((handle, part))
        return True

    def _lose(self, task: Task, part: Part | None, detail: str) -> None:
        task.detail = task.detail or detail
        task.in_doubt += part.writes if part is not None else 0
        self._count_error()

    def _count_error(self) -> None:
        with self.guard:
            self.port.counters.errors += 1

    def _end(self, task: Task) -> None:
        with self.guard:
            self.tasks.remove(task)
            if task.written == task.writes:
                self.port.tell(Written(task.id))
            else:
                self.port.tell(Failed(task.id, task.written, task.in_doubt, task.detail or ""))
