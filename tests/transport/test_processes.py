"""What happens when the process on the other side stops or dies."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Failed, Written, immediate
from tests.transport.conftest import Pair, first_library, join
from tests.transport.side import BUFFER, FarSide, eventually

PAGE = 4096
ENDED = (Written, Failed)
BOUND = 3.0
"""Seconds within which a fence must have ended everything, whatever the other side does."""
HALF = BUFFER // 2


@pytest.fixture
def bystander(process_pair: Pair) -> Iterator[tuple[FarSide, int]]:
    """A second far process, and our endpoint towards it."""
    kind = process_pair.kind
    side = FarSide(kind.provider, first_library(), kind.options)
    ours, _ = join(process_pair.near, side)
    yield side, ours
    side.end()


def serves(pair: Pair, side: FarSide, ours: int) -> None:
    """A whole delivery to ``side`` works."""
    near = pair.near
    near.fill(HALF, b"\x05" * HALF)
    side.fill(0, bytes(HALF))
    side.expect(9, 9)
    runs = [(HALF + i * PAGE, i * PAGE, PAGE) for i in range(256)]
    ticket = near.write(ours, side.window(), runs, immediate(9, 9))
    while near.events(1, Written) != [Written(ticket.id)]:
        pass
    eventually(lambda: side.count(9, 9) == 256, "all counted")
    assert side.read(0, 256 * PAGE) == b"\x05" * (256 * PAGE)


def test_nothing_is_called_written_while_the_target_is_stopped(process_pair: Pair) -> None:
    pair, near, far = process_pair, process_pair.near, process_pair.far
    far.fill(0, bytes(BUFFER))
    far.expect(1, 0)
    first = near.write(pair.ours, pair.window, [(0, 0, PAGE)], immediate(1, 0))
    assert near.events(1, ENDED) == [Written(first.id)]
    near.fill(0, b"\x01" * BUFFER)
    far.stop()
    small = near.write(pair.ours, pair.window, [(i * PAGE, i * PAGE, 8 + i) for i in range(300)], immediate(1, 0))
    large = near.write(pair.ours, pair.window, [(HALF, HALF, HALF)], immediate(1, 0))
    assert near.poll(0.5) == []
    far.resume()
    assert {event.ticket for event in near.events(2, Written) if isinstance(event, Written)} == {small.id, large.id}
    eventually(lambda: far.count(1, 0) == 1 + small.writes + large.writes, "all counted")
    assert far.read(HALF, HALF) == b"\x01" * HALF
    for i in range(300):
        assert far.read(i * PAGE, 8 + i) == b"\x01" * (8 + i)


def test_a_stopped_target_is_fenced_and_never_sees_the_source_again(
    process_pair: Pair, bystander: tuple[FarSide, int]
) -> None:
    pair, near, far = process_pair, process_pair.near, process_pair.far
    far.fill(0, bytes(BUFFER))
    first = near.write(pair.ours, pair.window, [(HALF, HALF, PAGE)], immediate(1, 0))
    assert near.events(1, ENDED) == [Written(first.id)]
    near.fill(0, b"\x01" * BUFFER)
    far.stop()
    runs = [(i * PAGE, i * PAGE, length) for i, length in enumerate((8, 200, PAGE, PAGE) * 64)]
    tickets = [
        near.write(pair.ours, pair.window, runs, immediate(1, 0)),
        near.write(pair.ours, pair.window, [(0, 0, HALF)] * 3, immediate(1, 0)),
    ]
    assert near.poll(0.3) == []
    serves(pair, *bystander)
    assert near.seen == []
    began = time.monotonic()
    near.fence(pair.ours)
    ended = near.events(2, ENDED)
    assert time.monotonic() - began < BOUND
    assert {event.ticket for event in ended if isinstance(event, Failed)} == {ticket.id for ticket in tickets}
    assert all(event.written == 0 and event.in_doubt >= 0 for event in ended if isinstance(event, Failed))
    near.fill(0, b"\xee" * BUFFER)
    far.resume()
    ours, _ = pair.another()
    serves(pair, far, ours)
    time.sleep(0.1)  # what the far process still had in its queues
    assert b"\xee" not in far.read(0, BUFFER)


def test_a_killed_target_ends_its_tickets_and_nobody_elses(process_pair: Pair, bystander: tuple[FarSide, int]) -> None:
    pair, near, far = process_pair, process_pair.near, process_pair.far
    far.expect(1, 0)
    runs = [(i % 512 * PAGE, i % 512 * PAGE, PAGE) for i in range(20000)]
    tickets = [near.write(pair.ours, pair.window, runs, immediate(1, 0)) for _ in range(2)]
    eventually(lambda: far.count(1, 0) > 0, "something has arrived")
    far.kill()
    serves(pair, *bystander)
    began = time.monotonic()
    near.fence(pair.ours)
    ended = [event for event in near.seen if isinstance(event, ENDED)]  # one may have been quicker than the kill
    ended += near.events(2 - len(ended), ENDED)
    assert time.monotonic() - began < BOUND
    assert sorted(event.ticket for event in ended if isinstance(event, ENDED)) == [ticket.id for ticket in tickets]
    for event in ended:
        assert isinstance(event, Written) or (isinstance(event, Failed) and event.written + event.in_doubt <= len(runs))
    serves(pair, *bystander)


def test_a_killed_sender_leaves_its_target_well(process_pair: Pair, bystander: tuple[FarSide, int]) -> None:
    pair, near, far = process_pair, process_pair.near, process_pair.far
    near.expect(1, 0)
    near.fill(0, bytes(BUFFER))
    far.fill(0, b"\x01" * BUFFER)
    runs = [(i % 512 * PAGE, i % 512 * PAGE, PAGE) for i in range(20000)]
    far.write(pair.theirs, near.window(), runs, immediate(1, 0))
    eventually(lambda: near.count(1, 0) > 0, "something has arrived")
    far.kill()
    began = time.monotonic()
    near.fence(pair.ours)
    assert time.monotonic() - began < BOUND
    before = near.count(1, 0)
    near.fill(0, bytes(HALF))
    serves(pair, *bystander)
    assert near.count(1, 0) == before < 20000
    assert near.read(0, 512 * PAGE) == bytes(512 * PAGE)
    with pytest.raises(TransportError, match="fenced"):
        near.write(pair.ours, pair.window, [(0, 0, 8)], immediate(1, 0))


def test_restarts_leave_nothing_behind(process_pair: Pair) -> None:
    pair, near = process_pair, process_pair.near
    near.fence(pair.ours)
    before = near.counters().extra
    for _ in range(20):
        ours, theirs = pair.another()
        near.write(ours, pair.window, [(0, 0, PAGE)] * 8, immediate(1, 0))
        near.events(1, Written)
        near.fence(ours)
        pair.far.fence(theirs)
    after = near.counters().extra
    assert (after["peers"], after["tickets"], after["outstanding"]) == (0, 0, 0)
    assert after["memories"] == before["memories"] == 1
