"""Layouts read off real tensors: every byte of every block must be where the layout says."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuron_pushkv.connector.caches import describe, kernel_name, storages
from neuron_pushkv.device import accelerator_for
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout, check_equal

BLOCKS, HEADS, BLOCK, DIM, LAYERS = 5, 2, 32, 8, 3


def together() -> dict[str, Any]:
    """As vLLM 0.32 on a CPU has it: one storage, a view for each layer."""
    storage = torch.zeros(LAYERS * BLOCKS * HEADS * BLOCK * 2 * DIM)
    layers = storage.view(LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
    return {f"layers.{index}": layers[index] for index in range(LAYERS)}


def block_bytes(layout: Layout, region: int, block: int) -> bytes:
    where = layout.regions[region]
    return ctypes.string_at(where.address + block * where.block_bytes, where.block_bytes)


def test_each_layer_is_a_region_of_blocks() -> None:
    caches = together()
    for index, cache in enumerate(caches.values()):
        for block in range(BLOCKS):
            cache[block] = 10 * index + block
    layout = describe(caches, "k", BLOCKS, BLOCK)
    assert (layout.kernel, layout.block_size, layout.blocks) == ("k/32", BLOCK, BLOCKS)
    assert [region.name for region in layout.regions] == list(caches)
    for region in range(LAYERS):
        for block in range(BLOCKS):
            values = torch.frombuffer(bytearray(block_bytes(layout, region, block)), dtype=torch.float32)
            assert values.tolist() == [10 * region + block] * (HEADS * BLOCK * 2 * DIM)


def test_all_layers_in_one_storage_are_registered_once() -> None:
    caches = together()
    (memory,) = storages(caches, accelerator_for("cpu"))
    layout = describe(caches, "k", BLOCKS, BLOCK)
    assert memory.address == layout.regions[0].address
    assert memory.length == sum(region.length for region in layout.regions)


def test_layers_apart_are_registered_apart() -> None:
    caches = {name: torch.zeros(BLOCKS, HEADS, BLOCK, DIM) for name in "ab"}
    assert len(storages(caches, accelerator_for("cpu"))) == 2


def test_k_and_v_apart_are_two_regions() -> None:
    cache = torch.zeros(2, BLOCKS, HEADS, BLOCK, DIM)
    cache[1] = 1
    layout = describe({"a": cache}, "k", BLOCKS, BLOCK)
    assert [region.name for region in layout.regions] == ["a.k", "a.v"]
    assert set(block_bytes(layout, 0, 4)) == {0}
    assert block_bytes(layout, 1, 0) == cache[1, 0].numpy().tobytes()


def test_blocks_that_the_kernel_splits_are_moved_whole() -> None:
    cache = torch.arange(4 * BLOCKS * HEADS * 8 * DIM, dtype=torch.float32).view(4 * BLOCKS, HEADS, 8, DIM)
    layout = describe({"a": cache}, "k", BLOCKS, BLOCK)
    assert layout.kernel == "k/8"
    assert layout.regions[0].blocks == BLOCKS
    assert block_bytes(layout, 0, 2) == cache[8:12].numpy().tobytes()


def test_layers_that_share_a_tensor_are_one_region() -> None:
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, DIM)
    assert len(describe({"a": cache, "b": cache}, "k", BLOCKS, BLOCK).regions) == 1


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(HEADS, BLOCKS, BLOCK, DIM).transpose(0, 1),
        torch.zeros(BLOCKS, 2, HEADS, BLOCK, DIM)[:, 0],
        torch.zeros(BLOCKS + 1, HEADS, BLOCK, DIM),
        torch.zeros(BLOCKS - 1, HEADS, BLOCK, DIM),
    ],
    ids=["heads first", "padded", "too many", "too few"],
)
def test_a_cache_that_cannot_be_moved_block_by_block_is_refused(cache: Any) -> None:
    with pytest.raises(LayoutError, match="layout can't be pushed"):
        describe({"a": cache}, "k", BLOCKS, BLOCK)


def layer(isa: str | None, impl_isa: str | None = None) -> Any:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    there = {} if isa is None else {"isa": isa}
    return SimpleNamespace(
        get_attn_backend=lambda: backend,
        impl=SimpleNamespace(**({} if impl_isa is None else {"isa": impl_isa})),
        **there,
    )


def test_a_cpu_layout_is_named_by_kernel_and_instruction_set() -> None:
    """0.32 has it on the layer, earlier versions on its implementation; unlike ones are refused with both named."""
    caches = {"a": torch.zeros(BLOCKS, HEADS, BLOCK, DIM)}
    name = kernel_name(caches, {"a": layer("vec")})
    assert name == f"CPU_ATTN/vec/{torch.backends.cpu.get_cpu_capability()}/float32"
    assert kernel_name(caches, {"a": layer(None, "vec")}) == name
    with pytest.raises(LayoutError, match="which CPU kernel serves a"):
        kernel_name(caches, {"a": layer(None)})
    with pytest.raises(LayoutError, match="no attention layer a"):
        kernel_name(caches, {})
    ours, theirs = (describe(caches, kernel_name(caches, {"a": layer(isa)}), BLOCKS, BLOCK) for isa in ("vec", "amx"))
    with pytest.raises(LayoutError, match=r"vec.*amx"):
        check_equal(ours, theirs)
    check_equal(ours, ours)
