"""Immediates: counted per slot and epoch, stale ones apart, one event per goal."""

from __future__ import annotations

import pytest

from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Arrived, Written, immediate
from tests.transport.conftest import Pair
from tests.transport.side import eventually


def test_immediates_of_another_epoch_are_stale(pair: Pair) -> None:
    near, far = pair.near, pair.far
    run = [(0, 0, 100)]
    far.expect(77, 4095)
    far.goal(77, 4095, 1)
    near.write(pair.ours, pair.window, run, immediate(77, 4094))
    near.write(pair.ours, pair.window, run, immediate(78, 4095))
    near.events(2, Written)
    eventually(lambda: far.counters().stale_arrivals == 2, "both seen")
    assert far.count(77, 4095) == 0
    assert far.count(77, 4094) == 0
    assert far.poll(0) == []
    near.write(pair.ours, pair.window, run, immediate(77, 4095))
    assert far.events(1, Arrived) == [Arrived(77, 4095, 1)]
    assert far.counters().arrivals == 1


def test_expecting_again_counts_from_zero_and_forgetting_counts_nothing(pair: Pair) -> None:
    near, far = pair.near, pair.far
    last = (1 << 20) - 1
    far.expect(last, 0)
    near.write(pair.ours, pair.window, [(0, 0, 8)] * 3, immediate(last, 0))
    eventually(lambda: far.count(last, 0) == 3, "three counted")
    far.goal(last, 0, 4)
    far.expect(last, 1)
    assert far.count(last, 0) == far.count(last, 1) == 0
    near.write(pair.ours, pair.window, [(0, 0, 8)], immediate(last, 0))
    near.write(pair.ours, pair.window, [(0, 0, 8)], immediate(last, 1))
    eventually(lambda: far.count(last, 1) == 1, "one counted")
    eventually(lambda: far.counters().stale_arrivals == 1, "one stale")
    far.forget(last)
    far.forget(last)
    near.write(pair.ours, pair.window, [(0, 0, 8)], immediate(last, 1))
    eventually(lambda: far.counters().stale_arrivals == 2, "another stale")
    assert far.count(last, 1) == 0
    assert far.poll(0) == []


def test_a_goal_is_told_once_before_and_after_arrival(pair: Pair) -> None:
    near, far = pair.near, pair.far
    far.expect(6, 2)
    far.goal(6, 2, 0)
    assert far.events(1, Arrived) == [Arrived(6, 2, 0)]
    far.goal(6, 2, 5)
    near.write(pair.ours, pair.window, [(0, 0, 16)] * 4, immediate(6, 2))
    eventually(lambda: far.count(6, 2) == 4, "four counted")
    assert far.poll(0.05) == []
    near.write(pair.ours, pair.window, [(0, 0, 16)], immediate(6, 2))
    assert far.events(1, Arrived) == [Arrived(6, 2, 5)]
    near.write(pair.ours, pair.window, [(0, 0, 16)], immediate(6, 2))
    eventually(lambda: far.count(6, 2) == 6, "six counted")
    assert far.poll(0.05) == []
    far.goal(6, 2, 6)
    assert far.events(1, Arrived) == [Arrived(6, 2, 6)]


def test_a_goal_for_what_is_not_expected_is_refused(pair: Pair) -> None:
    with pytest.raises(TransportError, match="not expected at that slot"):
        pair.near.goal(9, 1, 1)
    pair.near.expect(9, 1)
    with pytest.raises(TransportError, match="not expected at that slot"):
        pair.near.goal(9, 2, 1)
    with pytest.raises(TransportError, match="out of range"):
        pair.near.expect(1 << 20, 0)
    with pytest.raises(TransportError, match="out of range"):
        pair.near.expect(0, 1 << 12)
