"""The staging cache's layout, and what is copied between it and a device's."""

from __future__ import annotations

import ctypes
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_pushkv.bounce.cache import PARTS, StagingCache
from neuron_pushkv.bounce.copies import CopyPlan, Table
from neuron_pushkv.bounce.dense import Dense
from neuron_pushkv.device.base import Copies
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import ROWS, Group, Layout, Region
from neuron_pushkv.transport.loopback import LoopbackNetwork
from tests.layouts import ORDERS, Cache, cache, grouped

SLACK = 64
"""Bytes by which one run of frames may be rounded up."""


def staging(held: Cache, blocks: int) -> tuple[Layout, ctypes.Array[ctypes.c_char]]:
    """A staging cache of that many blocks, and what it lies in."""
    shape = Dense(held.layout)
    buffer = ctypes.create_string_buffer(shape.bytes(blocks))
    return shape.at(ctypes.addressof(buffer), blocks), buffer


def table(*blocks: int) -> Table:
    return np.array(blocks, dtype=np.int64)


def whole(layout: Layout) -> tuple[tuple[int, int], frozenset[str]]:
    """All heads, all layers."""
    first, end = layout.regions[0].first_head, layout.regions[0].end_head
    return (first, end), frozenset(region.layer for region in layout.regions)


def bytes_of(copies: Copies) -> int:
    return int(copies[:, 2].sum())


SHAPES = st.fixed_dictionaries(
    {
        "order": st.sampled_from(ORDERS),
        "kv": st.sampled_from(["apart", "together", "rows", "latent"]),
        "heads": st.sampled_from([1, 4]),
        "gap": st.sampled_from([0, 12]),
        "dim_bytes": st.sampled_from([4, 6]),
        "layers": st.integers(1, 3),
    }
)


@given(SHAPES, st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None)
def test_out_and_in_again(shape: dict[str, object], seed: int) -> None:
    """Blocks of one cache, through the staging cache, are the same in other blocks of another; gaps stay untouched."""
    chance = random.Random(seed)
    source, target = cache(blocks=8, **shape), cache(blocks=8, **shape)  # type: ignore[arg-type]
    source.fill(seed)
    target.fill(seed + 1)
    before = bytes(target.bytes)
    middle, _buffer = staging(source, 5)
    device, there = (table(*chance.sample(range(8), 3)) for _ in range(2))
    between = table(*chance.sample(range(5), 3))
    host = HostAccelerator()
    out = CopyPlan(source.layout, middle, *whole(source.layout)).copies([(0, device, between)])
    back = CopyPlan(target.layout, middle, *whole(target.layout)).copies([(0, there, between)])
    host.read(out)
    host.write(back)
    assert bytes_of(out) == bytes_of(back) == 3 * source.layout.bytes_of(0)
    touched = bytearray(before)
    for region in source.layout.regions:
        for ours, theirs in zip(device.tolist(), there.tolist(), strict=True):
            for token in range(16):
                for head in range(region.first_head, region.end_head):
                    row = source.row(region.layer, region.part, ours, token, head)
                    place = target.row(region.layer, region.part, theirs, token, head)
                    start = ctypes.addressof(ctypes.c_char.from_buffer(place)) - target.memory.address
                    touched[start : start + len(row)] = row
    assert bytes(target.bytes) == bytes(touched)


@pytest.mark.parametrize("order", ORDERS)
def test_as_little_room_as_there_is_kv(order: str) -> None:
    """No room is lost to what lies between blocks, and what was one copy stays one."""
    held = cache(order=order, kv="together", layers=3, heads=4)
    shape = Dense(held.layout)
    assert shape.block_bytes == held.layout.bytes_of(0)
    assert shape.bytes(7) <= 7 * held.layout.bytes_of(0) + 3 * SLACK
    middle, _buffer = staging(held, 7)
    copies = CopyPlan(held.layout, middle, *whole(held.layout)).copies([(0, table(2, 3, 4), table(4, 5, 6))])
    assert len(copies) == (3 if order.startswith("LB") else 1)


def test_only_some_heads_and_layers() -> None:
    held = cache(layers=["a", "b", "c"], heads=4)
    middle, _buffer = staging(held, 4)
    some = CopyPlan(held.layout, middle, (1, 3), frozenset("ac"))
    copies = some.copies([(0, table(5), table(0))])
    assert bytes_of(copies) == held.layout.bytes_of(0) * 2 // 4 * 2 // 3
    assert not len(CopyPlan(held.layout, middle, (1, 3), frozenset("x")).copies([(0, table(5), table(0))]))
    with pytest.raises(LayoutError, match="heads 2 to 5"):
        CopyPlan(held.layout, middle, (2, 5), frozenset("a"))


def test_groups_in_the_same_memory_share_it_here_too() -> None:
    """As vLLM lays layers of unlike groups over each other: a block takes as much room as the larger one."""
    both = grouped(cache(layers=["full"], blocks=8), cache(layers=["window"], blocks=8, window=32))
    base = both.layout.regions[0].address
    moved = both.layout.regions[2].address - base
    regions = [msgspec.structs.replace(one, address=one.address - moved * one.group) for one in both.layout.regions]
    layout = msgspec.structs.replace(both.layout, regions=tuple(regions))
    shape = Dense(layout)
    assert shape.block_bytes == layout.bytes_of(0) == layout.bytes_of(1)
    for index in range(2):
        addresses = [shape.at(0, 4).regions[number].address for number in (index, index + 2)]
        assert addresses[0] == addresses[1]


def test_blocks_that_lie_among_each_other_are_pulled_apart() -> None:
    """Heads first: each block's bytes reach over all blocks."""
    region = Region("a", "k", 0, 1000, block_stride=64, head_stride=8 * 64, token_stride=4, row_bytes=4, heads=2)
    layout = Layout(ROWS, 8, (Group(16),), (region,), heads=2)
    shape = Dense(layout)
    assert shape.block_bytes == layout.bytes_of(0) == 128
    (dense,) = shape.at(0, 3).regions
    assert (dense.address, dense.block_stride, dense.head_stride, dense.token_stride) == (0, 128, 64, 4)
    copies = CopyPlan(layout, shape.at(0, 3), (0, 2), frozenset("a")).copies([(0, table(2), table(1))])
    assert copies.tolist() == [[1128, 128, 64], [1640, 192, 64]]


def test_room_is_divided_and_given_back() -> None:
    held = cache(blocks=1000)
    size = held.layout.bytes_of(0)
    transport = LoopbackNetwork().transport()
    try:
        room = StagingCache(held.layout, 40 * size + 4 * SLACK, transport)
        assert (room.sending.blocks, room.receiving.blocks) == (40 // PARTS, 40 - 40 // PARTS)
        first, second = room.sending.take(4, "a"), room.receiving.take(30, "b")
        assert first is not None
        assert second is not None
        assert max(first) < 10 <= min(second)
        assert len({*first.tolist(), *second.tolist()}) == 34
        assert room.sending.take(7, "c") is None
        assert room.used_bytes == 34 * size
        room.sending.give_back("a")
        assert room.sending.free == 10
        small = StagingCache(cache(blocks=8).layout, 1 << 20, transport)
        assert (small.sending.blocks, small.receiving.blocks) == (8, 8), "no more than the cache itself"
    finally:
        transport.close()
