"""Caches as vllm-neuron has them, and ranks as neuronx-distributed does: neither is here, so both are played."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from neuron_pushkv.connector import compat
from neuron_pushkv.connector.caches import Shard, describe, device_of, storages
from neuron_pushkv.connector.ranks import Position, position
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import ROWS, Layout
from neuron_pushkv.plan.mapping import check as check_mapping
from neuron_pushkv.wire import Rank

from .test_caches import bytes_at, content

BLOCKS, HEADS, BLOCK, DIM = 5, 2, 32, 8
STATE = "neuronx_distributed.parallel_layers.parallel_state"


class OnNeuron(torch.Tensor):
    """A tensor that says it is on a Neuron core."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="neuron", index=3)


def raw(element: int, parts: int = 2) -> Any:
    """vllm-neuron's storage of one layer: zeros of int8 on its device; here with numbers in it."""
    storage = torch.arange(parts * BLOCKS * HEADS * BLOCK * DIM * element, dtype=torch.int64).to(torch.int8)
    return storage.as_subclass(OnNeuron)


def together(dtype: Any = torch.bfloat16) -> Any:
    return raw(dtype.itemsize).view(dtype).view(2, BLOCKS, HEADS, BLOCK, DIM)


def apart(dtype: Any = torch.bfloat16, *, packed: bool = False) -> list[Any]:
    keys, values = (raw(dtype.itemsize, 1).view(dtype).view(BLOCKS, HEADS, BLOCK, DIM) for _ in range(2))
    return [keys.view(BLOCKS, HEADS, BLOCK // 2, DIM, 2) if packed else keys, values]


def read(cache: Any, dtype: Any = torch.bfloat16, *, packs_keys: bool = False, heads: int = HEADS) -> Layout:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=DIM, dtype=dtype)
    config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)]
    )
    return describe({"layers.0": cache}, {}, config, Shard(1, 4, 8), packs_keys=packs_keys)


@pytest.mark.parametrize("cache", [together(), apart()], ids=["one storage", "K and V apart"])
def test_a_layer_is_two_regions_of_rows(cache: Any) -> None:
    layout = read(cache)
    assert (layout.kernel, layout.heads, layout.blocks) == (ROWS, 8, BLOCKS)
    assert [region.name for region in layout.regions] == ["layers.0.k", "layers.0.v"]
    for region, part in zip(layout.regions, cache, strict=True):
        assert (region.first_head, region.heads, region.row_bytes) == (2, HEADS, DIM * 2)
        assert bytes_at(region, 3, 1, 5) == content(part[3, 1, 5].as_subclass(torch.Tensor).view(torch.int8))


def test_heads_are_told_from_tokens_by_their_place() -> None:
    """Elsewhere that needs unlike numbers of them; vllm-neuron has one order."""
    spec = FullAttentionSpec(block_size=HEADS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    cache = raw(2)[: 2 * BLOCKS * HEADS * HEADS * DIM * 2].view(torch.bfloat16).view(2, BLOCKS, HEADS, HEADS, DIM)
    assert describe({"a": cache}, {}, config, Shard(1, 4, 8)).kernel == ROWS


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("cache", "packs_keys"),
    [(together(FP8), True), (apart(FP8, packed=True), False), (apart(FP8, packed=True), True)],
    ids=["by the settings", "by its shape", "by both"],
)
def test_a_k_of_two_tokens_in_turns_goes_by_head_into_one_like_it(cache: Any, packs_keys: bool) -> None:
    layout = read(cache, FP8, packs_keys=packs_keys)
    assert layout.kernel == "NEURON/float8_e4m3fn/packed/32"
    for region, part in zip(layout.regions, cache, strict=True):
        assert (region.token_stride, region.row_bytes) == (0, BLOCK * DIM)
        assert bytes_at(region, 4, 1) == content(part[4, 1].as_subclass(torch.Tensor).view(torch.int8))
    check_mapping(layout, read(apart(FP8, packed=True), FP8))
    plain = read(together(FP8), FP8)
    assert plain.kernel == ROWS
    with pytest.raises(LayoutError):
        check_mapping(layout, plain)


@pytest.mark.parametrize(
    ("asked", "kept", "packs"),
    [
        ({"fp8_packed_kv": True}, "fp8", True),
        ({"fp8_packed_kv": True}, "fp8_e4m3", True),
        ({"fp8_packed_kv": True}, "fp8_e5m2", False),
        ({"fp8_packed_kv": True}, "auto", False),
        ({"fp8_packed_kv": False}, "fp8", False),
        ({}, "fp8", False),
        (None, "fp8", False),
    ],
)
def test_whether_k_is_packed_is_in_the_settings(asked: Any, kept: str, packs: bool) -> None:
    additional = {} if asked is None else {"neuron_config": asked}
    settings = SimpleNamespace(additional_config=additional, cache_config=SimpleNamespace(cache_dtype=kept))
    assert compat.packs_keys(settings) is packs


def test_the_storages_of_k_and_v_are_registered_each() -> None:
    cache = apart()
    found = storages({"layers.0": cache}, HostAccelerator())
    assert [memory.address for memory in found] == [tensor.data_ptr() for tensor in cache]
    assert device_of({"layers.0": cache}).type == device_of({"layers.0": together()}).type == "neuron"


def config() -> Any:
    parallel = SimpleNamespace(data_parallel_index=3, pipeline_parallel_size=2, tensor_parallel_size=8)
    return SimpleNamespace(parallel_config=parallel)


def state(*, initialised: bool = True, replicas: int = 1) -> Any:
    return SimpleNamespace(
        model_parallel_is_initialized=lambda: initialised,
        get_data_parallel_size=lambda: replicas,
        get_data_parallel_rank=lambda: 1,
        get_pipeline_model_parallel_rank=lambda: 0,
        get_pipeline_model_parallel_size=lambda: 1,
        get_tensor_model_parallel_rank=lambda: 5,
        get_tensor_model_parallel_size=lambda: 32,
    )


@pytest.mark.parametrize(("replicas", "replica"), [(1, 3), (2, 1)])
def test_ranks_are_those_of_the_library_that_shards_the_model(
    monkeypatch: pytest.MonkeyPatch, replicas: int, replica: int
) -> None:
    monkeypatch.setitem(sys.modules, STATE, state(replicas=replicas))
    assert position(config()) == Position(Rank(replica, 0, 5), 1, 32)


@pytest.mark.parametrize("loaded", [False, True])
def test_ranks_are_vllms_where_that_library_shards_nothing(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    if loaded:
        monkeypatch.setitem(sys.modules, STATE, state(initialised=False))
    groups = "vllm.distributed.parallel_state"
    monkeypatch.setattr(f"{groups}.get_pp_group", lambda: SimpleNamespace(rank_in_group=1))
    monkeypatch.setattr(f"{groups}.get_tp_group", lambda: SimpleNamespace(rank_in_group=7))
    assert position(config()) == Position(Rank(3, 1, 7), 2, 8)
