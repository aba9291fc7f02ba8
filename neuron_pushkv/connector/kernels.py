"""Names the order that bytes have inside a KV cache's blocks after the kernels that write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuron_pushkv.errors import LayoutError

_KEEP_ROWS = frozenset({"FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA", "CPU_MLA"})
"""Attention backends that keep one row of bytes for each head and token, wherever the tensor's strides put it, in a
cache of four dimensions (blocks, heads, tokens, K and V in one row; with MLA a latent). Read in vLLM 0.28 and 0.32,
``v1/attention/backends``."""


_NEURON = "neuron"
"""Torch's device type. vllm-neuron compiles its models as a whole, and vLLM knows no attention layers of theirs. Their
caches have dimensions in the order heads, tokens, content, and keep rows (``neuron_model_runner.py``, 0.24)."""


def on_neuron(tensor: Any) -> bool:
    """Whether vllm-neuron writes it."""
    return bool(tensor.device.type == _NEURON)


def keep_rows(caches: Mapping[str, Any], layers: Mapping[str, Any]) -> bool:
    """Whether all of ``caches`` (layer name -> tensor) are written by kernels that do."""
    return all(on_neuron(tensor) or _backend(name, layers) in _KEEP_ROWS for name, tensor in caches.items())


def kernel_name(caches: Mapping[str, Any], layers: Mapping[str, Any]) -> str:
    """One name for all kernels that write ``caches`` (layer name -> tensor); ``layers`` are vLLM's attention layers.

    On a CPU the order depends on the instruction set that the kernel was chosen for (K is transposed inside a block,
    and packed differently by each of them), so it is part of the name. Raises :class:`LayoutError` where vLLM doesn't
    say.
    """
    return "+".join(sorted({_kernel(name, tensor, layers) for name, tensor in caches.items()}))


def _backend(name: str, layers: Mapping[str, Any]) -> str:
    if name not in layers:
        raise LayoutError(f"vLLM has no attention layer {name}, so there is no telling how its blocks are laid out")
    return str(layers[name].get_attn_backend().get_name())


def _kernel(name: str, tensor: Any, layers: Mapping[str, Any]) -> str:
    element = str(tensor.dtype).removeprefix("torch.")
    if on_neuron(tensor):
        return f"NEURON/{element}"
    backend, layer = _backend(name, layers), layers[name]
    if tensor.device.type != "cpu":
        return f"{backend}/{element}"
    import torch

    # 0.32 writes it on the layer, earlier versions on the layer's implementation.
    chosen = getattr(layer, "isa", None) or getattr(layer.impl, "isa", None)
    if chosen is None:
        raise LayoutError(f"vLLM doesn't say which CPU kernel serves {name}; this version of it can't be used on a CPU")
    return f"{backend}/{chosen}/{torch.backends.cpu.get_cpu_capability()}/{element}"
