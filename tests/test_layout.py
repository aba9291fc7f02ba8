"""The geometry of one rank's cache, and which two can be mapped onto each other."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.plan.pair import check
from tests.layouts import ORDERS, Cache, cache, grouped


def changed(layout: Layout, **region: Any) -> Layout:
    """The same with its first region changed."""
    first, *rest = layout.regions
    return msgspec.structs.replace(layout, regions=(msgspec.structs.replace(first, **region), *rest))


def test_sizes() -> None:
    """K and V together in each row: a block's rows are spread over twice as many bytes as they have."""
    layout = cache(kv="rows", layers=3, heads=2, block_size=16, blocks=8, dim_bytes=4).layout
    region = layout.regions[0]
    assert (region.name, region.end_head) == ("layers.0.k", 2)
    assert (region.block_bytes(16), region.content_bytes(16)) == (2 * 16 * 8 - 4, 2 * 16 * 4)
    assert layout.span(region) == 7 * 2 * 16 * 8 + 2 * 16 * 8 - 4
    assert layout.bytes_of(0) == 3 * 2 * 2 * 16 * 4


def test_sizes_of_blocks_in_an_order_of_their_kernels() -> None:
    layout = cache(kv="packed", layers=3, heads=2, block_size=16, dim_bytes=4, kernel="cpu").layout
    region = layout.regions[0]
    assert (region.block_bytes(16), region.content_bytes(16)) == (2 * 16 * 8, 2 * 16 * 8)
    assert layout.bytes_of(0) == 3 * 2 * 16 * 8


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv", ["apart", "together", "rows", "latent", "packed"])
@pytest.mark.parametrize("value", [None, 3])
def test_each_byte_of_a_cache_belongs_to_one_row(order: str, kv: Any, value: int | None) -> None:
    """Of the caches that tests are made of: neither overlap nor gap, whatever the order."""
    heads = 1 if kv == "latent" else 4
    held = cache(order=order, kv=kv, layers=3, heads=heads, block_size=3, blocks=2, dim_bytes=2, value_bytes=value)
    for region in held.layout.regions:
        for block in range(2):
            for token in range(3 if region.token_stride else 1):
                for head in range(region.first_head, region.end_head):
                    row = held.row(region.layer, region.part, block, token, head)
                    assert not any(row)
                    row[:] = b"x" * len(row)
    assert bytes(held.bytes) == b"x" * held.memory.length


@given(st.integers(1, 128), st.integers(0, 100), st.integers(0, 5000))
def test_blocks_of_a_range_hold_exactly_its_tokens(block_size: int, first: int, length: int) -> None:
    start = first * block_size
    end = start + length
    holders = {token // block_size for token in range(start, end)}
    assert Group(block_size).blocks_for(start, end) == len(holders)


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 20), st.integers(0, 1000))
def test_a_window_keeps_what_the_next_token_sees(block_size: int, window: int, first: int, length: int) -> None:
    start = first * block_size
    end = start + length
    kept = Group(block_size, window).first_token(start, end)
    assert kept % block_size == 0
    assert kept >= start
    seen = [token for token in range(start, end) if token > end - window]
    assert all(token >= kept for token in seen)
    if kept > start:
        assert not seen or min(seen) - kept < block_size
    assert Group(block_size).first_token(start, end) == start


def test_layouts_cross_the_wire() -> None:
    layout = grouped(cache(), cache(layers=["other"], window=128, kv="latent", heads=1)).layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout
    for field, value in (("block_stride", 0), ("row_bytes", 0), ("heads", 0), ("address", 1 << 63), ("part", "q")):
        region = list({**msgspec.structs.asdict(layout.regions[0]), field: value}.values())
        with pytest.raises(msgspec.ValidationError, match="enum value" if field == "part" else "`int`"):
            msgspec.convert(region, Region)


def test_layouts_need_no_numpy() -> None:
    modules = "neuron_pushkv.layout, neuron_pushkv.plan.shares, neuron_pushkv.plan.mapping"
    code = f"import sys, {modules}; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "False"


# Which two can be mapped.

HERE = cache(heads=4)


@pytest.mark.parametrize(
    "there",
    [
        cache(heads=4, blocks=5),
        cache(heads=4, tp=(3, 4)),
        cache(heads=4, tp=(3, 8)),
        cache(heads=4, order="BLNHC", kv="rows", block_size=24, gap=7),
        cache(heads=4, layers=["layers.1", "layers.2"]),
        cache(heads=4, layers=["elsewhere"]),
    ],
)
def test_what_can_be_mapped_is_not_refused(there: Cache) -> None:
    check(HERE.layout, there.layout)
    check(there.layout, HERE.layout)


PACKED = cache(kv="packed", kernel="cpu/avx2")
WINDOWS = grouped(cache(), cache(layers=["other"], window=128)).layout
LATENT = cache(kv="latent", heads=1).layout


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (HERE.layout, cache(heads=2).layout, ["number of KV heads", "4 here, 2 there", "serve the same model"]),
        (HERE.layout, cache(heads=4, dim_bytes=8).layout, ["layers.0.k", "4 here, 8 there", "KV cache dtype"]),
        (LATENT, cache(heads=1).layout, ["layers.0", "latent here, k+v there", "attention backend"]),
        (
            PACKED.layout,
            cache(kv="packed", kernel="cpu/amx").layout,
            ["KV kernel", "cpu/avx2 here, cpu/amx there", "same attention backend"],
        ),
        (
            PACKED.layout,
            cache(kv="packed", kernel="cpu/avx2", block_size=32).layout,
            ["block size", "cpu/avx2", "16 here, 32 there", "--block-size"],
        ),
        (HERE.layout, cache(kernel="cpu/avx2", heads=4).layout, ["KV kernel", "rows here, cpu/avx2 there"]),
        (
            HERE.layout,
            cache(heads=4, window=64).layout,
            ["KV cache groups", "1 (full attention) here", "1 (window of 64) there"],
        ),
        (
            WINDOWS,
            cache().layout,
            ["KV cache groups", "2 (full attention, window of 128) here", "1 (full attention) there"],
        ),
        (WINDOWS, changed(WINDOWS, group=1), ["KV cache group of layers.0.k", "0 here, 1 there"]),
        (HERE.layout, changed(HERE.layout, token_stride=0), ["layers.0.k", "rows here, its kernel's own there"]),
        (
            changed(HERE.layout, token_stride=0),
            changed(HERE.layout, token_stride=0, row_bytes=8),
            ["bytes of layers.0.k for a block and head", "4 here, 8 there"],
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_both_values(ours: Layout, theirs: Layout, said: list[str]) -> None:
    check(ours, ours)
    with pytest.raises(LayoutError) as error:
        check(ours, theirs)
    for words in said:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer": "layers.1"}, "layers.1.k twice"),
        ({"group": 1}, "group 1 of 1"),
        ({"first_head": 1}, "heads 1 to 5 of 4"),
        ({"head_stride": 0}, "4 heads in one place"),
        ({"block_stride": (1 << 63) - 1}, "layers.0.k in more bytes than there are"),
        ({"part": "latent"}, "latent layers.0.latent in a model of 4 KV heads"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    broken = changed(HERE.layout, **change)
    for pair, whose in (((broken, HERE.layout), "our layout"), ((HERE.layout, broken), "the peer's layout")):
        with pytest.raises(LayoutError, match=said) as error:
            check(*pair)
        assert str(error.value).startswith(whose)
