"""Reads the layout of vLLM's KV cache off its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neuron_pushkv.device.base import Accelerator, Memory
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout, Region


def describe(caches: Mapping[str, Any], kernel: str, blocks: int, block_size: int) -> Layout:
    """The layout of ``caches`` (layer name -> tensor): ``blocks`` blocks of ``block_size`` tokens each.

    A layer is one run of blocks, or two where K and V lie apart; layers that share a tensor are listed once. Raises
    :class:`LayoutError` for a cache whose blocks are not contiguous.
    """
    regions: dict[int, Region] = {}
    kernel_blocks = set()
    for layer, tensor in caches.items():
        for name, part in _parts(layer, tensor, blocks):
            ratio, rest = divmod(part.shape[0], blocks)
            if rest or not ratio:
                raise LayoutError(
                    f"{name} has {part.shape[0]} blocks where vLLM has {blocks}; this layout can't be pushed"
                )
            if not part[0].is_contiguous() or part.stride(0) != part[0].numel():
                raise LayoutError(
                    f"the blocks of {name} are not contiguous (shape {tuple(part.shape)}, strides {part.stride()}); "
                    f"this layout can't be pushed"
                )
            kernel_blocks.add(block_size // ratio)
            block_bytes = part.stride(0) * part.element_size() * ratio
            regions.setdefault(part.data_ptr(), Region(name, part.data_ptr(), block_bytes, blocks))
    sizes = "+".join(str(size) for size in sorted(kernel_blocks))
    return Layout(f"{kernel}/{sizes}", block_size, blocks, tuple(regions.values()))


def storages(caches: Mapping[str, Any], accelerator: Accelerator) -> list[Memory]:
    """The memory behind ``caches``, each storage once: vLLM may keep all layers in one allocation."""
    found: dict[int, Memory] = {}
    for tensor in caches.values():
        storage = tensor.untyped_storage()
        found.setdefault(storage.data_ptr(), accelerator.describe(storage.data_ptr(), storage.nbytes()))
    return list(found.values())


def kernel_name(caches: Mapping[str, Any], layers: Mapping[str, Any]) -> str:
    """Names the inner order of a block after the kernels that write it; ``layers`` are vLLM's attention layers.

    On a CPU that order depends on the instruction set that the kernel was chosen for (K is transposed inside a block,
    and packed differently by each of them), so it is part of the name. Raises :class:`LayoutError` where vLLM doesn't
    say.
    """
    names = set()
    for layer, tensor in caches.items():
        if layer not in layers:
            raise LayoutError(
                f"vLLM has no attention layer {layer}, so there is no telling how its blocks are laid out"
            )
        names.add(_kernel(layer, layers[layer], tensor))
    return "+".join(sorted(names))


def _kernel(name: str, layer: Any, tensor: Any) -> str:
    backend = layer.get_attn_backend().get_name()
    element = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu":
        return f"{backend}/{element}"
    import torch

    # 0.32 writes it on the layer, earlier versions on the layer's implementation.
    chosen = getattr(layer, "isa", None) or getattr(layer.impl, "isa", None)
    if chosen is None:
        raise LayoutError(f"vLLM doesn't say which CPU kernel serves {name}; this version of it can't be used on a CPU")
    return f"{backend}/{chosen}/{torch.backends.cpu.get_cpu_capability()}/{element}"


def _parts(layer: str, tensor: Any, blocks: int) -> Sequence[tuple[str, Any]]:
    """K and V apart (leading dimension 2) or together, as (region name, tensor whose first dimension is blocks)."""
    if tensor.ndim >= 5 and tensor.shape[0] == 2 and tensor.shape[1] % blocks == 0:
        return [(f"{layer}.k", tensor[0]), (f"{layer}.v", tensor[1])]
    return [(layer, tensor)]
