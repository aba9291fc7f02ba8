"""NxD Inference's caches as layouts: every byte where its manager puts it, and into any other cache that keeps rows."""

from __future__ import annotations

import numpy as np
import pytest

from neuron_pushkv.device.neuron.nxd import Order, layout
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import ROWS, Layout
from neuron_pushkv.plan.mapping import check as check_mapping
from tests.layouts import cache

BLOCKS, SIZE, HEADS, DIM = 3, 8, 2, 4
SHAPES = {
    Order.LINES: (BLOCKS, HEADS, SIZE, DIM),
    Order.BLOCKS: (BLOCKS + 1, SIZE, HEADS, DIM),
    Order.CHUNKED_PREFILL: (BLOCKS, HEADS, SIZE, DIM),
}


def made(order: Order, base: int = 1 << 20, **changes: int) -> Layout:
    sizes = {"blocks": BLOCKS, "block_size": SIZE, "heads": HEADS, "row_bytes": 2 * DIM, **changes}
    return layout(order, {"layers.0": (base, base * 2), "layers.1": (base * 3, base * 4)}, **sizes)


@pytest.mark.parametrize("order", SHAPES)
def test_a_row_lies_where_the_tensors_index_says(order: Order) -> None:
    tensor = np.arange(np.prod(SHAPES[order]), dtype=np.uint16).reshape(SHAPES[order])
    described = made(order)
    assert (described.kernel, described.heads, described.blocks) == (ROWS, HEADS, BLOCKS)
    assert [(region.name, region.address) for region in described.regions] == [
        ("layers.0.k", 1 << 20),
        ("layers.0.v", 2 << 20),
        ("layers.1.k", 3 << 20),
        ("layers.1.v", 4 << 20),
    ]
    flat = tensor.tobytes()
    region = described.regions[0]
    for block in range(BLOCKS):
        for head in range(HEADS):
            for token in range(SIZE):
                start = block * region.block_stride + head * region.head_stride + token * region.token_stride
                index = (block, token, head) if order is Order.BLOCKS else (block, head, token)
                assert flat[start : start + region.row_bytes] == tensor[index].tobytes()


def test_a_transposed_k_has_no_rows_and_neither_has_its_v() -> None:
    described = made(Order.LINES_WITH_K_TRANSPOSED, first_head=2, total_heads=8)
    assert described.kernel != ROWS
    assert described.heads == 8
    assert {
        (region.token_stride, region.row_bytes, region.head_stride, region.block_stride, region.first_head)
        for region in described.regions
    } == {(0, SIZE * 2 * DIM, SIZE * 2 * DIM, HEADS * SIZE * 2 * DIM, 2)}


@pytest.mark.parametrize("order", SHAPES)
def test_what_keeps_rows_fits_vllms_caches_and_what_does_not_is_refused(order: Order) -> None:
    vllm = cache(order="LBHNC", heads=HEADS, block_size=4, blocks=6, dim_bytes=2 * DIM).layout
    check_mapping(made(order), vllm)
    check_mapping(vllm, made(order))
    with pytest.raises(LayoutError):
        check_mapping(made(Order.LINES_WITH_K_TRANSPOSED), vllm)


def test_one_head_has_no_stride() -> None:
    assert {region.head_stride for region in made(Order.BLOCKS, heads=1).regions} == {0}
