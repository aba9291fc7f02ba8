"""Several rails, memory in parts, ways made ready, flushes: what is behind the contract over libfabric."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv.device.base import Memory
from neuron_pushkv.errors import RegistrationError, TransportError
from neuron_pushkv.fabric.opening import STRIPE
from neuron_pushkv.transport.base import Arrived, Failed, Written, immediate
from neuron_pushkv.transport.fabric import FabricTransport
from tests.transport.conftest import RAIL_KINDS, Pair, first_library, join
from tests.transport.side import BUFFER, PATIENCE, NearSide, eventually

PAGE = 4096
MIB = 1 << 20


class Side(NearSide):
    """One over tcp, whose two sides may be in one process."""

    transport: FabricTransport

    def __init__(self, **options: Any) -> None:
        super().__init__(FabricTransport("tcp", first_library(), **options))

    def extra(self, name: str) -> int:
        return self.counters().extra[name]


@pytest.fixture
def open_side() -> Iterator[Callable[..., Side]]:
    opened: list[Side] = []

    def make(**options: Any) -> Side:
        opened.append(Side(**options))
        return opened[-1]

    yield make
    for side in opened:
        side.close()


def meet(near: Side, far: Side) -> tuple[int, int]:
    """A connected pair of endpoints, ready on all the rails that both have."""
    rails = min(len(side.transport.rail_bytes()) for side in (near, far))
    deadline = time.monotonic() + PATIENCE
    while True:
        before = [side.extra("warm_ups") for side in (near, far)]
        ours, theirs = join(near, far)
        given_up = time.monotonic() + 3  # the core does after 2, which is possible where no process gets a CPU
        while time.monotonic() < given_up:
            if all(side.extra("warm_ups") >= old + rails for side, old in zip((near, far), before, strict=True)):
                return ours, theirs
            time.sleep(0.001)
        assert time.monotonic() < deadline, "no pair becomes ready"
        near.fence(ours)
        far.fence(theirs)


def deliver(near: Side, far: Side, peer: int, runs: list[tuple[int, int, int]], slot: int = 1) -> int:
    """Write, wait for both ends, compare every byte that should have changed; how many writes it took."""
    expected = bytearray(far.read(0, BUFFER))
    for local, remote, length in runs:
        expected[remote : remote + length] = near.read(local, length)
    far.expect(slot, 0)
    ticket = near.write(peer, far.window(), runs, immediate(slot, 0))
    far.goal(slot, 0, ticket.writes)
    assert near.events(1, (Written, Failed)) == [Written(ticket.id)]
    assert far.events(1, Arrived) == [Arrived(slot, 0, ticket.writes)]
    assert far.read(0, BUFFER) == expected
    return ticket.writes


def test_a_large_write_is_split_so_that_all_rails_share_it(open_side: Callable[..., Side]) -> None:
    near, far = open_side(rails=4), open_side(rails=4)
    ours, _ = meet(near, far)
    near.fill(0, random.Random(1).randbytes(BUFFER))
    assert deliver(near, far, ours, [(0, 0, BUFFER)]) == BUFFER // STRIPE
    sent = near.transport.rail_bytes()
    assert sum(sent) == BUFFER
    assert len(sent) == 4
    assert all(sent)
    # One byte more makes a stripe more.
    assert deliver(near, far, ours, [(0, 7, 2 * STRIPE + 1)], slot=2) == 3


@pytest.mark.parametrize("process_pair", RAIL_KINDS, indirect=True, ids=lambda kind: kind.name)
def test_small_writes_go_where_there_is_most_room(process_pair: Pair) -> None:
    """So as long as none is completed every rail gets the same."""
    pair, near, far = process_pair, process_pair.near, process_pair.far
    rails = dict(pair.kind.options)["rails"]
    eventually(lambda: near.counters().extra["warm_ups"] == rails, "every rail is ready")
    eventually(lambda: far.counters().extra["warm_ups"] == rails, "every rail is ready there")
    far.stop()
    near.write(pair.ours, pair.window, [(i * 64, i * 64, 64) for i in range(20 * rails)], immediate(1, 0))
    eventually(lambda: near.counters().extra["outstanding"] == 20 * rails, "all are posted")
    far.resume()
    near.events(1, Written)
    assert near.transport.rail_bytes() == [20 * 64] * rails


@pytest.mark.parametrize(("here", "there"), [(3, 2), (2, 3), (1, 3), (3, 1)])
def test_a_peer_with_another_number_of_rails_is_served_over_the_smaller_number(
    open_side: Callable[..., Side], here: int, there: int
) -> None:
    near, far = open_side(rails=here), open_side(rails=there)
    ours, theirs = meet(near, far)
    near.fill(0, random.Random(3).randbytes(BUFFER))
    runs = [(i * PAGE, i * PAGE, PAGE) for i in range(1024)]
    assert deliver(near, far, ours, [(4 * MIB, 4 * MIB, 4 * MIB)]) == (1 if 1 in {here, there} else 16)
    assert deliver(near, far, ours, runs, slot=2) == 1024
    assert deliver(far, near, theirs, runs) == 1024
    for side in (near, far):
        used = side.transport.rail_bytes()
        assert all(used[: min(here, there)])
        assert not any(used[min(here, there) :])


def test_memory_with_too_few_rails_is_not_attached(open_side: Callable[..., Side]) -> None:
    near, far, narrow = open_side(rails=2), open_side(rails=2), open_side(rails=1)
    ours, _ = meet(near, far)
    with pytest.raises(TransportError, match="not registered on all of its rails"):
        near.transport.attach(ours, narrow.window())


def test_a_fence_closes_all_rails(open_side: Callable[..., Side]) -> None:
    near, far = open_side(rails=3), open_side(rails=3)
    ours, theirs = meet(near, far)
    near.fill(0, b"\x01" * BUFFER)
    ticket = near.write(ours, far.window(), [(0, 0, BUFFER)] * 40, immediate(1, 0))
    eventually(lambda: far.counters().stale_arrivals > 3, "it is under way")
    far.fence(theirs)
    far.fill(0, bytes(BUFFER))
    near.fence(ours)
    (failed,) = near.events(1, (Written, Failed))
    assert isinstance(failed, Failed)
    assert failed.ticket == ticket.id
    assert 3 < failed.written + failed.in_doubt <= ticket.writes
    another, _ = meet(near, far)
    deliver(near, far, another, [(0, 0, PAGE)])
    assert far.read(PAGE, BUFFER - PAGE) == bytes(BUFFER - PAGE)
    eventually(lambda: near.extra("outstanding") == 0, "nothing is left under way")


@pytest.mark.parametrize("rails", [1, 2])
def test_writes_end_where_a_part_does_on_either_side(open_side: Callable[..., Side], rails: int) -> None:
    near = open_side(rails=rails, most_registered=MIB + 1)  # in parts of 1 MiB
    far = open_side(rails=rails, most_registered=3 * MIB)  # of 2 MiB
    ours, _ = meet(near, far)
    near.fill(0, random.Random(4).randbytes(BUFFER))
    assert deliver(near, far, ours, [(MIB - 8, 0, 8)]) == 1
    assert deliver(near, far, ours, [(MIB - 8, 0, 9)], slot=2) == 2
    assert deliver(near, far, ours, [(0, 2 * MIB - 8, 9)], slot=3) == 2
    assert deliver(near, far, ours, [(MIB - 5, 2 * MIB - 3, 10)], slot=4) == 3
    assert deliver(near, far, ours, [(BUFFER - 1, BUFFER - 1, 1)], slot=5) == 1
    if rails == 1:
        assert deliver(near, far, ours, [(0, 0, BUFFER)], slot=6) == 8
        # Parts end on our side every 1 MiB and there at 2 MiB - 100, 4 MiB - 100 and 6 MiB - 100 of ours.
        assert deliver(near, far, ours, [(0, 100, 7 * MIB)], slot=7) == 7 + 3
    chance = random.Random(5)
    for slot in range(8, 12):
        cuts = sorted(chance.sample(range(BUFFER // 2), 41))
        runs = [
            (start + BUFFER // 2, start + chance.randrange(100), end - start - 100)
            for start, end in itertools.pairwise(cuts)
            if end - start > 100
        ]
        deliver(near, far, ours, runs, slot=slot)


def test_memory_that_is_refused_in_every_size_is_refused(open_side: Callable[..., Side]) -> None:
    side = open_side(rails=2)
    narrow = FabricTransport("tcp", first_library(), rails=2, most_registered=PAGE)
    with pytest.raises(RegistrationError, match="can't be registered with provider"):
        narrow.register(Memory(side.start, BUFFER))  # would take 2,048 parts
    assert narrow.counters().extra["memories"] == 0
    good = narrow.register(Memory(side.start, 1024 * PAGE))
    narrow.deregister(good)
    assert narrow.counters().extra["memories"] == 0
    narrow.close()


def test_the_way_to_a_peer_is_made_ready_when_it_is_connected(process_pair: Pair) -> None:
    pair, near, far = process_pair, process_pair.near, process_pair.far
    if not isinstance(near.transport, FabricTransport):
        pytest.skip("connects when it is told to connect, and waits for it")
    rails = dict(pair.kind.options).get("rails", 1)
    for side in (near, far):
        eventually(lambda side=side: side.counters().extra["warm_ups"] == rails, "every rail is ready")
    # None of it shows: nothing counted, nothing stale, nothing under way.
    for side in (near, far):
        counters = side.counters()
        assert (counters.writes, counters.bytes, counters.arrivals, counters.stale_arrivals, counters.errors) == (
            0,
        ) * 5
        assert counters.extra["outstanding"] == counters.extra["unexpected"] == 0
    # The first write is then not put off by a connection that is still to be made.
    before = near.counters().extra["retries"]
    ticket = near.write(pair.ours, pair.window, [(0, 0, 64)] * rails, immediate(0, 0))
    assert near.events(1, Written) == [Written(ticket.id)]
    assert near.counters().extra["retries"] == before


def test_one_side_makes_the_way_ready_first(open_side: Callable[..., Side]) -> None:
    near, far = open_side(), open_side()
    ours, our_address = near.open_peer()
    theirs, their_address = far.open_peer()
    ends = [(near, ours, our_address), (far, theirs, their_address)]
    ends.sort(key=lambda end: end[0].transport._unwrap(end[2])[0].address)
    (leader, leading, leader_address), (follower, following, follower_address) = ends
    follower.connect(following, leader_address)
    meet(near, far)
    assert follower.extra("warm_ups") == 1  # that of the pair that has met, and not yet of the other
    leader.connect(leading, follower_address)
    eventually(lambda: leader.extra("warm_ups") == 2, "both pairs are ready")


def test_both_sides_may_connect_and_write_at_once(open_side: Callable[..., Side]) -> None:
    near, far = open_side(), open_side()
    near.expect(1, 0)
    far.expect(1, 0)
    for round_number in range(20):
        ours, our_address = near.open_peer()
        theirs, their_address = far.open_peer()
        start = threading.Barrier(2)

        def begin(side: Side, peer: int, address: bytes, window: bytes, start: threading.Barrier = start) -> None:
            start.wait()
            side.connect(peer, address)
            side.write(peer, window, [(0, 0, 64)], immediate(1, 0))

        other = threading.Thread(target=begin, args=(far, theirs, our_address, near.window()))
        other.start()
        begin(near, ours, their_address, far.window())
        other.join()
        near.events(1, Written)
        far.events(1, Written)
        eventually(lambda count=round_number + 1: near.count(1, 0) == far.count(1, 0) == count, "both have arrived")
        near.fence(ours)
        far.fence(theirs)
    assert near.seen == far.seen == []


@pytest.mark.parametrize("rails", [1, 3])
def test_an_arrival_is_told_after_a_read_on_every_rail_that_received(
    open_side: Callable[..., Side], rails: int
) -> None:
    near, far = open_side(rails=rails), open_side(rails=rails, flush=True)
    ours, _ = meet(near, far)
    near.fill(0, random.Random(6).randbytes(BUFFER))
    deliver(near, far, ours, [(i * PAGE, i * PAGE, PAGE) for i in range(512)])
    assert rails <= far.extra("flushes") <= 8 * rails
    before = far.extra("flushes")
    far.goal(1, 0, 512)  # again: nothing has arrived since, so there is nothing to read for
    assert far.events(1, Arrived) == [Arrived(1, 0, 512)]
    assert far.extra("flushes") == before
    deliver(near, far, ours, [(0, 0, 8)], slot=2)
    assert far.extra("flushes") == before + 1
    far.expect(3, 0)
    near.write(ours, far.window(), [(0, 0, 8)], immediate(3, 0))
    near.events(1, Written)
    eventually(lambda: far.count(3, 0) == 1, "counted")
    assert far.extra("flushes") == before + 1  # nobody has asked yet
    far.goal(3, 0, 1)
    assert far.events(1, Arrived) == [Arrived(3, 0, 1)]
    assert far.extra("flushes") == before + 2
    assert near.extra("flushes") == 0
    far.deregister()
    far.expect(4, 0)
    far.goal(4, 0, 0)
    assert far.events(1, Arrived) == [Arrived(4, 0, 0)]


def threads_on(core: int) -> list[str]:
    """Names of this process's threads that run on ``core`` only."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if os.sched_getaffinity(int(task.name)) == {core}:
            found.append((task / "comm").read_text().strip())
    return found


def test_the_progress_thread_runs_on_the_core_that_is_asked_for(open_side: Callable[..., Side]) -> None:
    core = max(os.sched_getaffinity(0))
    before = threads_on(core)
    near = open_side(core=core)
    assert sorted(threads_on(core)) == sorted([*before, "pushkv-fabric"])
    far = open_side()
    deliver(near, far, meet(near, far)[0], [(0, 0, PAGE)])
