"""D's KV memory, and wires."""

from __future__ import annotations

from neuron_pushkv.simulate.memory import Memory
from neuron_pushkv.simulate.wires import Wire, occupy


class Watched:
    """A memory and what it last told."""

    def __init__(self, capacity: int | None) -> None:
        self.told = (0, 0)
        self.memory = Memory(capacity, self._hear)

    def _hear(self, held: int, parked: int) -> None:
        self.told = (held, parked)


def test_requests_take_and_give_back() -> None:
    watched = Watched(100)
    assert watched.memory.take(60, 1)
    assert not watched.memory.take(41, 2)
    assert watched.memory.take(40, 2)
    assert watched.told == (100, 0)
    watched.memory.release(60)
    assert watched.told == (40, 0)


def test_parked_kv_gives_way_oldest_first() -> None:
    watched = Watched(100)
    for conversation in (1, 2, 3):
        assert watched.memory.take(30, conversation)
        watched.memory.park(30, conversation)
    assert watched.told == (0, 90)
    assert watched.memory.take(50, 4)
    assert watched.told == (50, 30)
    assert watched.memory.evicted == 2
    assert not watched.memory.pin(1)
    assert watched.memory.pin(3)


def test_pinned_kv_stays_and_becomes_part_of_its_request() -> None:
    watched = Watched(100)
    assert watched.memory.take(60, 1)
    watched.memory.park(60, 1)
    assert watched.memory.pin(1)
    assert not watched.memory.take(41, 2)
    assert watched.memory.take(90, 1)
    assert watched.told == (90, 0)
    assert watched.memory.evicted == 0


def test_only_the_stay_that_is_meant_expires() -> None:
    watched = Watched(None)
    watched.memory.take(10, 1)
    first = watched.memory.park(10, 1)
    watched.memory.pin(1)
    watched.memory.expire(1, first)
    assert watched.told == (0, 10)
    watched.memory.take(20, 1)
    second = watched.memory.park(20, 1)
    watched.memory.expire(1, first)
    assert watched.told == (0, 20)
    watched.memory.expire(1, second)
    assert watched.told == (0, 0)


def test_a_transfer_waits_for_both_ends_and_for_its_turn() -> None:
    out, other, into = Wire(), Wire(), Wire()
    assert occupy((out, into), 1.0, 2.0) == 1.0
    assert occupy((out, into), 1.5, 1.0) == 3.0
    assert occupy((other, into), 2.0, 1.0) == 4.0
    assert occupy((out, Wire()), 10.0, 1.0) == 10.0
    assert (out.busy_seconds, other.busy_seconds, into.busy_seconds) == (4.0, 1.0, 4.0)
