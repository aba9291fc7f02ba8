"""Plans against a reference that copies block by block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv.device.base import Memory
from neuron_pushkv.layout import Layout, Region
from neuron_pushkv.plan import plan, runs
from neuron_pushkv.transport.base import Registration
from neuron_pushkv.wire import RemoteRegion

BLOCKS = 24
pairs_of_blocks = st.integers(1, BLOCKS).flatmap(
    lambda count: st.tuples(st.permutations(range(BLOCKS)), st.permutations(range(BLOCKS))).map(
        lambda both: (both[0][:count], both[1][:count])
    )
)


def test_descending_blocks_merge() -> None:
    """vLLM hands out freed blocks from the highest id down; taken as they come, nothing would merge."""
    assert runs([18, 17, 16], [40, 39, 38]) == [(16, 38, 3)]


def test_only_what_is_contiguous_on_both_sides_merges() -> None:
    assert runs([1, 2, 3, 4], [10, 11, 13, 14]) == [(1, 10, 2), (3, 13, 2)]
    assert runs([1, 2], [11, 10]) == [(1, 11, 1), (2, 10, 1)]


@given(pairs_of_blocks)
def test_runs_cover_every_pair_once(blocks: tuple[list[int], list[int]]) -> None:
    source, target = blocks
    expanded = [(here + index, there + index) for here, there, count in runs(source, target) for index in range(count)]
    assert sorted(expanded) == sorted(zip(source, target, strict=True))


@given(pairs_of_blocks, st.lists(st.sampled_from([8, 24, 64]), min_size=1, max_size=5))
def test_plan_moves_exactly_the_bytes_of_the_blocks(blocks: tuple[list[int], list[int]], sizes: list[int]) -> None:
    """Regions of several block sizes, at any distance, in one registration."""
    source, target = blocks
    regions, address = [], 1000
    for number, size in enumerate(sizes):
        regions.append(Region(f"layer.{number}", address, size, BLOCKS))
        address += size * BLOCKS + 16
    layout = Layout("test", 16, BLOCKS, tuple(regions))
    registration = Registration(1, Memory(1000, address), 0, 5)
    remote = [RemoteRegion(region.address + 70000, 9) for region in regions]
    moved: dict[int, int] = {}
    for product in plan(layout, [registration] * len(regions), remote, source, target):
        for span in product.spans:
            assert (span.key, span.registration) == (9, registration)
            for index in range(0, len(product.runs), 3):
                here, there, length = product.runs[index : index + 3]
                for byte in range(length):
                    assert span.remote + there + byte not in moved
                    moved[span.remote + there + byte] = span.local + here + byte
    expected = {
        there.address + block * region.block_bytes + byte: region.address + origin * region.block_bytes + byte
        for region, there in zip(regions, remote, strict=True)
        for origin, block in zip(source, target, strict=True)
        for byte in range(region.block_bytes)
    }
    assert moved == expected


def test_plan_for_equal_layouts_is_never_expanded() -> None:
    """F33: 64 layers x (K, V) and a thousand random blocks: the plan's size is their sum, not their product."""
    regions = tuple(Region(f"layer.{number}", number << 30, 4096, 100_000) for number in range(128))
    layout = Layout("test", 16, 100_000, regions)
    registration = Registration(1, Memory(0, 1 << 40), 0, 5)
    remote = [RemoteRegion(region.address, 9) for region in regions]
    (product,) = plan(layout, [registration] * 128, remote, range(0, 2000, 2), range(1, 2001, 2))
    assert (len(product.spans), len(product.runs), product.writes) == (128, 3000, 128_000)
