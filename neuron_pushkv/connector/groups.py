"""vLLM's KV cache groups: which kinds of them can be pushed, and how much a block takes."""

from __future__ import annotations

from typing import Any

from neuron_pushkv.connector import compat
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.layout import Group


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """The groups, in vLLM's order. Raises :class:`ConfigError` for a kind of cache that can't be pushed."""
    groups = tuple(
        Group(int(group.kv_cache_spec.block_size), _window(group.kv_cache_spec))
        for group in kv_cache_config.kv_cache_groups
    )
    if not groups:
        raise ConfigError("this model has no KV cache, so there is nothing to push; run it without PushKVConnector")
    if len(groups) > 1 and not compat.reports_requests():
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups, of which this vLLM can't report a failed load; "
            f"use vLLM 0.30 or later, or --disable-hybrid-kv-cache-manager"
        )
    return groups


def layer_specs(group: Any) -> dict[str, Any]:
    """Layer name -> what vLLM says of its cache. Layers that only read another layer's cache may be missing."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(group.layer_names, spec)


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes that one block takes on one rank. Groups lie over each other: a block is all of its group's layers."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    def size(group: Any) -> int:
        page = int(group.kv_cache_spec.page_size_bytes)
        return page if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) else page * len(group.layer_names)

    return max(size(group) for group in kv_cache_config.kv_cache_groups)


def _window(spec: Any) -> int:
    """Tokens of the group's sliding window, 0 where all are kept."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    windows = set()
    for each in specs:
        # DeepSeek's bounded replay keeps less than a window, and computes the rest again.
        if isinstance(each, SlidingWindowSpec) and not getattr(each, "prefix_replay_tokens", 0):
            # Tokens before the window that vLLM keeps for speculative decoding are kept on both sides.
            windows.add(each.sliding_window + getattr(each, "extra_retained_tokens", 0))
        elif isinstance(each, FullAttentionSpec):
            windows.add(0)
        else:
            raise ConfigError(
                f"a KV cache of type {type(each).__name__} can't be pushed: only full attention and sliding windows "
                f"can; run this model without PushKVConnector"
            )
    if len(windows) != 1:
        raise ConfigError(
            f"layers of one KV cache group have different windows ({sorted(windows)}), which can't be pushed"
        )
    return int(windows.pop())
