"""What a transport does that counts arrivals and queues events by itself, in Python."""

from __future__ import annotations

import threading

from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import EPOCHS, SLOTS, Event, Transport
from neuron_pushkv.transport.hub import Port, Slot


class CountingTransport(Transport):
    """Keeps slots and events in a :class:`Port`, all under ``lock``."""

    def __init__(self, lock: threading.RLock) -> None:
        self._port = Port(lock)
        self._lock = lock
        self._woken = False
        self._closed = False

    def expect(self, slot: int, epoch: int) -> None:
        """Raises :class:`TransportError` if either is out of range."""
        if not (0 <= slot < SLOTS and 0 <= epoch < EPOCHS):
            raise TransportError("slot or epoch out of range")
        with self._lock:
            self._open()
            self._port.slots[slot] = Slot(epoch)

    def goal(self, slot: int, epoch: int, count: int) -> None:
        """Raises :class:`TransportError` if another epoch, or none, is expected there."""
        with self._lock:
            self._open()
            entry = self._port.slots.get(slot)
            if entry is None or entry.epoch != epoch:
                raise TransportError("that epoch is not expected at that slot")
            entry.goal = count
            self._port.reach(slot, entry)

    def count(self, slot: int, epoch: int) -> int:
        """0 where something else is expected."""
        with self._lock:
            entry = self._port.slots.get(slot)
            return entry.count if entry is not None and entry.epoch == epoch else 0

    def forget(self, slot: int) -> None:
        """A goal that has not been reached is forgotten with it."""
        with self._lock:
            self._port.slots.pop(slot, None)

    def poll(self, timeout: float) -> list[Event]:
        """Raises :class:`TransportError` once the transport is closed."""
        with self._lock:
            self._port.happened.wait_for(lambda: self._port.events or self._woken or self._closed, timeout)
            self._open()
            self._woken = False
            events = list(self._port.events)
            self._port.events.clear()
            return events

    def wake(self) -> None:
        """May be called after close."""
        with self._lock:
            self._woken = True
            self._port.happened.notify_all()

    def _open(self) -> None:
        if self._closed:
            raise TransportError("the transport is closed")
