"""Layouts read off real tensors: every byte of every block must be where the layout says."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from neuron_pushkv.connector.caches import Shard, describe, storages
from neuron_pushkv.connector.kernels import kernel_name
from neuron_pushkv.device import accelerator_for
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import ROWS, Group, Layout, Region

BLOCKS, HEADS, BLOCK, DIM, LAYERS = 5, 2, 32, 8, 3
ALONE = Shard(0, 1, HEADS)
FULL: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}


def layer(backend: str, isa: str | None = "vec", impl_isa: str | None = None) -> Any:
    return SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
        impl=SimpleNamespace(**({} if impl_isa is None else {"isa": impl_isa})),
        **({} if isa is None else {"isa": isa}),
    )


def config(*groups: tuple[list[str], Any]) -> Any:
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(*group) for group in groups]
    )


def read(caches: dict[str, Any], backend: str = "CPU_ATTN", shard: Shard = ALONE, **spec: Any) -> Layout:
    """The layout of layers in one group of full attention."""
    layers = dict.fromkeys(caches, layer(backend))
    return describe(caches, layers, config((list(caches), FullAttentionSpec(**{**FULL, **spec}))), shard)


def together() -> dict[str, Any]:
    """As vLLM 0.32 on a CPU has it: one storage, a view for each layer."""
    storage = torch.arange(LAYERS * BLOCKS * HEADS * BLOCK * 2 * DIM, dtype=torch.float32)
    layers = storage.view(LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
    return {f"layers.{index}": layers[index] for index in range(LAYERS)}


def bytes_at(region: Region, block: int, head: int = 0, token: int = 0) -> bytes:
    offset = block * region.block_stride + head * region.head_stride + token * region.token_stride
    return ctypes.string_at(region.address + offset, region.row_bytes)


def content(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())


def test_a_cpu_layer_is_a_region_of_blocks_and_heads() -> None:
    caches = together()
    layout = read(caches)
    assert layout.kernel == f"CPU_ATTN/vec/{torch.backends.cpu.get_cpu_capability()}/float32/32"
    assert (layout.blocks, layout.groups, layout.heads) == (BLOCKS, (Group(BLOCK),), HEADS)
    assert [region.name for region in layout.regions] == [f"{name}.kv" for name in caches]
    for region, cache in zip(layout.regions, caches.values(), strict=True):
        assert (region.first_head, region.heads, region.token_stride) == (0, HEADS, 0)
        for block in range(BLOCKS):
            for head in range(HEADS):
                assert bytes_at(region, block, head) == content(cache[block, head])


@pytest.mark.parametrize(
    ("shard", "first"),
    [(Shard(1, 4, 8), 2), (Shard(3, 4, 8), 6), (Shard(0, 8, 16), 0)],
)
def test_each_rank_has_its_heads(shard: Shard, first: int) -> None:
    layout = read(together(), shard=shard)
    assert layout.heads == shard.total
    assert {(region.first_head, region.heads) for region in layout.regions} == {(first, 2)}


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_ranks_beyond_the_heads_have_copies(rank: int, first: int) -> None:
    caches = {"a": torch.zeros(BLOCKS, 1, BLOCK, DIM)}
    layout = read(caches, shard=Shard(rank, 4, 2), num_kv_heads=1)
    (region,) = layout.regions
    assert (layout.heads, region.first_head, region.heads) == (2, first, 1)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "tokens first"])
def test_kernels_that_keep_rows_are_described_row_by_row(axes: tuple[int, ...]) -> None:
    shape = [(BLOCKS, HEADS, BLOCK, 2 * DIM)[axis] for axis in axes]
    cache = torch.arange(BLOCKS * HEADS * BLOCK * 2 * DIM, dtype=torch.float32).view(shape).permute(axes)
    layout = read({"a": cache}, "FLASH_ATTN")
    assert (layout.kernel, layout.heads) == (ROWS, HEADS)
    (region,) = layout.regions
    for block in range(BLOCKS):
        for head in range(HEADS):
            for token in range(BLOCK):
                assert bytes_at(region, block, head, token) == content(cache[block, head, token])


def test_blocks_of_all_layers_may_lie_together() -> None:
    """BLHNC: a layer's blocks are apart by all layers' bytes."""
    storage = torch.arange(BLOCKS * LAYERS * HEADS * BLOCK * DIM, dtype=torch.float32)
    layers = storage.view(BLOCKS, LAYERS, HEADS, BLOCK, DIM)
    caches = {f"layers.{index}": layers[:, index] for index in range(LAYERS)}
    for backend in ("CPU_ATTN", "FLASH_ATTN"):
        layout = read(caches, backend)
        for region, cache in zip(layout.regions, caches.values(), strict=True):
            assert bytes_at(region, 3, 1).startswith(content(cache[3, 1, 0]))
            assert region.block_stride == LAYERS * HEADS * BLOCK * DIM * 4


def test_k_and_v_apart_are_two_regions() -> None:
    cache = torch.arange(2 * BLOCKS * HEADS * BLOCK * DIM, dtype=torch.float32).view(2, BLOCKS, HEADS, BLOCK, DIM)
    layout = read({"a": cache}, "OTHER")
    assert [region.name for region in layout.regions] == ["a.k", "a.v"]
    for region, part in zip(layout.regions, cache, strict=True):
        assert bytes_at(region, 4, 1) == content(part[4, 1])


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((2, BLOCKS, BLOCK, HEADS, DIM), {}),
        ((2, BLOCKS, HEADS, HEADS, DIM), {"block_size": HEADS}),
        ((BLOCKS, 2, BLOCK, HEADS, DIM), {}),
        ((BLOCKS, 2 * HEADS, BLOCK, DIM), {}),
    ],
    ids=["tokens before heads", "as many heads as tokens", "K and V inside", "more slots than heads"],
)
def test_where_heads_cannot_be_told_apart_a_rank_has_one(shape: tuple[int, ...], spec: dict[str, Any]) -> None:
    cache = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    layout = read({"a": cache}, "OTHER", Shard(1, 4, 8), **spec)
    assert layout.heads == 4
    parts = [cache[0], cache[1]] if shape[0] == 2 else [cache]
    for region, part in zip(layout.regions, parts, strict=True):
        assert (region.first_head, region.heads, region.token_stride) == (1, 1, 0)
        assert bytes_at(region, 3) == content(part[3])


def test_blocks_that_the_kernel_splits_are_moved_whole() -> None:
    cache = torch.arange(4 * BLOCKS * HEADS * 8 * DIM, dtype=torch.float32).view(4 * BLOCKS, HEADS, 8, DIM)
    layout = read({"a": cache}, "FLASH_ATTN")
    assert layout.kernel == f"FLASH_ATTN/vec/{torch.backends.cpu.get_cpu_capability()}/float32/8"
    assert layout.heads == 1
    assert bytes_at(layout.regions[0], 2) == content(cache[8:12])


@pytest.mark.parametrize("shape", [(BLOCKS, BLOCK, DIM), (BLOCKS, 1, BLOCK, DIM)])
@pytest.mark.parametrize("backend", ["TRITON_MLA", "OTHER_MLA"])
def test_a_latent_is_the_same_on_every_rank(shape: tuple[int, ...], backend: str) -> None:
    cache = torch.arange(BLOCKS * BLOCK * DIM, dtype=torch.float32).view(shape)
    spec = MLAAttentionSpec(**{**FULL, "num_kv_heads": 1})
    layout = describe({"a": cache}, {"a": layer(backend)}, config((["a"], spec)), Shard(3, 4, 16))
    (region,) = layout.regions
    assert (layout.heads, region.part, region.first_head, region.heads) == (1, "latent", 0, 1)
    if backend == "TRITON_MLA":
        assert layout.kernel == ROWS
        assert bytes_at(region, 2, 0, 7) == content(cache.view(BLOCKS, BLOCK, DIM)[2, 7])
    else:
        assert bytes_at(region, 2) == content(cache[2])


def test_layers_of_several_groups_lie_over_each_other() -> None:
    caches = {"full": torch.zeros(BLOCKS, HEADS, BLOCK, DIM)}
    caches["window"] = caches["full"]
    window = SlidingWindowSpec(**FULL, sliding_window=100)
    layout = describe(
        caches,
        dict.fromkeys(caches, layer("CPU_ATTN")),
        config((["full"], FullAttentionSpec(**FULL)), (["window"], window)),
        ALONE,
    )
    assert layout.groups == (Group(BLOCK), Group(BLOCK, window=100))
    assert [(region.layer, region.group) for region in layout.regions] == [("full", 0), ("window", 1)]


def test_layers_that_read_anothers_cache_are_left_out() -> None:
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, DIM)
    assert [region.layer for region in read({"a": cache, "b": cache}).regions] == ["a"]
    spec = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": FullAttentionSpec(**FULL)})
    layers = dict.fromkeys("ab", layer("CPU_ATTN"))
    layout = describe({"a": cache, "b": cache}, layers, config((["a", "b"], spec)), ALONE)
    assert [region.layer for region in layout.regions] == ["a"]
    with pytest.raises(LayoutError, match="nothing of c's cache"):
        describe({"a": cache, "c": torch.zeros_like(cache)}, layers, config((["a"], spec)), ALONE)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(BLOCKS + 1, HEADS, BLOCK, DIM),
        torch.zeros(BLOCKS - 1, HEADS, BLOCK, DIM),
        torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)[..., :DIM],
    ],
    ids=["too many", "too few", "gaps"],
)
def test_a_cache_that_cannot_be_moved_block_by_block_is_refused(cache: Any) -> None:
    with pytest.raises(LayoutError, match="layout can't be pushed"):
        read({"a": cache})


def test_all_layers_in_one_storage_are_registered_once() -> None:
    caches = together()
    (memory,) = storages(caches, accelerator_for("cpu"))
    layout = read(caches)
    assert memory.address == layout.regions[0].address
    assert memory.length == sum(layout.span(region) for region in layout.regions)


def test_layers_apart_are_registered_apart() -> None:
    caches = {name: torch.zeros(BLOCKS, HEADS, BLOCK, DIM) for name in "ab"}
    assert len(storages(caches, accelerator_for("cpu"))) == 2


def test_a_cpu_layout_is_named_by_kernel_and_instruction_set() -> None:
    """0.32 has it on the layer, earlier versions on its implementation."""
    caches = {"a": torch.zeros(BLOCKS, HEADS, BLOCK, DIM)}
    name = kernel_name(caches, {"a": layer("CPU_ATTN", "vec")})
    assert name == f"CPU_ATTN/vec/{torch.backends.cpu.get_cpu_capability()}/float32"
    assert kernel_name(caches, {"a": layer("CPU_ATTN", None, "vec")}) == name
    assert kernel_name(caches, {"a": layer("CPU_ATTN", "amx")}) != name
    with pytest.raises(LayoutError, match="which CPU kernel serves a"):
        kernel_name(caches, {"a": layer("CPU_ATTN", None)})
    with pytest.raises(LayoutError, match="no attention layer a"):
        kernel_name(caches, {})
