"""The model of the serving benchmark: as much KV for as little arithmetic as vLLM's CPU attention allows.

What decides here is moving KV, so a token's KV must be large beside the work of computing it. Two layers of 16 KV heads
of 256 keep 64 KiB a token in float32 (a third of what Qwen3-32B keeps per token, in 1/300,000 of its parameters): 2,048
tokens are 128 MiB, 8,192 are 512 MiB. Heads as wide as the kernel takes keep the kernel's own overhead small; every KV
head serves one query head, since more of those would only add arithmetic; the rest of the network is as narrow as it
may be. Float32, since a processor without bfloat16 arithmetic takes longer for half the bytes. A decode step still has
to read all KV of its request once, so it grows with the prompt as the transfer does, and is shown beside it.
"""

from __future__ import annotations

from pathlib import Path

from neuron_pushkv import tinymodel

SEED = 5
LAYERS = 2
HEADS = 16
HEAD_SIZE = 256
HIDDEN = 64
MAX_TOKENS = 16384
DTYPE = "float32"
BYTES_PER_TOKEN = LAYERS * HEADS * HEAD_SIZE * 2 * 4


def make(folder: Path) -> Path:
    """Write model and tokenizer to ``folder``, which is created. Returns it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tinymodel.make(folder / "tokenizer"), model_max_length=MAX_TOKENS)
    config = Qwen3Config(
        vocab_size=tinymodel.VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=tinymodel.INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=DTYPE,
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config).float()
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder
