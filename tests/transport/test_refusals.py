"""What is refused: addresses, memory, keys and ranges that are not right."""

from __future__ import annotations

import array
from typing import Any

import pytest

from neuron_pushkv.device.base import Memory, MemoryKind
from neuron_pushkv.errors import RegistrationError, TransportError
from neuron_pushkv.transport.base import Failed, Product, Registration, Span, Written, immediate
from tests.transport.conftest import Pair
from tests.transport.side import BUFFER, eventually

PAGE = 4096
ENDED = (Written, Failed)


@pytest.mark.parametrize("address", [b"", b"x", bytes(16), b"loopback:x", b"pkf1" + bytes(60), bytes(range(256)) * 4])
def test_garbage_is_no_address(pair: Pair, address: bytes) -> None:
    peer, _ = pair.near.open_peer()
    with pytest.raises(TransportError, match="not an address"):
        pair.near.connect(peer, address)
    with pytest.raises(TransportError, match="not connected"):
        pair.near.write(peer, pair.window, [(0, 0, 8)], immediate(0, 0))


def test_a_damaged_address_is_refused(process_pair: Pair) -> None:
    pair = process_pair
    peer, _ = pair.near.open_peer()
    _, address = pair.far.open_peer()
    for place in range(len(address)):
        damaged = bytearray(address)
        damaged[place] ^= 0x10
        with pytest.raises(TransportError, match=r"not an address|of provider"):
            pair.near.connect(peer, bytes(damaged))


def test_connecting_twice_is_refused(pair: Pair) -> None:
    _, address = pair.far.open_peer()
    with pytest.raises(TransportError, match="connected already"):
        pair.near.connect(pair.ours, address)


@pytest.mark.parametrize("fault", ["key", "beyond", "before"])
def test_a_wrong_key_or_a_range_outside_writes_nothing(pair: Pair, fault: str) -> None:
    near, far = pair.near, pair.far
    far.fill(0, bytes(BUFFER))
    far.expect(1, 0)
    ours, _ = pair.another()
    base, key, length = pair.window
    address, wrong_key = {
        "key": (base, key ^ 1),
        "beyond": (base + length - 32, key),
        "before": ((base - 32) % (1 << 64), key),
    }[fault]
    near.fill(0, b"\xee" * PAGE)
    runs = array.array("Q", (0, 0, 64))
    if address + 64 >= 1 << 64:
        with pytest.raises(TransportError, match="beyond 64 bits"):
            near.transport.write(
                ours, [Product([Span(near.registration, near.start, address, key)], runs)], immediate(1, 0)
            )
        return
    span = Span(near.registration, near.start, address, wrong_key)
    ticket = near.transport.write(ours, [Product([span], runs)], immediate(1, 0))
    assert_refused(pair, near, ours, ticket.id)
    good = near.write(pair.ours, pair.window, [(PAGE, PAGE, 64)], immediate(1, 0))
    while near.events(1, Written) != [Written(good.id)]:
        pass
    eventually(lambda: far.count(1, 0) == 1, "only the good one is counted")
    assert b"\xee" not in far.read(0, BUFFER)


def assert_refused(pair: Pair, sender: Any, peer: int, ticket: int) -> None:
    """A write that the receiver's network refuses fails. shm drops it and doesn't tell its sender what became of it."""
    if pair.kind.provider == "shm":
        sender.poll(0.05)
        sender.fence(peer)
        return
    (ended,) = sender.events(1, ENDED)
    assert isinstance(ended, Failed)
    assert (ended.ticket, ended.written) == (ticket, 0)
    assert ended.detail


def test_writes_outside_registered_memory_are_refused_here(pair: Pair) -> None:
    near = pair.near
    for runs in ([(BUFFER - 8, 0, 16)], [(0, 0, BUFFER + 1)], [((1 << 64) - 8, 0, 16)]):
        with pytest.raises((TransportError, OverflowError)):
            near.write(pair.ours, pair.window, runs, immediate(0, 0))
    with pytest.raises(TransportError, match="no bytes"):
        near.write(pair.ours, pair.window, [(0, 0, 0)], immediate(0, 0))
    with pytest.raises(TransportError, match="without spans or runs"):
        near.write(pair.ours, pair.window, [], immediate(0, 0))
    below = Span(near.registration, near.start - 8, pair.window[0], pair.window[1])
    with pytest.raises(TransportError, match="leaves the registered memory"):
        near.transport.write(pair.ours, [Product([below], array.array("Q", (0, 0, 16)))], immediate(0, 0))
    unknown = Span(Registration(1 << 50, near.registration.memory, 0, 0), near.start, 0, 0)
    with pytest.raises(TransportError, match="not registered"):
        near.transport.write(pair.ours, [Product([unknown], array.array("Q", (0, 0, 16)))], immediate(0, 0))


def test_memory_is_deregistered_when_nothing_reads_it(pair: Pair) -> None:
    near, far = pair.near, pair.far
    near.write(pair.ours, pair.window, [(0, 0, 64)], immediate(0, 0), near.hold())
    with pytest.raises(TransportError, match="under way"):
        near.deregister()
    near.release()
    near.events(1, Written)
    near.deregister()
    with pytest.raises(TransportError, match="not registered"):
        near.write(pair.ours, pair.window, [(0, 0, 64)], immediate(0, 0))
    with pytest.raises(TransportError, match="not registered"):
        near.deregister()
    # And it can't be written to any more.
    near.fill(0, bytes(64))
    far.fill(0, b"\xee" * 64)
    ticket = far.write(pair.theirs, near.window(), [(0, 0, 64)], immediate(0, 0))
    assert_refused(pair, far, pair.theirs, ticket.id)
    assert near.read(0, 64) == bytes(64)


def test_memory_that_cannot_be_registered_is_refused(pair: Pair) -> None:
    with pytest.raises(RegistrationError, match="no bytes"):
        pair.near.transport.register(Memory(pair.near.start, 0))
    if pair.kind.provider != "loopback":
        with pytest.raises(RegistrationError, match="neuron memory"):
            pair.near.transport.register(Memory(pair.near.start, 64, MemoryKind.NEURON, 0))
