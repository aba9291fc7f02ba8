"""One end of a trial transfer: some memory, a pattern, and one-sided writes between it and the other end's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.device.base import Copies
from neuron_pushkv.doctor.accelerators import Device
from neuron_pushkv.doctor.words import About
from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Arrived, Event, Failed, Product, Span, SpanTable, Transport, Written, immediate

WAIT_SECONDS = 20.0
"""The longest that any one step of it may take."""
WORD_BYTES = 8
ECHO_FROM = 64
"""Where an echo's bytes are read; they are written to the beginning."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Side:
    """Raises :class:`~neuron_pushkv.errors.RegistrationError` for memory that the network refuses."""

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport = transport
        self._device = device
        self._host: NDArray[np.uint64] = np.zeros(device.memory.length // WORD_BYTES, dtype=np.uint64)
        self._registration = transport.register(device.memory)
        self._peer: int | None = None
        self._target = 0
        self._theirs: About | None = None

    def about(self, family: str | None, line_rate: int | None) -> About:
        """What the other end has to know; with a new endpoint for it."""
        self.part()
        self._peer = self._transport.open_peer()
        return About(
            provider=self._transport.provider,
            device=self._device.accelerator.name,
            family=family or "",
            line_rate=line_rate or 0,
            endpoint=self._transport.address(self._peer),
            memory=self._registration.description,
            size=self._device.memory.length,
        )

    def meet(self, theirs: About) -> None:
        """Connect to the other end. Raises :class:`TransportError`."""
        assert self._peer is not None
        self._transport.connect(self._peer, theirs.endpoint)
        self._target = self._transport.attach(self._peer, theirs.memory)
        self._theirs = theirs

    def part(self) -> None:
        """Done with that one."""
        if self._peer is not None:
            self._transport.fence(self._peer)
            self._peer = self._theirs = None

    def close(self) -> None:
        """Gives nothing back but the registration: transport and memory are the caller's."""
        self.part()
        self._transport.deregister(self._registration)

    def push(self, slot: int, epoch: int, seed: int, size: int, piece: int) -> tuple[int, float]:
        """Fill ``size`` bytes with that pattern and write them over; returns the immediates and the seconds it took."""
        self._room(size)
        self._host[: size // WORD_BYTES] = pattern(seed, size)
        self._copy(size, to_device=True)
        starts: NDArray[np.uint64] = np.arange(0, size, piece, dtype=np.uint64)
        lengths = np.minimum(np.uint64(piece), np.uint64(size) - starts)
        began = time.perf_counter()
        writes = self._write(slot, epoch, np.stack([starts, starts, lengths], axis=1))
        return writes, time.perf_counter() - began

    def expect(self, slot: int, epoch: int, size: int) -> None:
        """Clear ``size`` bytes, and count what comes."""
        self._room(size)
        self._host[: size // WORD_BYTES] = 0
        self._copy(size, to_device=True)
        self._transport.expect(slot, epoch)

    def compare(self, slot: int, epoch: int, seed: int, size: int, writes: int) -> tuple[int, int]:
        """Wait until that many have come; returns how many words are wrong, and where the first is, in bytes."""
        self._room(size)
        self._arrival(slot, epoch, writes)
        self._transport.forget(slot)
        self._copy(size, to_device=False)
        wrong = np.flatnonzero(self._host[: size // WORD_BYTES] != pattern(seed, size))
        return len(wrong), int(wrong[0]) * WORD_BYTES if len(wrong) else 0

    def listen(self, slot: int, epoch: int) -> None:
        """Count echoes, which disturb no pattern that anybody still compares."""
        self._met()
        self._transport.expect(slot, epoch)

    def call(self, slot: int, epoch: int, rounds: int) -> float:
        """Send small writes, each after the last one's echo; returns the median of half a round, in seconds."""
        halves = []
        for number in range(1, rounds + 1):
            began = time.perf_counter()
            self._write(slot, epoch, _ECHO)
            self._arrival(slot, epoch, number)
            halves.append((time.perf_counter() - began) / 2)
        self._transport.forget(slot)
        return statistics.median(halves)

    def echo(self, slot: int, epoch: int, rounds: int) -> None:
        """The other end of it."""
        for number in range(1, rounds + 1):
            self._arrival(slot, epoch, number)
            self._write(slot, epoch, _ECHO)
        self._transport.forget(slot)

    def _met(self) -> About:
        if self._theirs is None:
            raise TransportError("the other end has not been met; it must say first where to write to")
        return self._theirs

    def _room(self, size: int) -> None:
        most = min(self._device.memory.length, self._met().size)
        if not 0 < size <= most or size % WORD_BYTES:
            raise TransportError(f"{size} bytes can't be tried out; both ends have {most}")

    def _copy(self, size: int, *, to_device: bool) -> None:
        row: Copies = np.array([[self._device.memory.address, self._host.ctypes.data, size]], dtype=np.uint64)
        accelerator = self._device.accelerator
        (accelerator.write if to_device else accelerator.read)(row)

    def _write(self, slot: int, epoch: int, runs: NDArray[np.uint64]) -> int:
        assert self._peer is not None
        spans = SpanTable([Span(self._registration, self._device.memory.address, self._target, 0)])
        batch = [Product(spans, np.ascontiguousarray(runs))]
        ticket = self._transport.write(self._peer, batch, immediate(slot, epoch))

        def ended(event: Event) -> bool:
            if isinstance(event, Failed) and event.ticket == ticket.id:
                raise TransportError(f"writing to the other end has failed: {event.detail}")
            return event == Written(ticket.id)

        self._wait(ended, f"{ticket.bytes} bytes were not written")
        return ticket.writes

    def _arrival(self, slot: int, epoch: int, count: int) -> None:
        self._transport.goal(slot, epoch, count)

        def came(event: Event) -> bool:
            return isinstance(event, Arrived) and (event.slot, event.epoch) == (slot, epoch) and event.count >= count

        self._wait(came, f"{self._transport.count(slot, epoch)} of {count} writes had arrived")

    def _wait(self, matches: Callable[[Event], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            # Steps follow each other, so what comes besides is about nothing that anybody waits for.
            if any(matches(event) for event in self._transport.poll(0.5)):
                return
        raise TransportError(f"{what} within {WAIT_SECONDS:g} s")


_ECHO = np.array([[ECHO_FROM, 0, WORD_BYTES]], dtype=np.uint64)


def pattern(seed: int, size: int) -> NDArray[np.uint64]:
    """``size`` bytes in which every word of 8 says where it belongs, and which of the patterns it is of."""
    places: NDArray[np.uint64] = np.arange(size // WORD_BYTES, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return (places + np.uint64(seed)) * _MIX
