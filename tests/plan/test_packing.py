"""Packed plans, carried out on real memory with little room, against a reference that copies row by row."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_pushkv.device.base import Memory, MemoryKind
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Group
from neuron_pushkv.plan.packing import Packed, PackedPlan, choose
from neuron_pushkv.plan.pair import Move, PairPlan
from neuron_pushkv.plan.shares import shares
from neuron_pushkv.plan.staging import Staging
from neuron_pushkv.transport.base import Registration
from neuron_pushkv.wire import RemoteRegion
from tests.layouts import Cache, Kv, cache, grouped

from .moving import Receiver, copy_slowly, registered, staging
from .pairs import Case, cases

PLENTY = 1 << 20


def needed(plan: PairPlan) -> int:
    """Bytes of the largest of the receiver's blocks."""
    sizes = [group.block_size for group in plan.theirs.groups]
    return max(size // unit * of for size, unit, of in zip(sizes, plan.units, plan.facts.bytes, strict=True))


def packed_plan(source: Cache, target: Cache, heads: tuple[int, int], room: int = PLENTY) -> tuple[PackedPlan, Staging]:
    """Everything in one memory on either side."""
    memory = staging(room)
    plan = PairPlan(source.layout, target.layout, heads, registered(source), Receiver(target).remote)
    return PackedPlan(plan, memory), memory


def moved(source: Cache, target: Cache, heads: tuple[int, int], moves: list[Move], room: int = PLENTY) -> list[Packed]:
    """Carry out a packed plan between two filled caches, and see that it has done what it should and nothing else."""
    source.fill(1)
    target.fill(2)
    plan, memory = packed_plan(source, target, heads, room)
    before, receiver, rest = bytes(target.bytes), Receiver(target), moves
    done = []
    while rest:
        done.append(plan.batch(rest))
        rest = done[-1].rest
        _end(receiver, memory, done[-1])
    after = bytes(target.bytes)
    target.bytes[:] = before
    copy_slowly(source, target, heads, plan.units, moves)
    assert after == bytes(target.bytes)
    return done


def lengths(packed: Packed) -> list[int]:
    """Of all writes, sorted."""
    return sorted(length for product in packed.products for length in product.runs[:, 2].tolist() * len(product.spans))


@given(cases(), st.integers(0, 2), st.integers(0, 400), st.integers(1, 4))
@settings(deadline=None, max_examples=200)
def test_every_byte_lands_where_a_slow_copy_puts_it(case: Case, calls: int, more: int, under_way: int) -> None:
    """As of plans that write from the cache itself; packed writes stay under way while others are packed."""
    target = case.receiver
    target.fill(1000)
    before = bytes(target.bytes)
    receiver, everything = Receiver(target, case.apart[1]), []
    for stage, senders in enumerate(case.senders):
        for rank, heads in shares(target.layout, case.tp, len(senders)).items():
            source = senders[rank]
            source.fill(100 * stage + rank)
            registrations = registered(source, apart=case.apart[0])
            direct = PairPlan(source.layout, target.layout, heads, registrations, receiver.remote)
            memory = staging(needed(direct) + 64 + more)
            plan = PackedPlan(direct, memory)
            everything.append((source, heads, plan.units))
            layers: list[str | None] = [None]
            if calls == 2:
                layers = sorted({region.layer for region in target.layout.regions})
            waiting: deque[Packed] = deque()
            for layer in layers:
                for moves in [case.moves] if calls == 0 else [[move] for move in case.moves]:
                    rest = moves
                    while rest:
                        packed = plan.batch(rest, layer)
                        rest = packed.rest
                        if packed.extent is not None:
                            waiting.append(packed)
                        if waiting and (packed.extent is None or len(waiting) >= under_way):
                            _end(receiver, memory, waiting.popleft())
            while waiting:
                _end(receiver, memory, waiting.popleft())
            assert memory.largest == memory.size
    after = bytes(target.bytes)
    target.bytes[:] = before
    for source, heads, units in everything:
        copy_slowly(source, target, heads, units, case.moves)
    assert after == bytes(target.bytes)


def _end(receiver: Receiver, memory: Staging, packed: Packed) -> None:
    receiver.receive(packed.products)
    assert packed.extent is not None
    memory.free(packed.extent)


# What comes together.


def test_rows_become_what_the_receiver_keeps_together() -> None:
    """Heads first into tokens first: 64 bytes at a time straight from the cache, a region's block when packed."""
    source, target = cache(order="LBHNC", dim_bytes=64), cache(order="LBNHC", dim_bytes=64)
    plan, _ = packed_plan(source, target, (0, 2))
    assert PairPlan(source.layout, target.layout, (0, 2), registered(source), Receiver(target).remote).facts.writes == (
        2 * 2 * 2 * 16,
    )
    assert (plan.facts.writes, plan.facts.bytes, plan.facts.smallest_write) == ((4,), (4 * 2048,), 2048)
    (packed,) = moved(source, target, (0, 2), [Move(0, [3, 1, 5], [4, 0, 3], 0, 0, 40)])
    assert lengths(packed) == sorted([2048, 4096] * 4)


@pytest.mark.parametrize(
    ("order", "kv", "rows"), [("BLNHC", "together", [10]), ("BLHNC", "apart", [4, 6]), ("LBNHC", "rows", [5, 5])]
)
def test_layers_and_parts_that_the_receiver_keeps_together_are_one_write(order: str, kv: Kv, rows: list[int]) -> None:
    source, target = cache(order="LBHNC", value_bytes=6), cache(order=order, kv=kv, value_bytes=6)
    (packed,) = moved(source, target, (0, 2), [Move(0, [3, 1], [6, 2], 0, 0, 32)])
    assert lengths(packed) == sorted([2 * 2 * 16 * row for row in rows] * 2)


def test_blocks_of_the_receiver_that_move_whole_come_in_larger_writes() -> None:
    """16 to 64, heads first: of a whole block all heads lie together, of part of one each head's tokens."""
    source, target = cache(heads=4, dim_bytes=8, layers=1), cache(heads=4, dim_bytes=8, layers=1, block_size=64)
    plan, _ = packed_plan(source, target, (0, 4))
    assert (plan.facts.writes, plan.facts.smallest_write) == ((8,), 4 * 64 * 8)
    (packed,) = moved(source, target, (0, 4), [Move(0, list(range(8)), [4, 2], 0, 0, 100)])
    assert lengths(packed) == [48 * 8] * 8 + [4 * 64 * 8] * 2


def test_what_has_no_room_is_left_at_the_end_of_a_receivers_block() -> None:
    source, target = cache(heads=4), cache(heads=4, order="LBNHC", block_size=32)
    block = 2 * 2 * 4 * 4 * 32
    moves = [Move(0, list(range(8)), [4, 2, 6, 0], 0, 0, 128)]
    done = moved(source, target, (0, 4), moves, room=2 * block + block // 2)
    assert [[move.first for move in packed.rest] for packed in done] == [[64], []]
    late = [replace(moves[0], first=16, end=80)]
    done = moved(source, target, (0, 4), late, room=block + block // 4)
    assert [[move.first for move in packed.rest] for packed in done] == [[32], [64], []]


def test_what_is_behind_something_left_is_left_too() -> None:
    """Three of four units have room, so a receiver's block of two is packed; the second move would fit behind it."""
    source, target = cache(heads=4), cache(heads=4, order="LBNHC", block_size=32)
    plan, _ = packed_plan(source, target, (0, 4), room=3 * 2 * 2 * 4 * 4 * 16)
    moves = [Move(0, range(8), range(4), 0, 0, 64), Move(0, range(8), range(4), 0, 64, 80)]
    assert [(move.first, move.end) for move in plan.batch(moves).rest] == [(32, 64), (64, 80)]


def test_without_room_nothing_is_packed_until_some_is_freed() -> None:
    source, target = cache(heads=4), cache(heads=4, order="LBNHC")
    plan, memory = packed_plan(source, target, (0, 4), room=2 * 2 * 4 * 4 * 16)
    moves = [Move(0, [0, 1], [4, 2], 0, 0, 32)]
    first = plan.batch(moves)
    second = plan.batch(first.rest)
    assert (second.products, second.extent) == ([], None)
    assert [move.first for move in second.rest] == [16]
    assert first.extent is not None
    memory.free(first.extent)
    third = plan.batch(second.rest)
    assert third.extent is not None
    assert third.rest == []


def test_what_is_packed_does_not_read_the_cache_any_more() -> None:
    source, target = cache(order="LBHNC"), cache(order="LBNHC")
    plan, _ = packed_plan(source, target, (0, 2))
    source.fill(1)
    packed = plan.batch([Move(0, [2], [3], 0, 0, 16)])
    row = bytes(source.row("layers.1", "v", 2, 5, 1))
    source.fill(2)
    Receiver(target).receive(packed.products)
    assert target.row("layers.1", "v", 3, 5, 1) == row


def test_nothing_to_move_takes_no_room() -> None:
    for source in (cache(layers=["elsewhere"]), cache()):
        plan, memory = packed_plan(source, cache(), (0, 2), room=4096)
        end = 32 if source.layout.regions[0].layer == "elsewhere" else 0
        assert plan.batch([Move(0, [0, 1], [0, 1], 0, 0, end)]) == Packed([], None, [])
        assert memory.largest == memory.size


def test_moves_that_leave_their_tables_take_no_room() -> None:
    plan, memory = packed_plan(cache(), cache(), (0, 2))
    with pytest.raises(LayoutError, match="sender's table of 1 blocks ends"):
        plan.batch([Move(0, [1], [1, 2], 0, 0, 32)])
    assert memory.largest == memory.size


# Choosing.


def unneeded() -> Staging:
    raise AssertionError("memory was taken that nobody needs")


def chosen(source: Cache, target: Cache, smallest: int, room: int | None = None) -> PairPlan | PackedPlan:
    """With all heads. ``room``: of the staging memory; None if there is to be no need for any."""
    memory = unneeded if room is None else lambda: staging(room)
    heads = (0, source.layout.heads)
    remote = Receiver(target).remote
    registrations = registered(source)
    return choose(
        source.layout, target.layout, heads, registrations, remote, smallest_write_bytes=smallest, staging=memory
    )


def test_packing_is_chosen_where_writes_would_be_small() -> None:
    heads_first, tokens_first = cache(order="LBHNC", dim_bytes=64), cache(order="LBNHC", dim_bytes=64)
    assert isinstance(chosen(heads_first, heads_first, 2048), PairPlan)
    assert isinstance(chosen(heads_first, tokens_first, 64), PairPlan)
    assert isinstance(chosen(heads_first, tokens_first, 65, PLENTY), PackedPlan)
    assert isinstance(chosen(heads_first, tokens_first, 2048, PLENTY), PackedPlan)
    assert isinstance(chosen(heads_first, cache(layers=["elsewhere"]), 2048), PairPlan)


def test_room_for_one_group_of_several_is_not_enough() -> None:
    """They go on together, so each step takes a block of all."""
    source, target = (
        grouped(*(cache(order=order, dim_bytes=64, layers=[name]) for name in ("a", "b")))
        for order in ("LBHNC", "LBNHC")
    )
    with pytest.raises(LayoutError, match="blocks of all groups together take 8192 bytes of 4096"):
        chosen(source, target, 65, 4096)
    packed = chosen(source, target, 65, 8192)
    assert isinstance(packed, PackedPlan)
    moves = [Move(group, [1, 2], [3, 4], 0, 0, 32) for group in (0, 1)]
    assert packed.fits(moves) == 16
    first = packed.batch([dataclasses.replace(move, end=16) for move in moves])
    assert not first.rest
    assert packed.fits([dataclasses.replace(move, first=16) for move in moves]) == 16, "no room"


def test_writes_that_stay_too_small_are_refused_with_both_layouts_and_the_setting() -> None:
    source, target = cache(order="LBHNC", dim_bytes=64), cache(order="LBNHC", dim_bytes=64, block_size=32)
    with pytest.raises(LayoutError) as error:
        chosen(source, target, 4097, PLENTY)
    for words in (
        "rows in blocks of 16 tokens (heads 0 to 2 of 2, 1024 bytes apart, tokens 64) here",
        "rows in blocks of 32 tokens (heads 0 to 2 of 2, 64 bytes apart, tokens 128) there",
        "writes of 4096 bytes",
        "smallest_write_bytes (4097)",
        "keeps no more together",
    ):
        assert words in str(error.value)


def test_a_staging_memory_too_small_for_a_block_is_refused() -> None:
    source, target = cache(), cache(block_size=64)
    with pytest.raises(LayoutError, match="takes 2048 bytes of 1984 in the staging memory"):
        packed_plan(source, target, (0, 2), room=2047)
    packed_plan(source, target, (0, 2), room=2048)


def test_caches_in_device_memory_are_not_packed() -> None:
    source = cache()
    memory = Memory(source.memory.address, source.memory.length, MemoryKind.NEURON, 0)
    plan = PairPlan(source.layout, source.layout, (0, 2), [Registration(1, memory, b"")] * 4, Receiver(source).remote)
    with pytest.raises(LayoutError, match=r"packed from neuron memory.*smallest_write_bytes"):
        PackedPlan(plan, staging(PLENTY))
    target = cache(order="LBNHC")
    with pytest.raises(LayoutError, match=r"here.* there.* 4 bytes.*\(5\): KV in neuron memory can't be packed"):
        choose(
            source.layout,
            target.layout,
            (0, 2),
            [Registration(1, memory, b"")] * 4,
            Receiver(target).remote,
            smallest_write_bytes=5,
            staging=unneeded,
        )


def test_alike_layouts_are_never_refused() -> None:
    """Their writes are as large as the cache allows, however small that is."""
    source = cache(dim_bytes=1, block_size=1)
    assert isinstance(chosen(source, cache(dim_bytes=1, block_size=1, blocks=5), 4096), PairPlan)


def test_a_peer_with_endless_blocks_costs_nothing() -> None:
    source = cache()
    layout = msgspec.structs.replace(source.layout, groups=(Group(1 << 40),))
    plan = PairPlan(source.layout, layout, (0, 2), registered(source), [RemoteRegion(9, 0)] * 4)
    with pytest.raises(LayoutError, match="in the staging memory; raise staging_bytes"):
        PackedPlan(plan, staging(PLENTY))
