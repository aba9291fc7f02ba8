"""Plans, carried out on real memory, against a reference that copies row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_pushkv.device.base import Memory
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.plan.pair import Move, PairPlan
from neuron_pushkv.plan.shares import shares
from neuron_pushkv.transport.base import Registration
from neuron_pushkv.wire import RemoteRegion
from tests.layouts import ORDERS, Cache, cache

from .moving import Receiver, copy_slowly, registered
from .pairs import Case, cases


def plan_of(source: Cache, target: Cache, heads: tuple[int, int]) -> PairPlan:
    """Everything in one memory on either side."""
    return PairPlan(source.layout, target.layout, heads, registered(source), Receiver(target).remote)


def moved(source: Cache, target: Cache, heads: tuple[int, int], moves: list[Move]) -> Receiver:
    """Carry out a plan between two filled caches, and see that it has done what it should and nothing else."""
    source.fill(1)
    target.fill(2)
    plan, receiver = plan_of(source, target, heads), Receiver(target)
    before = bytes(target.bytes)
    receiver.receive(plan.batch(moves))
    after = bytes(target.bytes)
    target.bytes[:] = before
    copy_slowly(source, target, heads, plan.units, moves)
    assert after == bytes(target.bytes)
    return receiver


@given(cases(), st.integers(0, 2))
@settings(deadline=None, max_examples=200)
def test_every_byte_lands_where_a_slow_copy_puts_it(case: Case, calls: int) -> None:
    """F23 to F25: unlike TP, PP, block sizes, orders, K and V apart or together, groups, latents, opaque kernels."""
    target = case.receiver
    target.fill(1000)
    before = bytes(target.bytes)
    receiver, everything = Receiver(target, case.apart[1]), []
    for stage, senders in enumerate(case.senders):
        for rank, heads in shares(target.layout, case.tp, len(senders)).items():
            source = senders[rank]
            source.fill(100 * stage + rank)
            plan = PairPlan(
                source.layout, target.layout, heads, registered(source, apart=case.apart[0]), receiver.remote
            )
            everything.append((source, heads, plan.units))
            layers = {region.layer for region in target.layout.regions}
            match calls:
                case 0:
                    receiver.receive(plan.batch(case.moves))
                case 1:
                    for move in case.moves:
                        receiver.receive(plan.batch([move]))
                case 2:
                    for layer in layers:
                        receiver.receive(plan.batch(case.moves, layer))
    after = bytes(target.bytes)
    target.bytes[:] = before
    for source, heads, units in everything:
        copy_slowly(source, target, heads, units, case.moves)
    assert after == bytes(target.bytes)


# What merges.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", ["apart", "together", "rows"])
def test_blocks_of_equal_layouts_are_as_few_pieces_as_they_lie_in(order: str, kv: str) -> None:
    """K next to V is one piece, and of a cache whose blocks hold all layers a block is one, or two halves."""
    both = [cache(order=order, kv=kv, layers=3, heads=2, dim_bytes=4, value_bytes=6) for _ in range(2)]
    pieces = (1 if order.startswith("BL") else 3) * (2 if kv == "apart" else 1)
    assert plan_of(*both, (0, 2)).facts.writes == (pieces,)
    receiver = moved(*both, (0, 2), [Move(0, [1, 2, 3, 6], [2, 3, 4, 5], 0, 0, 64)])
    assert receiver.writes == 2 * pieces


def test_descending_blocks_merge() -> None:
    """vLLM hands out freed blocks from the highest id down; taken as they come, nothing would merge."""
    receiver = moved(cache(layers=1), cache(layers=1), (0, 2), [Move(0, [5, 4, 3], [7, 6, 5], 0, 0, 48)])
    assert receiver.writes == 2


def test_only_what_is_contiguous_on_both_sides_merges() -> None:
    for source, target, runs in (([1, 2, 3, 4], [0, 1, 3, 4], 2), ([1, 2], [4, 3], 2), ([1, 3], [4, 5], 2)):
        moves = [Move(0, source, target, 0, 0, 16 * len(source))]
        assert moved(cache(layers=1), cache(layers=1), (0, 2), moves).writes == 2 * runs


def test_gaps_between_blocks_are_not_written_over() -> None:
    assert moved(cache(layers=1, gap=8), cache(layers=1), (0, 2), [Move(0, [1, 2], [1, 2], 0, 0, 32)]).writes == 4


def test_several_prompts_in_one_batch_merge_with_each_other() -> None:
    moves = [Move(0, [4], [6], 0, 0, 16), Move(0, [3], [5], 0, 0, 16)]
    assert moved(cache(layers=1), cache(layers=1), (0, 2), moves).writes == 2


@pytest.mark.parametrize(
    ("here", "there", "order", "unit", "writes"),
    [
        (16, 32, "LBNHC", 16, 1),
        (32, 16, "LBNHC", 16, 1),
        (32, 128, "LBNHC", 32, 1),
        (16, 24, "LBNHC", 8, 1),
        (16, 32, "LBHNC", 16, 4),
    ],
)
def test_blocks_of_unlike_size_meet_in_units(here: int, there: int, order: str, unit: int, writes: int) -> None:
    """F24. Tokens that lie in a row on both sides stay one write, whatever the blocks; heads first, each is its own."""
    source, target = cache(order=order, heads=4, block_size=here), cache(order=order, heads=4, block_size=there)
    plan = plan_of(source, target, (0, 4))
    assert plan.units == (unit,)
    assert plan.facts.writes == (2 * 2 * writes,)
    assert plan.facts.bytes == (2 * 2 * 4 * 4 * unit,)
    assert plan.facts.smallest_write == 4 * unit * (4 // writes)
    tokens = 100
    blocks = [list(range(-(-tokens // size))) for size in (here, there)]
    receiver = moved(source, target, (0, 4), [Move(0, *blocks, 0, 0, tokens)])
    if order == "LBNHC":
        assert receiver.writes == 4


def test_orders_of_heads_and_tokens_may_differ() -> None:
    """F25. Nothing but a row is contiguous on both sides then, and the facts say so."""
    source, target = cache(order="LBHNC", dim_bytes=64), cache(order="BLNHC", dim_bytes=64)
    facts = plan_of(source, target, (0, 2)).facts
    assert (facts.writes, facts.smallest_write) == ((2 * 2 * 2 * 16,), 64)
    moved(source, target, (0, 2), [Move(0, [3, 1], [0, 7], 0, 0, 20)])


def test_memory_registered_in_parts_is_not_merged_over_their_ends() -> None:
    source, target = cache(order="BLNHC", kv="together"), cache(order="BLNHC", kv="together")
    for apart_here, apart_there in ((True, False), (False, True)):
        receiver = Receiver(target, apart_there)
        registrations = registered(source, apart=apart_here)
        plan = PairPlan(source.layout, target.layout, (0, 2), registrations, receiver.remote)
        assert plan.facts.writes == (4,)


# Equal layouts.


def test_plan_for_equal_layouts_is_never_expanded() -> None:
    """F33: 64 layers x (K, V) and a thousand random blocks: the plan's size is their sum, not their product."""
    regions = tuple(
        Region(f"layers.{number // 2}", "kv"[number % 2 :][:1], 0, number << 30, 4096, 0, 256, 256)  # type: ignore[arg-type]
        for number in range(128)
    )
    layout = Layout("rows", 100_000, (Group(16),), regions)
    registration = Registration(1, Memory(0, 1 << 40), b"")
    remote = [RemoteRegion(9, region.address) for region in regions]
    plan = PairPlan(layout, layout, (0, 1), [registration] * 128, remote)
    (product,) = plan.batch([Move(0, range(0, 2000, 2), range(1, 2001, 2), 0, 0, 16_000)])
    assert (len(product.spans), len(product.runs), product.writes) == (128, 1000, 128_000)
    (again,) = plan.batch([Move(0, range(16), range(16), 0, 0, 256)])
    assert again.spans is product.spans
    assert again.runs.tolist() == [[0, 0, 16 * 4096]]


# Refusals.


def test_a_last_block_is_copied_whole_but_nothing_behind_it() -> None:
    """The rest of a unit is the receiver's own block. Of 17 tokens in units of 8, 24 move, half of our second block."""
    source, target = cache(block_size=16), cache(block_size=24)
    receiver = moved(source, target, (0, 2), [Move(0, [1, 2], [5], 0, 0, 17)])
    assert len(receiver.written) == 24 * 2 * 2 * 2 * 4


GOOD = Move(0, [1, 2, 3], [1, 2, 3], 0, 0, 48)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": [1, 2]}, "sender's table of 2 blocks ends"),
        ({"target": [1, 2]}, "receiver's table of 2 blocks ends"),
        ({"source": [1, -1, 2]}, "sender's table is none of its 8"),
        ({"source": [1, 8, 2]}, "sender's table is none of its 8"),
        ({"target": [1, 8, 2]}, "receiver's table is none of its 8"),
        ({"first": 8}, "multiple of 16"),
        ({"target_start": 8, "first": 16}, "multiple of 16"),
        ({"target_start": 16}, "not behind it"),
    ],
)
def test_moves_that_leave_their_tables_or_boundaries_are_refused(change: dict[str, object], said: str) -> None:
    plan = plan_of(cache(), cache(), (0, 2))
    assert plan.batch([GOOD])
    with pytest.raises(LayoutError, match=said):
        plan.batch([replace(GOOD, **change)])  # type: ignore[arg-type]


def test_a_receiver_beyond_the_address_space_is_refused() -> None:
    layout = cache(layers=1).layout
    remote = [RemoteRegion(9, (1 << 63) - layout.span(layout.regions[0]) - less) for less in (1, 0)]
    with pytest.raises(LayoutError, match=r"receiver's layers\.0\.v reaches beyond"):
        PairPlan(layout, layout, (0, 2), [Registration(1, Memory(0, 1 << 62), b"")] * 2, remote)


def test_nothing_to_move_is_no_products() -> None:
    assert plan_of(cache(), cache(), (0, 2)).batch([replace(GOOD, end=0)]) == []
    lacking = plan_of(cache(layers=["layers.7"]), cache(), (0, 2))
    assert lacking.batch([GOOD]) == []
    assert (lacking.facts.writes, lacking.facts.smallest_write) == ((0,), 0)


@pytest.mark.parametrize(("heads", "who"), [((0, 4), "sender holds 2 to 4"), ((3, 5), "sender"), ((2, 2), "sender")])
def test_heads_that_a_side_lacks_are_refused(heads: tuple[int, int], who: str) -> None:
    source, target = cache(heads=8, tp=(1, 4)), cache(heads=8)
    plan_of(source, target, (2, 4))
    with pytest.raises(LayoutError, match=who):
        plan_of(source, target, heads)
    with pytest.raises(LayoutError, match="receiver holds 0 to 1"):
        plan_of(target, cache(heads=8, tp=(0, 8)), (0, 2))
