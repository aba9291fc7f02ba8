"""Reads the layout of vLLM's KV cache off its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_pushkv.connector.groups import groups_of, layer_specs
from neuron_pushkv.connector.kernels import keep_rows, kernel_name, on_neuron
from neuron_pushkv.device.base import Accelerator, Memory
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import ROWS, Layout, Part, Region


@dataclass(frozen=True)
class Shard:
    """One rank's share of the model's KV heads. With more ranks than heads, neighbours hold the same one."""

    rank: int
    ranks: int
    total: int
    """KV heads of the whole model."""

    @property
    def heads(self) -> int:
        """Of this rank."""
        return max(1, self.total // self.ranks)

    @property
    def first(self) -> int:
        """Global number of its first one."""
        return self.rank * self.total // self.ranks


LATENT = Shard(0, 1, 1)
"""Every rank has the same latent, which counts as one head."""


@dataclass(frozen=True)
class _Cache:
    """One part of one layer: a tensor whose first dimension is blocks, or ``ratio`` times as many smaller ones."""

    layer: str
    part: Part
    group: int
    tensor: Any
    ratio: int
    shard: Shard
    known: bool
    """Whether the other dimensions are known to be heads, tokens and content."""

    @property
    def block_stride(self) -> int:
        return self._bytes(self.tensor.stride(0)) * self.ratio

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that has no gaps."""
        return self._bytes(self.tensor[0].numel()) * self.ratio

    def keeps_rows(self) -> bool:
        """Whether each head's tokens are rows of bytes, if the kernel leaves them where the tensor's strides say."""
        return self.known and self.ratio == 1 and bool(self.tensor.stride(3) == 1)

    def keeps_heads_apart(self) -> bool:
        """Whether a block's bytes are one run for each head, whatever the kernel does inside of it."""
        return self.known and self.ratio == 1 and bool(self.tensor[0, 0].is_contiguous())

    def in_rows(self) -> Region:
        token_stride, row = self.tensor.stride(2), self.tensor.shape[3]
        return self._region(self.tensor.stride(1), token_stride, self._bytes(row), self.shard.first, self.shard.heads)

    def in_heads(self) -> Region:
        content = self._bytes(self.tensor[0, 0].numel())
        return self._region(self.tensor.stride(1), 0, content, self.shard.first, self.shard.heads)

    def whole(self) -> Region:
        """All that a rank has of a block as one. Raises :class:`LayoutError` if that has gaps."""
        if not _is_dense(self.tensor[0]) or (self.ratio > 1 and self.block_stride != self.block_bytes):
            raise LayoutError(
                f"the blocks of {self.layer}.{self.part} have gaps (shape {tuple(self.tensor.shape)}, strides "
                f"{self.tensor.stride()}); this layout can't be pushed"
            )
        return self._region(0, 0, self.block_bytes, self.shard.rank, 1)

    def _region(self, head_stride: int, token_stride: int, row_bytes: int, first_head: int, heads: int) -> Region:
        return Region(
            layer=self.layer,
            part=self.part,
            group=self.group,
            address=self.tensor.data_ptr(),
            block_stride=self.block_stride,
            head_stride=self._bytes(head_stride) if heads > 1 else 0,
            token_stride=self._bytes(token_stride),
            row_bytes=row_bytes,
            first_head=first_head,
            heads=heads,
        )

    def _bytes(self, elements: int) -> int:
        return int(elements * self.tensor.element_size())


def describe(
    caches: Mapping[str, Any],
    layers: Mapping[str, Any],
    kv_cache_config: Any,
    shard: Shard,
    *,
    packs_keys: bool = False,
) -> Layout:
    """The layout of ``caches`` (layer name -> tensor, or K and V), of which vLLM's attention ``layers`` say who writes
    them. With ``packs_keys`` the tokens of K are in an order of the kernel's own, although its shape shows rows.

    One region for each part of a layer. Layers that read another layer's cache are left out; layers of different groups
    may lie over each other, since a block belongs to one group at a time. Where kernels keep rows, these are described;
    else what a block has of one head. If even the heads can't be told apart, on any layer, all that a rank has counts
    as one head, so that only engines of one tensor parallel size understand each other.

    Raises :class:`LayoutError` for a cache whose blocks have gaps, and where vLLM doesn't say what a layer is.
    """
    groups, blocks = groups_of(kv_cache_config), int(kv_cache_config.num_blocks)
    found = list(_listed(caches, kv_cache_config, shard))
    heads = 1 if all(cache.part == "latent" for cache in found) else shard.total
    tensors = {cache.layer: cache.tensor for cache in found}
    packed = packs_keys or any(_shows_packing(cache) for cache in caches.values())
    if not packed and all(cache.keeps_rows() for cache in found) and keep_rows(tensors, layers):
        return Layout(ROWS, blocks, groups, tuple(cache.in_rows() for cache in found), heads)
    sizes = sorted({groups[cache.group].block_size // cache.ratio for cache in found})
    kernel = f"{kernel_name(tensors, layers)}{'/packed' if packed else ''}/{'+'.join(map(str, sizes))}"
    if all(cache.keeps_heads_apart() for cache in found):
        return Layout(kernel, blocks, groups, tuple(cache.in_heads() for cache in found), heads)
    return Layout(kernel, blocks, groups, tuple(cache.whole() for cache in found), min(heads, shard.ranks))


def storages(caches: Mapping[str, Any], accelerator: Accelerator) -> list[Memory]:
    """The memory behind ``caches``, each storage once: vLLM may keep all layers in one allocation."""
    found: dict[int, Memory] = {}
    for tensor in (each for cache in caches.values() for each in _tensors(cache)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            found[storage.data_ptr()] = accelerator.describe(storage.data_ptr(), storage.nbytes())
    return list(found.values())


def device_of(caches: Mapping[str, Any]) -> Any:
    """Torch's device that they are on."""
    return _tensors(next(iter(caches.values())))[0].device


def _tensors(cache: Any) -> Sequence[Any]:
    """Most have one for each layer; vllm-neuron's models in PyTorch have one for K and one for V."""
    return cache if isinstance(cache, list | tuple) else (cache,)


def _shows_packing(cache: Any) -> bool:
    """Whether K is vllm-neuron's of two tokens in turns: (blocks, heads, tokens / 2, content, 2)."""
    return isinstance(cache, list | tuple) and cache[0].ndim == 5


def _listed(caches: Mapping[str, Any], kv_cache_config: Any, shard: Shard) -> Iterator[_Cache]:
    """The parts of all layers that have a cache of their own."""
    blocks = int(kv_cache_config.num_blocks)
    specs = {
        layer: (index, spec)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        for layer, spec in layer_specs(group).items()
    }
    addresses = {_tensors(cache)[0].data_ptr() for layer, cache in caches.items() if layer in specs}
    listed: set[tuple[int, int]] = set()
    for layer, tensor in caches.items():
        address = _tensors(tensor)[0].data_ptr()
        if layer not in specs:
            if address not in addresses:
                raise LayoutError(f"vLLM says nothing of {layer}'s cache, so there is no telling what it holds")
            continue
        group, spec = specs[layer]
        if (group, address) in listed:
            continue
        listed.add((group, address))
        for part, where in _parts(tensor, spec, blocks):
            ratio, rest = divmod(where.shape[0], blocks)
            if rest or not ratio:
                raise LayoutError(
                    f"{layer}.{part} has {where.shape[0]} blocks where vLLM has {blocks}; this layout can't be pushed"
                )
            heads = LATENT if part == "latent" else shard
            known = where.ndim == 4 and where.shape[1] == heads.heads == spec.num_kv_heads
            if part in ("k", "v") and not on_neuron(where):
                known &= heads.heads != where.shape[2]  # Some backends have tokens before heads: told by number.
            yield _Cache(layer, part, group, where, ratio, heads, known)


def _parts(tensor: Any, spec: Any, blocks: int) -> list[tuple[Part, Any]]:
    """The tensors of a layer's parts, each with blocks as its first dimension."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    if isinstance(tensor, list | tuple):
        keys, values = tensor
        return [("k", keys.view(values.shape) if _shows_packing(tensor) else keys), ("v", values)]
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return [("latent", tensor.unsqueeze(1) if tensor.ndim == 3 else tensor)]
    if tensor.ndim == 5 and tensor.shape[0] == 2 and tensor.shape[1] % blocks == 0:
        return [("k", tensor[0]), ("v", tensor[1])]
    return [("kv", tensor)]


def _is_dense(tensor: Any) -> bool:
    """Whether it fills its bytes, in whatever order of its dimensions."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return bool(tensor.permute(order).is_contiguous())
