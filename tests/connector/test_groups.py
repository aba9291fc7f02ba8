"""Which KV cache groups are served, and how much a block of them takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from neuron_pushkv.connector import compat
from neuron_pushkv.connector.connector import PushKVConnector
from neuron_pushkv.connector.groups import block_bytes, groups_of
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.layout import Group
from tests.connector.harness import vllm_config

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
PAGE = 2 * 2 * 32 * 32 * 4
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=100)
MAMBA = MambaSpec(block_size=32, shapes=((2, 3),), dtypes=(torch.float32,))


def config(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"{index}.a", f"{index}.b"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_groups_keep_vllms_order() -> None:
    wide = SlidingWindowSpec(**SHAPE, sliding_window=64, extra_retained_tokens=2)
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": FULL})
    assert groups_of(config(WINDOW, FULL, wide, uniform)) == (Group(32, 100), Group(32), Group(32, 66), Group(32))


def test_full_attention_that_only_computes_a_window_keeps_all() -> None:
    assert groups_of(config(FullAttentionSpec(**SHAPE, sliding_window=100))) == (Group(32),)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (MAMBA, "MambaSpec"),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64), "ChunkedLocalAttentionSpec"),
        (SlidingWindowMLASpec(**SHAPE, sliding_window=64, bounded_replay=True), "SlidingWindowMLASpec"),
        (UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": MAMBA}), "MambaSpec"),
    ],
)
def test_another_kind_of_cache_is_refused_at_start_by_its_name(model: Path, spec: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"a KV cache of type {name} can't be pushed"):
        PushKVConnector(vllm_config(model), KVConnectorRole.WORKER, config(FULL, spec))


def test_unlike_windows_in_one_group_are_refused() -> None:
    specs = {"a": WINDOW, "b": SlidingWindowSpec(**SHAPE, sliding_window=50)}
    with pytest.raises(ConfigError, match=r"different windows \(\[50, 100\]\)"):
        groups_of(config(UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)))


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        groups_of(config())


def test_several_groups_need_a_vllm_that_hears_of_failures_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "reports_requests", lambda: False)
    assert groups_of(config(WINDOW)) == (Group(32, 100),)
    with pytest.raises(ConfigError, match=r"2 KV cache groups.* vLLM 0\.30 or later"):
        groups_of(config(FULL, WINDOW))


def test_vllm_need_not_turn_off_its_hybrid_cache_for_us() -> None:
    assert supports_hma(PushKVConnector)


def test_a_block_is_all_layers_of_the_largest_group() -> None:
    assert block_bytes(config(FULL, WINDOW)) == 2 * PAGE
    three = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=dict.fromkeys("abc", FULL))
    assert block_bytes(config(three)) == 3 * PAGE
