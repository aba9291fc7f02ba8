"""What is refused: addresses, memory, keys and ranges that are not right."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_pushkv.device.base import Memory, MemoryKind
from neuron_pushkv.errors import RegistrationError, TransportError
from neuron_pushkv.transport.base import Failed, Product, Registration, Span, SpanTable, Written, immediate
from tests.transport.conftest import Pair
from tests.transport.side import BUFFER, eventually, table

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


def test_a_wrong_key_writes_nothing(pair: Pair) -> None:
    near, far = pair.near, pair.far
    if pair.kind.name == "nixl":
        pytest.skip("NIXL's keys are in the address, and a description of other memory is refused when it is attached")
    far.fill(0, bytes(BUFFER))
    far.expect(1, 0)
    ours, _ = pair.another()
    head = 24 if pair.kind.provider != "loopback" else len(pair.window) - 1  # then follow the keys, all of them
    wrong = pair.window[:head] + bytes(byte ^ 1 for byte in pair.window[head:])
    near.fill(0, b"\xee" * PAGE)
    ticket = near.write(ours, wrong, [(0, 0, 64)], immediate(1, 0))
    assert_refused(pair, near, ours, ticket.id)
    good = near.write(pair.ours, pair.window, [(PAGE, PAGE, 64)], immediate(1, 0))
    while near.events(1, Written) != [Written(good.id)]:
        pass
    eventually(lambda: far.count(1, 0) == 1, "only the good one is counted")
    assert b"\xee" not in far.read(0, BUFFER)


@pytest.mark.parametrize("description", [b"", b"memory:", b"memory:8:x", b"pkm1", bytes(range(64))])
def test_garbage_is_no_description(pair: Pair, description: bytes) -> None:
    with pytest.raises(TransportError, match="not a description of memory"):
        pair.near.transport.attach(pair.ours, description)


def test_a_description_that_is_cut_or_damaged_is_refused(process_pair: Pair) -> None:
    near, window = process_pair.near, process_pair.window
    wrong = [window[:size] for size in range(len(window))] + [window + b"\0"]
    for place in (0, 1, 2, 3):
        wrong.append(window[:place] + b"?" + window[place + 1 :])
    wrong.append(window[:4] + b"\2" + window[5:])  # twice the rails, but not the keys
    wrong.append(window[:4] + b"\0" + window[5:])
    wrong.append(window[:6] + b"\2" + window[7:])  # neither addressed from 0 nor from a base
    wrong.append(window[:7] + b"\x40" + window[8:])  # parts of 2 ** 64 bytes
    wrong.append(window[:7] + b"\x08" + window[8:])  # more parts than keys
    wrong.append(window[:8] + bytes(8) + window[16:])  # no bytes
    wrong.append(window[:8] + b"\xff" * 8 + window[16:])
    for description in wrong:
        if description == window:
            continue  # NIXL's has an address in those places
        with pytest.raises(TransportError, match="not a description of memory"):
            near.transport.attach(process_pair.ours, description)


def test_memory_is_attached_to_one_connected_peer_until_its_fence(pair: Pair) -> None:
    near, far = pair.near, pair.far
    ours, _ = pair.another()
    unconnected, _ = near.open_peer()
    if pair.kind.provider != "loopback":
        with pytest.raises(TransportError, match="not connected"):
            near.transport.attach(unconnected, pair.window)
    target = near.target(pair.ours, pair.window)
    span = Span(near.registration, near.start, target, 0)
    product = Product(SpanTable([span]), table([(0, 0, 8)]))
    with pytest.raises(TransportError, match="not attached"):
        near.transport.write(ours, [product], immediate(0, 0))
    near.transport.write(pair.ours, [product], immediate(0, 0))
    near.events(1, Written)
    near.fence(pair.ours)
    with pytest.raises(TransportError, match="fenced"):
        near.transport.attach(pair.ours, pair.window)
    ours, _ = pair.another()
    with pytest.raises(TransportError, match="not attached"):
        near.transport.write(ours, [product], immediate(0, 0))
    far.expect(2, 0)
    near.write(ours, pair.window, [(0, 0, 8)], immediate(2, 0))
    near.events(1, Written)
    eventually(lambda: far.count(2, 0) == 1, "attached again, it works")


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
    for runs in ([(BUFFER - 8, 0, 16)], [(0, 0, BUFFER + 1)]):
        with pytest.raises(TransportError, match="leaves the registered memory"):
            near.write(pair.ours, pair.window, [(0, 0, 8), *runs], immediate(0, 0))
    for runs in ([(0, BUFFER - 8, 16)], [(0, BUFFER, 1)], [(0, 1 << 62, 8)]):
        with pytest.raises(TransportError, match="leaves the peer's memory"):
            near.write(pair.ours, pair.window, [*runs, (0, 0, 8)], immediate(0, 0))
    for runs in ([((1 << 64) - 8, 0, 16)], [(0, (1 << 64) - 8, 16)], [((1 << 64) - 8, 0, 7)], [(0, 0, (1 << 64) - 1)]):
        with pytest.raises(TransportError, match=r"leaves the|too large"):
            near.write(pair.ours, pair.window, runs, immediate(0, 0))
    with pytest.raises(TransportError, match="no bytes"):
        near.write(pair.ours, pair.window, [(0, 0, 0)], immediate(0, 0))
    with pytest.raises(TransportError, match="without spans or runs"):
        near.write(pair.ours, pair.window, [], immediate(0, 0))
    target = near.target(pair.ours, pair.window)
    runs = table([(0, 0, 16)])
    for span, problem in (
        (Span(near.registration, near.start - 8, target, 0), "leaves the registered memory"),
        (Span(near.registration, near.start + BUFFER - 8, target, 0), "leaves the registered memory"),
        (Span(near.registration, near.start, target, BUFFER - 8), "leaves the peer's memory"),
        (Span(near.registration, near.start, target, (1 << 64) - 8), "leaves the peer's memory"),
        (Span(near.registration, near.start, target + 1, 0), "not attached"),
        (Span(Registration(1 << 50, near.registration.memory, b""), near.start, target, 0), "not registered"),
    ):
        with pytest.raises(TransportError, match=problem):
            near.transport.write(pair.ours, [Product(SpanTable([span]), runs)], immediate(0, 0))
    assert near.poll(0) == []


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
    if pair.kind.name == "nixl":
        pytest.skip("NIXL over UCX lets a peer go on writing to memory that it knew; only a fence ends that")
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
