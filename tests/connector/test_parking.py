"""What finished requests keep is capped: the oldest are let go, once each, and what is kept is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv.connector.parking import Parking
from tests.connector.harness import PREFILL, DirectoryDouble, Harness

PAGE = 2 * 2 * 32 * 32 * 4
BLOCK = 2 * PAGE
"""Bytes of a block of the harness's two layers."""


def prompt(number: int) -> list[int]:
    """Seven blocks that no other number's prompt has."""
    return [number, *range(199)]


def parked(harness: Harness) -> list[dict[str, int]]:
    """What was measured, each time that it had changed."""
    return [output.kv_connector_metadata.gauges for output in harness.outputs if output.kv_connector_metadata.gauges]


def capped(model: Path, most: int | None, blocks: int = 128) -> Harness:
    extra = {"provider": "tcp", "port": 14700, **({} if most is None else {"max_parked_bytes": most})}
    return Harness(model, blocks=blocks, extra=extra)


def finish(harness: Harness, *numbers: int) -> None:
    for number in numbers:
        harness.add(f"p{number}", prompt(number), PREFILL)
        harness.steps()


def test_the_oldest_are_evicted_once_and_kept_until_all_ranks_let_go(model: Path) -> None:
    harness = capped(model, 20 * BLOCK)
    whole = harness.free
    finish(harness, 1, 2)
    harness.add("plain", [5], None)
    harness.steps()
    assert not harness.engine.all("evicted")
    finish(harness, 3)
    finish(harness, 4)
    harness.add("other", [6], None)
    harness.steps()
    assert harness.engine.all("evicted") == ["p1", "p2"]
    assert harness.free == whole - 28
    harness.directory.free("p1", "p2")
    harness.add("last", [7], None)
    harness.steps()
    assert harness.free == whole - 14
    assert harness.engine.all("evicted") == ["p1", "p2"]
    assert {"evicted": 1} in [orders.counters for orders in harness.engine.steps]


def test_by_default_half_the_cache_may_be_kept(model: Path) -> None:
    harness = capped(model, None, blocks=30)
    finish(harness, 1, 2)
    harness.add("plain", [5], None)
    harness.steps()
    assert not harness.engine.all("evicted")
    finish(harness, 3)
    assert harness.engine.all("evicted") == ["p1"]


def test_nothing_may_be_kept_at_all(model: Path) -> None:
    harness = capped(model, BLOCK - 1)
    finish(harness, 1)
    harness.add("plain", [5], None)
    harness.steps()
    assert harness.engine.all("evicted") == ["p1"]


def test_what_is_kept_is_told_when_it_changes(model: Path) -> None:
    harness = capped(model, None)
    finish(harness, 1, 2)
    harness.add("same", prompt(2), PREFILL)  # six of its blocks are those of p2
    harness.steps()
    harness.add("plain", [5], None)
    harness.steps()
    harness.directory.free("p1", "p2", "same")
    harness.add("last", [5], None)
    harness.steps()
    assert parked(harness) == [
        {"parked_bytes": 0, "parked_requests": 0},
        {"parked_bytes": 7 * BLOCK, "parked_requests": 1},
        {"parked_bytes": 14 * BLOCK, "parked_requests": 2},
        {"parked_bytes": 15 * BLOCK, "parked_requests": 3},
        {"parked_bytes": 0, "parked_requests": 0},
    ]
    told = [stats.data["gauges"] for stats in harness.reported if stats and "gauges" in stats.data]
    assert told == [{name: {"engine": value} for name, value in gauges.items()} for gauges in parked(harness)]


class Pool:
    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def touch(self, blocks: Iterable[Any]) -> None:
        self.held.update(block.block_id for block in blocks)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        self.held.subtract(block.block_id for block in blocks)


@given(
    st.integers(0, 12),
    st.lists(st.one_of(st.sets(st.integers(1, 9), min_size=1), st.integers(0, 5)), max_size=20),
)
def test_what_stays_is_within_the_cap_and_every_reference_is_dropped(limit: int, events: list[set[int] | int]) -> None:
    """Requests keep the blocks of a set, or the nth that is kept is freed."""
    directory, pool = DirectoryDouble(), Pool()
    parking = Parking(directory, limit=limit, block_bytes=10)
    kept: dict[str, set[int]] = {}
    evicted: list[str] = []
    for number, event in enumerate(events):
        if isinstance(event, int):
            gone = list(kept)[event : event + 1]
            directory.free(*gone)
            for request in gone:
                del kept[request]
        else:
            blocks = [SimpleNamespace(block_id=block) for block in event]
            pool.touch(blocks[:1])
            parking.keep(str(number), blocks[:1], pool, blocks[1:])
            kept[str(number)] = event
        parking.free(pool)
        evicted += parking.evict()
        staying = [blocks for request, blocks in kept.items() if request not in evicted]
        assert len(set().union(*staying)) <= limit
        assert parking.bytes == 10 * len(set().union(*kept.values()))
        assert len(parking) == len(kept)
        assert +pool.held == sum((Counter(blocks) for blocks in kept.values()), Counter())
    assert len(set(evicted)) == len(evicted)
    oldest_first = sorted(evicted, key=int)
    assert evicted == oldest_first


def test_a_refused_hold_keeps_nothing() -> None:
    pool = Pool()
    parking = Parking(DirectoryDouble(), limit=9, block_bytes=10)

    def broken(blocks: Iterable[Any]) -> None:
        raise RuntimeError

    pool.touch = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        parking.keep("p", [], pool, [SimpleNamespace(block_id=1)])
    assert "p" not in parking
    assert parking.bytes == 0
