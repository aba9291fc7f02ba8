"""What a KV cache depends on besides the prompt, as one readable line that is equal on all engines of one model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_DIGEST_BYTES = 8


def fingerprint(vllm_config: Any) -> str:
    """The model's fingerprint. Both sides compute it from what they hold; unlike ones are refused with both named."""
    model = vllm_config.model_config
    config = model.hf_text_config
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = vllm_config.cache_config.cache_dtype
    heads = f"{model.get_total_num_kv_heads()}x{model.get_head_size()}"
    parts = [
        "+".join(getattr(model.hf_config, "architectures", None) or [type(model.hf_config).__name__]),
        f"weights={weights_id(model.model, model.revision, vllm_config.load_config.load_format)}",
        f"dtype={dtype}",
        f"kv={dtype if cache_dtype == 'auto' else cache_dtype}",
        f"heads={heads}",
        f"layers={config.num_hidden_layers}",
        f"rope={_rope(config)}",
    ]
    if model.quantization:
        parts.append(f"quantization={model.quantization}")
    return " ".join(parts)


def weights_id(model: str, revision: str | None, load_format: Any) -> str:
    """Which weights these are. The same files give the same id under any path and whether or not they have a hub name.

    Samples of every weight file are hashed, and their sizes: enough to tell one fine-tune from another, without reading
    hundreds of gigabytes at every start. Weights that are not on this machine are named by ``model`` and ``revision``.
    """
    if str(getattr(load_format, "value", load_format)) == "dummy":
        return "dummy"
    files = _files(model, revision)
    if not files:
        return f"{model}@{revision or 'main'}"
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            for sample in range(_SAMPLES):
                data.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _files(model: str, revision: str | None) -> list[Path]:
    """The model's weight files on this machine, without asking the network."""
    path = Path(model)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else _snapshot(model, revision)
    return sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)}) if folder else []


def _snapshot(model: str, revision: str | None) -> Path | None:
    """Where the hub's cache has that model, if it has."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # Not a hub name: an object store's address, say.
        return None
    return Path(config).parent if isinstance(config, str) else None


def _rope(config: Any) -> str:
    """Digest of the settings of rotary embeddings, under the names that transformers has had for them."""
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
    settings = {name: getattr(config, name, None) for name in names}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
