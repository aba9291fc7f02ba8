"""The block allocator against a model that keeps a set of owners for every single block."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from neuron_pushkv.blocks import BlockPool, Extent
from neuron_pushkv.device.base import SLAB_ALIGNMENT, Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import BlockError
from neuron_pushkv.slabs import SlabPool

OWNERS = ("a", "b", ("c", 3))
owners = st.sampled_from(OWNERS)


def numbers(extents: list[Extent]) -> list[int]:
    return [block for extent in extents for block in range(extent.first, extent.end)]


def runs(blocks: set[int], parts: list[int]) -> list[Extent]:
    """The longest extents that ``blocks`` make, none of which reaches over the beginning of a part."""
    found: list[Extent] = []
    for block in sorted(blocks):
        if found and found[-1].end == block and block not in parts:
            found[-1] = Extent(found[-1].first, found[-1].length + 1)
        else:
            found.append(Extent(block, 1))
    return found


class Naive(RuleBasedStateMachine):
    """Does to a pool and to sets of blocks the same."""

    @initialize(count=st.integers(0, 30))
    def begin(self, count: int) -> None:
        self.pool = BlockPool(count)
        self.parts = [0]
        self.now = 0.0
        self.owners: list[set[object]] = [set() for _ in range(count)]
        self.quarantines: list[Counter[tuple[object, int]]] = [Counter() for _ in range(count)]
        """How often a block is in each quarantine: (who began it, its number)."""
        self.ends: dict[tuple[object, int], float] = {}

    @property
    def free(self) -> set[int]:
        return {
            block
            for block, (held, waits) in enumerate(zip(self.owners, self.quarantines, strict=True))
            if not held and not waits
        }

    def of(self, owner: object) -> set[int]:
        return {block for block, held in enumerate(self.owners) if owner in held}

    @precondition(lambda self: len(self.owners) < 60)
    @rule(count=st.integers(1, 20))
    def grow(self, count: int) -> None:
        assert self.pool.grow(count) == Extent(len(self.owners), count)
        self.parts.append(len(self.owners))
        self.owners += [set() for _ in range(count)]
        self.quarantines += [Counter() for _ in range(count)]

    @rule(count=st.integers(1, 25), owner=owners, whole=st.booleans())
    def take(self, count: int, owner: object, whole: bool) -> None:
        lengths = sorted(extent.length for extent in runs(self.free, self.parts))
        longest = lengths[-1] if lengths else 0
        taken = self.pool.take(count, owner, whole=whole)
        if count > (longest if whole else sum(lengths)):
            assert taken is None
            return
        assert taken is not None
        blocks = numbers(taken)
        assert len(set(blocks)) == len(blocks) == count
        assert set(blocks) <= self.free
        assert all(extent.end <= part or part <= extent.first for extent in taken for part in self.parts)
        if count <= longest:
            (extent,) = taken
            best = min(length for length in lengths if length >= count)
            candidates = [run for run in runs(self.free, self.parts) if run.length == best]
            assert extent.first == min(run.first for run in candidates)
        else:
            # The fewest extents: fewer of the longest runs would not hold as many.
            assert sum(lengths[len(lengths) - len(taken) + 1 :]) < count
        for block in blocks:
            self.owners[block].add(owner)

    @rule(data=st.data(), owner=owners)
    def share(self, data: st.DataObject, owner: object) -> None:
        extents = data.draw(self.some({block for block, held in enumerate(self.owners) if held - {owner}}))
        blocks = numbers(extents)
        if any(owner in self.owners[block] for block in blocks):
            with pytest.raises(BlockError, match="already"):
                self.pool.share(extents, owner)
            return
        self.pool.share(extents, owner)
        for block in blocks:
            self.owners[block].add(owner)

    @rule(data=st.data(), owner=owners, until=st.none() | st.integers(0, 6) | st.just(math.inf), some=st.booleans())
    def release(self, data: st.DataObject, owner: object, until: float | None, some: bool) -> None:
        extents = data.draw(self.some(self.of(owner))) if some else None
        until = None if until is None else self.now + until
        self.pool.release(owner, extents, until=until)
        blocks = numbers(extents) if extents is not None else self.of(owner)
        quarantine = (owner, len(self.ends))
        if until is not None:
            self.ends[quarantine] = until
        for block in blocks:
            self.owners[block].remove(owner)
            if until is not None:
                self.quarantines[block][quarantine] += 1

    @rule(seconds=st.integers(0, 4))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.pool.expire(self.now)
        self.end({quarantine for quarantine, until in self.ends.items() if until <= self.now})

    @rule(owner=owners)
    def lift(self, owner: object) -> None:
        self.pool.lift(owner)
        self.end({quarantine for quarantine in self.ends if quarantine[0] == owner})

    def end(self, quarantines: set[tuple[object, int]]) -> None:
        for waits in self.quarantines:
            for quarantine in quarantines:
                del waits[quarantine]

    @rule(data=st.data(), owner=owners, first=st.integers(-3, 70), length=st.integers(-1, 12))
    def do_wrong(self, data: st.DataObject, owner: object, first: int, length: int) -> None:
        """What isn't the owner's to do is refused and changes nothing (which the invariant sees)."""
        extent = Extent(first, length)
        blocks = range(first, first + length)
        inside = length > 0 and 0 <= first <= first + length <= len(self.owners)
        right = [Extent(block, 1) for block in sorted(self.of(owner) - set(blocks))[:1]]
        if not inside or any(owner not in self.owners[block] for block in blocks):
            with pytest.raises(BlockError):
                self.pool.release(owner, [*right, extent])
        if not inside or any(not self.owners[block] for block in blocks):
            with pytest.raises(BlockError):
                self.pool.share([extent], "nobody")

    @staticmethod
    def some(blocks: set[int]) -> st.SearchStrategy[list[Extent]]:
        """Extents that hold some of ``blocks``, cut anywhere and in any order."""
        if not blocks:
            return st.just([])

        def cut(chosen: list[tuple[int, int]]) -> list[Extent]:
            found = []
            # Neighbours of one colour are one extent.
            for _, group in groupby(enumerate(sorted(chosen)), key=lambda item: (item[1][0] - item[0], item[1][1])):
                run = [block for _, (block, _) in group]
                found.append(Extent(run[0], len(run)))
            return found[::-1]

        one = st.tuples(st.sampled_from(sorted(blocks)), st.integers(0, 1))
        return st.lists(one, unique_by=lambda item: item[0], max_size=8).map(cut)

    @invariant()
    def agree(self) -> None:
        pool, free = self.pool, self.free
        held = sum(bool(owners) for owners in self.owners)
        assert (pool.total, pool.free, pool.held) == (len(self.owners), len(free), held)
        assert pool.free + pool.held + pool.quarantined == pool.total
        lengths = [extent.length for extent in runs(free, self.parts)]
        assert pool.largest == max(lengths, default=0)
        assert pool.fragmentation == (1 - max(lengths) / len(free) if free else 0)
        for owner in OWNERS:
            assert pool.owned(owner) == runs(self.of(owner), self.parts)
        assert sorted((extent.length, extent.first) for extent in runs(free, self.parts)) == list(pool._by_length)


TestAgainstTheModel = Naive.TestCase
TestAgainstTheModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_contiguous_first_then_the_fewest_extents() -> None:
    pool = BlockPool(20)
    taken = [pool.take(count, name) for count, name in ((4, "a"), (2, "b"), (6, "c"), (3, "d"), (5, "e"))]
    assert taken == [[Extent(0, 4)], [Extent(4, 2)], [Extent(6, 6)], [Extent(12, 3)], [Extent(15, 5)]]
    for name in "ace":
        pool.release(name)
    assert (pool.free, pool.largest, pool.fragmentation) == (15, 6, 1 - 6 / 15)
    assert pool.take(4, "fits exactly") == [Extent(0, 4)]
    assert pool.take(7, "whole", whole=True) is None
    assert pool.take(7, "in two") == [Extent(6, 6), Extent(15, 1)]
    assert pool.take(5, "too much") is None
    assert pool.take(4, "rest") == [Extent(16, 4)]
    assert (pool.free, pool.largest, pool.fragmentation, pool.held) == (0, 0, 0, 20)


def test_a_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(8)
    assert pool.take(6, "request") == [Extent(0, 6)]
    pool.share([Extent(2, 2)], "push")
    pool.release("request")
    assert (pool.held, pool.free, pool.owned("push")) == (2, 6, [Extent(2, 2)])
    pool.release("push", [Extent(3, 1)])
    pool.release("push")
    assert (pool.held, pool.free, pool.largest) == (0, 8, 8)


def test_a_quarantine_outlasts_other_owners_and_each_counts() -> None:
    pool = BlockPool(4)
    pool.take(4, "a")
    pool.share([Extent(0, 4)], "b")
    pool.release("a", until=10.0)
    pool.release("b", until=5.0)
    assert (pool.free, pool.held, pool.quarantined) == (0, 0, 4)
    pool.expire(9.9)
    assert pool.take(1, "c") is None
    pool.expire(10.0)
    assert (pool.free, pool.quarantined) == (4, 0)


def test_a_quarantine_without_end_is_lifted() -> None:
    pool = BlockPool(4)
    pool.take(4, "a")
    pool.release("a", [Extent(1, 2)], until=math.inf)
    pool.release("a", until=3.0)
    pool.expire(1e9)
    assert (pool.free, pool.quarantined, pool.largest) == (2, 2, 1)
    pool.lift("a")
    assert (pool.free, pool.quarantined, pool.largest) == (4, 0, 4)
    pool.lift("a")


def test_sentences_say_what_is_wrong() -> None:
    pool = BlockPool(8)
    pool.take(4, "a")
    with pytest.raises(BlockError, match="'b' does not hold all of blocks 0 to 3; each owner releases what it holds"):
        pool.release("b", [Extent(0, 4)])
    pool.release("a")
    with pytest.raises(BlockError, match="'a' does not hold all of blocks 0 to 3"):
        pool.release("a", [Extent(0, 4)])
    with pytest.raises(BlockError, match="blocks 6 to 9 is not of this pool's 8 blocks"):
        pool.share([Extent(6, 4)], "a")
    with pytest.raises(BlockError, match="blocks 0 to 3 and blocks 3 to 4 overlap; name each block once"):
        pool.share([Extent(3, 2), Extent(0, 4)], "a")
    with pytest.raises(BlockError, match="name one at least"):
        pool.take(0, "a")


class Source:
    """Counts what it gives. ``slab_bytes`` as an accelerator's."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.given: list[Memory] = []
        self.returned: list[Memory] = []

    def allocate(self, length: int) -> Memory:
        memory = Memory((1 << 40) + len(self.given) * (1 << 32), length)
        self.given.append(memory)
        return memory

    def free(self, memory: Memory) -> None:
        self.returned.append(memory)


MIB = 1 << 20


@given(
    st.integers(1, 5 * MIB),
    st.integers(0, 64 * MIB),
    st.sampled_from([SLAB_ALIGNMENT, 16 * MIB]),
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=12),
)
def test_slabs_hold_all_blocks_apart_and_stay_under_the_limit(
    block_bytes: int, more: int, slab_bytes: int, steps: list[tuple[int, bool]]
) -> None:
    source, limit = Source(slab_bytes), block_bytes + more
    pool = SlabPool(source, block_bytes=block_bytes, limit_bytes=limit)
    assert source.given == [], "no memory before it is needed"
    places: list[tuple[int, int]] = []
    for owner, (count, whole) in enumerate(steps):
        room = pool.limit - pool.blocks.total
        longest, free = pool.blocks.largest, pool.blocks.free
        taken = pool.take(count, owner, whole=whole)
        assert (taken is None) == (count > (max(longest, room) if whole else free + room))
        for extent in taken or ():
            places.append((pool.address(extent), pool.address(extent) + extent.length * block_bytes))
            slab = pool.slab(extent).memory
            assert slab.address <= places[-1][0] < places[-1][1] <= slab.address + slab.length
    places.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert pool.blocks.total * block_bytes <= limit
    assert all(memory.length % SLAB_ALIGNMENT == 0 for memory in source.given)
    for memory in source.given[:-1]:
        assert memory.length >= slab_bytes
    pool.close()
    pool.close()
    assert sorted(map(str, source.returned)) == sorted(map(str, source.given))


def test_slabs_are_as_large_as_the_source_likes_them() -> None:
    source = Source(16 * MIB)
    pool = SlabPool(source, block_bytes=MIB, limit_bytes=64 * MIB)
    assert pool.take(1, "a") == [Extent(0, 1)]
    assert pool.take(16, "b") == [Extent(16, 16)]
    assert pool.take(20, "c", whole=True) == [Extent(32, 20)]
    assert [memory.length // MIB for memory in source.given] == [16, 16, 20]
    assert pool.take(28, "d") is None, "15 are free and the limit leaves 12"
    assert pool.take(27, "d") == [Extent(1, 15), Extent(52, 12)]
    assert [memory.length // MIB for memory in source.given] == [16, 16, 20, 12]


def test_blocks_of_real_slabs_hold_bytes() -> None:
    accelerator = HostAccelerator()
    pool = SlabPool(accelerator, block_bytes=3000, limit_bytes=SLAB_ALIGNMENT)
    assert pool.take(pool.limit, "a") == [Extent(0, SLAB_ALIGNMENT // 3000)]
    assert pool.address(Extent(2, 1)) - pool.address(Extent(0, 1)) == 6000
    assert pool.address(Extent(0, 1)) % SLAB_ALIGNMENT == 0
    pool.close()
    with pytest.raises(BlockError, match="raise the limit"):
        SlabPool(accelerator, block_bytes=2, limit_bytes=1)
