"""The KV cache that vLLM 0.32 allocates inside our context: where it lies, how long, and what happens when it can't."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from neuron_pushkv.connector.caches import storages
from neuron_pushkv.connector.connector import PushKVConnector
from neuron_pushkv.connector.memory import SlabContext
from neuron_pushkv.device.base import SLAB_ALIGNMENT, Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import DeviceError
from tests.connector.harness import cache_config, vllm_config

BLOCKS, HEADS, BLOCK, DIM, LAYERS = 40, 2, 32, 64, 3
TOTAL = LAYERS * BLOCKS * HEADS * BLOCK * 2 * DIM * 4
CPU = torch.device("cpu")


def allocate() -> dict[str, Any]:
    """By vLLM's own hand."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    names = [f"layers.{index}" for index in range(LAYERS)]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=TOTAL, layers=names, layer_stride=BLOCKS * page, block_stride=page)
    config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )
    return dict(allocate_kv_cache(config, CPU, KVCacheLayout.LBHNC))


class Refusing(HostAccelerator):
    def allocate(self, length: int) -> Memory:
        raise DeviceError(f"no {length} bytes here")


def test_vllms_cache_is_a_slab() -> None:
    accelerator = HostAccelerator()
    context = SlabContext(accelerator)
    with context:
        caches = allocate()
    (memory,) = storages(caches, accelerator)
    assert memory.address % SLAB_ALIGNMENT == 0
    assert memory.length == context.bytes_of([memory]) == TOTAL
    assert context.bytes_of([Memory(memory.address - 100, 150), Memory(memory.address - 100, 100)]) == 50
    assert not any(cache.any() for cache in caches.values())


def test_the_slab_lives_as_long_as_any_tensor_in_it() -> None:
    accelerator = HostAccelerator()
    alive = weakref.ref(accelerator)
    context = SlabContext(accelerator)
    with context:
        caches = allocate()
    layer = caches["layers.1"][7]
    layer.fill_(3.0)
    del accelerator, context, caches
    gc.collect()
    assert alive() is not None
    assert layer.unique().tolist() == [3.0]
    del layer
    gc.collect()
    assert alive() is None, "nobody would ever free the slab"


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((3, 4), {"dtype": torch.int8, "device": CPU}),
        (8, {"dtype": torch.float32, "device": CPU}),
        (8, {"dtype": torch.int8, "device": torch.device("meta")}),
        (8, {"dtype": torch.int8}),
        (8, {"dtype": torch.int8, "device": CPU, "pin_memory": False}),
        (0, {"dtype": torch.int8, "device": CPU}),
    ],
)
def test_other_tensors_are_torchs_own(size: Any, options: dict[str, Any]) -> None:
    context = SlabContext(Refusing())
    with context:
        made = torch.zeros(size, **options)
        assert torch.ones(3, dtype=torch.int8, device=CPU).sum() == 3
    assert made.shape == torch.zeros(size, **options).shape
    assert made.dtype == options["dtype"]
    assert context._slabs == []


def test_without_a_slab_vllm_allocates(caplog: pytest.LogCaptureFixture) -> None:
    context = SlabContext(Refusing())
    with context:
        caches = allocate()
    assert context.bytes_of(storages(caches, HostAccelerator())) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"the KV cache lies in vLLM's own memory and not in slabs: no {TOTAL} bytes here"
    ]


def test_another_way_of_allocating_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with SlabContext(HostAccelerator()):
        torch.zeros((4, 4), device=CPU)
    (record,) = caplog.records
    assert "not known here" in record.getMessage()
    caplog.clear()
    with pytest.raises(RuntimeError, match="vLLM's own"), SlabContext(HostAccelerator()):
        raise RuntimeError("vLLM's own")
    assert not caplog.records


def test_only_a_cpus_cache_is_allocated_here(model: Path) -> None:
    def context(device: str) -> Any:
        config = vllm_config(model)
        config.device_config = DeviceConfig(device)
        return PushKVConnector(config, KVConnectorRole.WORKER, cache_config(8, 32)).get_mem_pool_context()

    assert isinstance(context("cpu"), SlabContext)
    assert context("cuda") is None
