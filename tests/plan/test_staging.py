"""The staging memory against a model: a set of extents that never overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv.blocks import Extent
from neuron_pushkv.device.base import Memory
from neuron_pushkv.errors import BlockError, TransportError
from neuron_pushkv.plan.staging import ALIGNMENT, Staging
from neuron_pushkv.transport.base import Registration

from .moving import staging


@given(st.integers(0, 40), st.lists(st.one_of(st.integers(1, 700), st.floats(0, 1, exclude_max=True)), max_size=60))
def test_extents_lie_inside_and_never_overlap(lines: int, steps: list[int | float]) -> None:
    """A whole number takes that many bytes; a fraction frees one of those that are taken."""
    memory = staging(lines * ALIGNMENT + 7)
    taken: list[Extent] = []
    for step in steps:
        if isinstance(step, float):
            if taken:
                memory.free(taken.pop(int(step * len(taken))))
        elif (extent := memory.take(step)) is not None:
            assert extent.length >= step
            assert extent.first % ALIGNMENT == 0
            assert 0 <= extent.first <= extent.end <= memory.size
            for other in taken:
                assert extent.end <= other.first or other.end <= extent.first
            taken.append(extent)
        else:
            assert memory.largest < step
        covered = sorted(taken)
        edges = [0, *(edge for extent in covered for edge in (extent.first, extent.end)), memory.size]
        assert memory.largest == max(end - start for start, end in zip(edges[::2], edges[1::2], strict=True))
    for extent in taken:
        memory.free(extent)
    assert memory.largest == memory.size == lines * ALIGNMENT


def test_all_of_what_is_largest_can_be_taken() -> None:
    memory = staging(5 * ALIGNMENT)
    first, second = memory.take(1), memory.take(ALIGNMENT + 1)
    assert (first, second) == (Extent(0, ALIGNMENT), Extent(ALIGNMENT, 2 * ALIGNMENT))
    assert memory.take(memory.largest) is not None
    assert memory.largest == 0
    assert memory.take(1) is None


def test_an_extent_is_freed_once() -> None:
    memory = staging(1024)
    extent = memory.take(100)
    assert extent is not None
    memory.free(extent)
    for wrong in (extent, Extent(64, 64)):
        with pytest.raises(BlockError, match="does not hold"):
            memory.free(wrong)


def test_another_buffer_than_the_registered_one_is_refused() -> None:
    with pytest.raises(TransportError, match="register that very buffer"):
        Staging(Registration(1, Memory(4096, 64), b""), bytearray(64))
