"""A tiny random model whose layers take turns with a sliding window and with full attention.

Made like :mod:`neuron_pushkv.tinymodel`'s, from which it has its tokenizer, its sizes and what makes its output depend
on the whole prompt. vLLM gives it two KV cache groups of two layers.
"""

from __future__ import annotations

from pathlib import Path

from neuron_pushkv import tinymodel

WINDOW = 100
"""Tokens; no multiple of a block's."""
KINDS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
GROUP_BYTES = tinymodel.BYTES_PER_TOKEN // 2
"""KV cache of one token in the two layers of a group."""


def make(folder: Path) -> Path:
    """Make the model in ``folder``, which must not exist. Returns ``folder``."""
    import torch
    from safetensors.torch import save_file
    from transformers import Exaone4Config, Exaone4ForCausalLM

    tokenizer = tinymodel._tokenizer()
    config = Exaone4Config(
        vocab_size=tinymodel.VOCABULARY,
        hidden_size=tinymodel.HIDDEN,
        intermediate_size=2 * tinymodel.HIDDEN,
        num_hidden_layers=len(KINDS),
        num_attention_heads=tinymodel.QUERY_HEADS,
        num_key_value_heads=tinymodel.KV_HEADS,
        head_dim=tinymodel.HEAD_SIZE,
        max_position_embeddings=tinymodel.MAX_TOKENS,
        initializer_range=tinymodel.INITIALIZER_RANGE,
        sliding_window=WINDOW,
        layer_types=list(KINDS),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tinymodel.SEED)
        model = Exaone4ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(tinymodel.SHARPNESS)
    folder.mkdir(parents=True)
    config.architectures = ["Exaone4ForCausalLM"]
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder
