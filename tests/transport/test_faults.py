"""Each fault does what it says, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Failed, Written, immediate
from neuron_pushkv.transport.fates import Delay, Depth, Drop, Duplicate, Fail, Fault, Reorder, Stall
from neuron_pushkv.transport.faults import FaultyTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from tests.transport.conftest import join
from tests.transport.side import NearSide, Window, eventually

ENDED = (Written, Failed)
RUNS = [(i * 64, i * 64, 64) for i in range(32)]


@dataclass
class Faulty:
    near: NearSide
    far: NearSide
    peer: int
    window: Window

    def write(self, runs: list[tuple[int, int, int]] = RUNS) -> int:
        return self.near.write(self.peer, self.window, runs, immediate(0, 0)).id


@pytest.fixture
def faulty() -> Iterator[Callable[..., Faulty]]:
    opened: list[NearSide] = []

    def make(*faults: Fault, **others: Any) -> Faulty:
        network = LoopbackNetwork()
        near = NearSide(FaultyTransport(network.transport(), *faults, **others), 1 << 16)
        far = NearSide(network.transport(), 1 << 16)
        opened.extend((near, far))
        near.fill(0, bytes(range(256)) * 8)
        far.expect(0, 0)
        ours, _ = join(near, far)
        return Faulty(near, far, ours, far.window())

    yield make
    for side in opened:
        side.close()


def test_without_faults_nothing_is_different(faulty: Callable[..., Faulty]) -> None:
    pair = faulty()
    ticket = pair.write()
    assert pair.near.events(1, ENDED) == [Written(ticket)]
    assert pair.far.count(0, 0) == 32
    assert pair.far.read(0, 2048) == pair.near.read(0, 2048)


def test_delayed_writes_are_late_but_arrive(faulty: Callable[..., Faulty]) -> None:
    pair = faulty(Delay(0.1, 0.2))
    ticket = pair.write()
    began = time.monotonic()
    assert pair.near.events(1, ENDED) == [Written(ticket)]
    assert time.monotonic() - began > 0.1
    assert pair.far.count(0, 0) == 32


def test_a_dropped_write_ends_with_the_fence_only(faulty: Callable[..., Faulty]) -> None:
    pair = faulty(Drop(40))
    first, second = pair.write(), pair.write()
    assert pair.near.events(1, ENDED) == [Written(first)]
    eventually(lambda: pair.far.count(0, 0) == 63, "all but one arrive")
    pair.near.transport.cancel(second)
    assert pair.near.poll(0.05) == []
    pair.near.fence(pair.peer)
    assert pair.near.events(1, ENDED) == [Failed(second, 31, 1, "cancelled")]


def test_the_nth_write_fails_and_the_next_ticket_does_not(faulty: Callable[..., Faulty]) -> None:
    for nth in (0, 5, 31):
        pair = faulty(Fail(nth))
        first, second = pair.write(), pair.write()
        ended = pair.near.events(2, ENDED)
        failed = Failed(first, nth, 0, f"write {nth} was made to fail")
        assert sorted(ended, key=lambda event: getattr(event, "ticket", 0)) == [failed, Written(second)]
        assert pair.far.count(0, 0) == 32 + nth


def test_whole_batches_fail_or_are_late(faulty: Callable[..., Faulty]) -> None:
    pair = faulty(delay=0.1, fail_batches={1})
    first, second, third = pair.write(), pair.write(), pair.write()
    began = time.monotonic()
    ended = pair.near.events(3, ENDED)
    assert Failed(second, 0, 0, "batch 1 was made to fail") in ended
    assert Written(first) in ended
    assert Written(third) in ended
    assert time.monotonic() - began > 0.09
    assert pair.far.count(0, 0) == 64


def test_duplicated_writes_are_counted_twice(faulty: Callable[..., Faulty]) -> None:
    pair = faulty(Duplicate())
    ticket = pair.write()
    assert pair.near.events(1, ENDED) == [Written(ticket)]
    assert pair.far.count(0, 0) == 64


def test_writes_are_reordered_the_same_way_for_the_same_seed(faulty: Callable[..., Faulty]) -> None:
    # All writes go to the same place, so what stays there is what was written last.
    runs = [(i, 0, 1) for i in range(200)]

    def last(seed: int, *faults: Fault) -> bytes:
        pair = faulty(*faults, seed=seed)
        pair.write(runs)
        pair.near.events(1, Written)
        return pair.far.read(0, 1)

    assert last(1) == bytes([199])
    assert last(1, Reorder()) == last(1, Reorder())
    assert {last(seed, Reorder()) for seed in range(5)} != {bytes([199])}


def test_no_more_are_under_way_than_the_depth_allows(faulty: Callable[..., Faulty]) -> None:
    pair = faulty(Depth(3))
    # Nobody has named us on the other side yet, so nothing can end.
    ours, address = pair.near.open_peer()
    theirs, their_address = pair.far.open_peer()
    pair.near.connect(ours, their_address)
    ticket = pair.near.write(ours, pair.window, RUNS, immediate(0, 0))
    assert isinstance(pair.near.transport, FaultyTransport)
    transport = pair.near.transport
    eventually(lambda: len(transport._by_inner) == 3, "three are posted")
    assert pair.near.poll(0.05) == []
    assert len(transport._by_inner) == 3
    pair.far.connect(theirs, address)
    assert pair.near.events(1, ENDED) == [Written(ticket.id)]


def test_nothing_is_posted_during_a_stall(faulty: Callable[..., Faulty]) -> None:
    stall = Stall()
    pair = faulty(stall)
    stall.begin()
    ticket = pair.write()
    assert pair.near.poll(0.05) == []
    assert pair.far.count(0, 0) == 0
    with pytest.raises(TransportError, match="under way"):
        pair.near.deregister()
    stall.end()
    assert pair.near.events(1, ENDED) == [Written(ticket)]


def test_faults_add_up(faulty: Callable[..., Faulty]) -> None:
    pair = faulty(Delay(0, 0.02, share=0.5), Reorder(), Duplicate(0.5), Depth(8), Fail(33), seed=3)
    first, second = pair.write(), pair.write()
    ended = pair.near.events(2, ENDED)
    assert {event.ticket for event in ended if isinstance(event, Written)} == {first}
    assert {event.ticket for event in ended if isinstance(event, Failed)} == {second}
    assert 32 < pair.far.count(0, 0) < 128
