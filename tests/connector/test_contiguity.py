"""The order of blocks, on vLLM's own pool: what is evicted, what stays as it was, and what lies side by side."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from neuron_pushkv.connector import contiguity
from neuron_pushkv.connector.contiguity import WINDOW_PART, Contiguity, Growing, Order, choose
from tests.connector.harness import Harness

TOKENS = 16


class Life:
    """A pool and the tables of its requests, which are known by their names."""

    def __init__(self, order: Order, blocks: int) -> None:
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=TOKENS)
        self.order = Contiguity(order)
        self.order.bind(self.pool)
        self.tables: dict[str, list[Any]] = {}

    def take(self, request: str, count: int, full: int) -> list[int] | None:
        """Allocate, and fill all but the last few: those get hashes and are evicted last."""
        if count > self.pool.get_num_free_blocks():
            return None
        new = self.pool.get_new_blocks(count)
        table = self.tables.setdefault(request, [])
        before = len(table)
        table += new
        hashes = [f"{request} {place}".encode().ljust(32) for place in range(len(table))]
        hashed: Any = SimpleNamespace(block_hashes=hashes, request_id=request)
        full = min(before + full, len(table))
        if before < full and all(block.block_hash for block in table[:before]):
            self.pool.cache_full_blocks(hashed, table, before, full, TOKENS, 0)
        return [block.block_id for block in new]

    def free(self, request: str) -> None:
        self.pool.free_blocks(reversed(self.tables.pop(request, [])))

    def touch(self, request: str, places: int) -> None:
        """Another request has the same beginning, if it is in the cache."""
        for place in range(places):
            found = self.pool.get_cached_block(f"{request} {place}".encode().ljust(32), [0])  # type: ignore[arg-type]
            if found is None:
                break
            self.pool.touch(found)
            self.tables.setdefault(f"{request} again", []).extend(found)

    def queue(self) -> list[Any]:
        return list(self.pool.free_block_queue.get_all_free_blocks())

    def check(self) -> None:
        """Every block is in the queue or in a table, the queue is whole, and what it counts is right."""
        queue = [block.block_id for block in self.queue()]
        held = Counter(block.block_id for table in self.tables.values() for block in table)
        assert len(queue) == len(set(queue)) == self.pool.get_num_free_blocks()
        assert sorted([*queue, *held]) == list(range(1, self.pool.num_gpu_blocks))
        backwards, block = [], self.pool.free_block_queue.fake_free_list_tail.prev_free_block
        while block is not self.pool.free_block_queue.fake_free_list_head:
            backwards.append(block.block_id)
            block = block.prev_free_block
        assert backwards == queue[::-1]
        assert all(block.ref_cnt == held[block.block_id] for block in self.pool.blocks[1:])


names = st.sampled_from(["a", "b", "c", "d", "e"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), names, st.integers(1, 14), st.integers(0, 14)),
        st.tuples(st.just("free"), names | names.map(lambda name: f"{name} again")),
        st.tuples(st.just("touch"), names, st.integers(1, 8)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(operations)
def test_sorted_evicts_what_vllm_evicts(steps: list[tuple[Any, ...]]) -> None:
    """By content, the queue is the same at every moment, and so are the cache and every table."""
    lives = Life("vllm", 40), Life("sorted", 40)
    for name, *arguments in steps:
        taken = [getattr(life, name)(*arguments) for life in lives]
        if taken[0] is not None:
            assert taken[1] == sorted(taken[1])
        assert (taken[0] is None) == (taken[1] is None)
        theirs, ours = ([block.block_hash for block in life.queue()] for life in lives)
        assert theirs == ours
        theirs, ours = ({key: [b.block_hash for b in t] for key, t in life.tables.items()} for life in lives)
        assert theirs == ours
        assert set(lives[0].pool.cached_block_hash_to_block._cache) == set(
            lives[1].pool.cached_block_hash_to_block._cache
        )
    lives[1].check()


@settings(deadline=None)
@given(
    operations, st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=3), st.none() | st.integers(1, 30)
)
def test_runs_leaves_the_pool_whole_and_the_newest_alone(
    steps: list[tuple[Any, ...]], growing: list[tuple[int, int]], new: int | None
) -> None:
    """Whatever it is told of prompts that grow."""
    life = Life("runs", 60)
    for name, *arguments in steps:
        life.order.grow([Growing(*one) for one in growing])
        if new is not None:
            life.order.begin(new)
        before = life.queue()
        taken = getattr(life, name)(*arguments)
        if taken is not None:
            window = before[: max(len(taken), 60 // WINDOW_PART)]
            assert set(taken) <= {block.block_id for block in window}
            assert [b for b in before if b.block_id not in taken] == life.queue(), "the others keep their turn"
        life.check()


def test_runs_takes_neighbours_where_vllm_does_not() -> None:
    for order, expected in (("vllm", [15, 8, 14, 7]), ("sorted", [7, 8, 14, 15]), ("runs", [12, 13, 14, 15])):
        life = Life("vllm", 17)
        tables = [life.take(name, count, 0) for name, count in (("a", 4), ("b", 4), ("c", 3), ("d", 5))]
        assert tables == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
        for table in (life.tables["b"], life.tables["d"][:4]):
            for block in table:
                block.ref_cnt = 0
        queue = life.pool.free_block_queue
        shuffled = [life.pool.blocks[number] for number in (15, 8, 14, 7, 12, 5, 13, 6)]
        assert queue.num_free_blocks == 0
        queue.append_n(shuffled)
        life.pool.num_gpu_blocks = 8 * WINDOW_PART  # So that all eight are old enough.
        Contiguity(order).bind(life.pool)  # type: ignore[arg-type]
        assert [block.block_id for block in life.pool.get_new_blocks(4)] == expected


def test_single_blocks_are_vllms_to_choose() -> None:
    lives = Life("vllm", 40), Life("runs", 40)
    for life in lives:
        life.take("a", 10, 10)
        life.free("a")
    for _ in range(30):
        first, second = ([block.block_id for block in life.pool.get_new_blocks(1)] for life in lives)
        assert first == second


@pytest.mark.parametrize(
    ("count", "last", "room", "expected"),
    [
        (2, None, 2, [5, 6]),  # Both runs of two and more are wide enough; the oldest of them is taken, at its end.
        (2, None, 3, [4, 5]),  # Room for a third behind them.
        (2, None, 4, [10, 11]),
        (5, None, 5, [10, 11, 12, 13, 6]),  # No run is long enough: the longest first, then one that is.
        (2, 10, 4, [11, 12]),  # Behind the last block.
        (4, 11, 4, [12, 13, 5, 6]),  # What does not fit there lies together elsewhere.
        (2, 20, 2, [5, 6]),  # The block behind the last one is not to be had.
        (8, 11, 8, [12, 13, 4, 5, 6, 10, 11, 1]),
    ],
)
def test_what_is_chosen(count: int, last: int | None, room: int, expected: list[int]) -> None:
    free = np.array([1, 4, 5, 6, 10, 11, 12, 13])
    ages = np.array([7, 0, 1, 2, 3, 4, 5, 6])
    assert choose(free, ages, count, last, room) == expected


@given(
    st.sets(st.integers(0, 60), min_size=1),
    st.randoms(use_true_random=False),
    st.integers(1, 30),
    st.none() | st.integers(0, 60),
    st.integers(0, 40),
)
def test_as_many_as_wanted_are_chosen_each_once(
    numbers: set[int], random: Any, count: int, last: int | None, more: int
) -> None:
    count = min(count, len(numbers))
    ages = list(range(len(numbers)))
    random.shuffle(ages)
    chosen = choose(np.array(sorted(numbers)), np.array(ages), count, last, count + more)
    assert len(chosen) == len(set(chosen)) == count
    assert set(chosen) <= numbers
    if last is not None and last + 1 in numbers:
        assert chosen[0] == last + 1


# What is not as it is known.


def _without(pool: Any, name: str) -> None:
    if name == "get_new_blocks":
        pool.get_new_blocks = lambda count, request: []
    elif name == "num_gpu_blocks":
        del pool.num_gpu_blocks
    elif name == "free_block_queue":
        del pool.free_block_queue
    elif name == "fake_free_list_head":
        del pool.free_block_queue.fake_free_list_head
    else:
        setattr(pool.free_block_queue, name, lambda: None)


@pytest.mark.parametrize("order", ["sorted", "runs"])
@pytest.mark.parametrize(
    "name", ["get_new_blocks", "num_gpu_blocks", "free_block_queue", "fake_free_list_head", "remove", "prepend_n"]
)
def test_a_pool_that_looks_different_is_left_alone(order: Order, name: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=TOKENS)
    _without(pool, name)
    before = vars(pool).get("get_new_blocks")
    Contiguity(order).bind(pool)
    if order == "sorted" and name != "get_new_blocks":
        assert not caplog.records
        return
    (record,) = caplog.records
    assert f"vLLM's block pool has no {'get_new_blocks' if name == 'get_new_blocks' else ''}" in record.getMessage()
    assert vars(pool).get("get_new_blocks") is before


def test_vllms_order_is_left_alone() -> None:
    pool = BlockPool(8, enable_caching=True, hash_block_size=TOKENS)
    Contiguity("vllm").bind(pool)
    assert "get_new_blocks" not in vars(pool)


def test_a_bug_of_ours_costs_the_runs_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    life = Life("runs", 40)
    monkeypatch.setattr(contiguity, "choose", fail)
    with caplog.at_level(logging.ERROR):
        assert life.take("a", 5, 5) == [1, 2, 3, 4, 5]
    assert life.take("b", 5, 5) == [6, 7, 8, 9, 10]
    assert len(caplog.records) == 1, "it is told once"
    life.check()


# In vLLM's own scheduler.


def fragment(engine: Harness) -> None:
    """Leave the free queue in such an order that no two neighbours follow each other, though they are of one age."""
    blocks = engine.pool.get_new_blocks(engine.free)
    blocks.sort(key=lambda block: ((block.block_id - 1) // 64 * 5 % 7, block.block_id * 25 % 64))
    assert all(abs(before.block_id - after.block_id) != 1 for before, after in pairwise(blocks))
    engine.pool.free_blocks(blocks)


def runs_of(table: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(table))


@pytest.mark.parametrize(("order", "most"), [("runs", 1), ("sorted", 32)])
def test_chunks_of_two_prompts_that_take_turns_stay_together(model: Path, order: str, most: int) -> None:
    """Each step computes a chunk of either; decode's whole table is allocated at once, for what will be pushed."""
    extra = {"provider": "tcp", "port": 14700, "block_order": order}
    engine = Harness(model, blocks=400, block_size=16, chunk=128, long_prefill=64, extra=extra)
    fragment(engine)
    prefill = {"do_remote_decode": True, "do_remote_prefill": False}
    names = ["p", "q"]
    for number, name in enumerate(names):
        engine.add(name, [number, *range(3, 502)], {**prefill, "transfer_id": name}, max_tokens=8)
    remote = {"remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": 5, "do_remote_prefill": True}
    engine.add("d", [9, *range(3, 302)], {**remote, "do_remote_decode": False, "transfer_id": "d"})
    tables: dict[str, list[int]] = {}
    for _ in range(9):
        engine.step()
        for name in [*names, "d"]:
            if name in engine.scheduler.requests:
                tables[name] = list(engine.scheduler.kv_cache_manager.get_block_ids(name)[0])
    assert [len(tables[name]) for name in names] == [32, 32]
    assert len(tables["d"]) == 19
    found = [runs_of(table) for table in tables.values()]
    assert max(found) <= most
    assert order == "runs" or max(found) > 4, "the free blocks were not in disorder"
