"""What a transport costs while nothing happens."""

from __future__ import annotations

import time

from neuron_pushkv.transport.base import Written, immediate
from tests.transport.conftest import Pair

SECONDS = 1.0
SHARE = 0.02
"""Of one core."""


def test_an_idle_transport_sleeps(process_pair: Pair) -> None:
    pair, near = process_pair, process_pair.near
    near.write(pair.ours, pair.window, [(0, 0, 64)], immediate(0, 0))
    assert len(near.events(1, Written)) == 1
    seconds = []
    while not seconds or (len(seconds) < 3 and min(seconds) >= SHARE * SECONDS):  # others may be in the caches' way
        before = time.process_time()
        assert near.poll(SECONDS) == []
        seconds.append(time.process_time() - before)
    assert min(seconds) < SHARE * SECONDS, seconds
    # And it is there at once when it is needed.
    near.write(pair.ours, pair.window, [(0, 0, 64)], immediate(0, 0))
    assert len(near.events(1, Written)) == 1
