"""The geometry of one rank's cache, and which two can be copied block by block."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout, Region, check_equal

LAYOUT = Layout("flash", 16, 100, (Region("layer.0", 0x1000, 4096, 100), Region("layer.1", 0x100000, 2048, 100)))


def test_sizes() -> None:
    assert LAYOUT.bytes_per_block == 6144
    assert LAYOUT.regions[1].length == 204_800


@given(st.integers(1, 128), st.integers(0, 100), st.integers(0, 5000))
def test_blocks_of_a_range_hold_exactly_its_tokens(block_size: int, first: int, length: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, block_size=block_size)
    start = first * block_size
    end = start + length
    holders = {token // block_size for token in range(start, end)}
    assert layout.blocks_for(start, end) == len(holders)
    assert {layout.block_index(token) for token in range(start, end)} == holders


def test_equal_layouts_may_lie_at_other_addresses_and_have_more_blocks() -> None:
    moved = tuple(msgspec.structs.replace(region, address=7, blocks=5) for region in LAYOUT.regions)
    check_equal(LAYOUT, msgspec.structs.replace(LAYOUT, blocks=5, regions=moved))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernel": "xla"}, ["KV kernel", "flash here", "xla there"]),
        ({"block_size": 32}, ["block size", "16 here", "32 there"]),
        ({"regions": LAYOUT.regions[:1]}, ["number of regions", "2 here", "1 there"]),
        (
            {"regions": (LAYOUT.regions[0], Region("layer.1", 0, 1024, 100))},
            ["layer.1 with 2048 bytes a block here", "layer.1 with 1024 there"],
        ),
        (
            {"regions": (LAYOUT.regions[0], Region("layer.9", 0, 2048, 100))},
            ["layer.1 with 2048 bytes a block here", "layer.9 with 2048 there"],
        ),
    ],
)
def test_unlike_layouts_are_refused_with_both_values(change: dict[str, object], said: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        check_equal(LAYOUT, msgspec.structs.replace(LAYOUT, **change))
    for words in said:
        assert words in str(error.value)
    assert "start both engines with the same" in str(error.value)
