"""A tiny random Qwen3, made on the spot: something real that vLLM can serve where no model can be downloaded.

Its words mean nothing, but its output is a sharp test of a KV cache: it depends on the whole prompt, so that one wrong
block shows within 16 greedy tokens (4 to 8 mostly, at 3,000 tokens too). Two things make it so, against the habit of
random models to repeat one token whatever they read: weights wide enough that greedy decoding does not settle (with an
output layer of its own), and query and key norms large enough that attention picks few tokens, instead of averaging a
long prompt into nothing.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from pathlib import Path
from typing import Any

from neuron_pushkv.errors import ConfigError

SEED = 20
VOCABULARY = 512
MAX_TOKENS = 4096
LAYERS = 4
QUERY_HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
HIDDEN = 128
INITIALIZER_RANGE = 0.12
SHARPNESS = 2.0
"""Weight of the query and key norms: scores spread by its square."""

BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 4
"""KV cache of one token in float32: 4096 bytes."""

BEGIN, END, ROLE = "<|begin|>", "<|end|>", "<|role|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}" + ROLE + "{{ message.role }}\n{{ message.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + ROLE + "assistant\n{% endif %}"
)
_STAMP = "pushkv-recipe.txt"


def make(folder: Path) -> Path:
    """Make the model in ``folder``, unless it is there already as today's recipe makes it. Returns ``folder``.

    Appears in one piece or not at all. Raises :class:`ConfigError` if the folder holds something else, or if the
    packages that it takes are absent.
    """
    recipe = _recipe()
    if _stamp(folder) == recipe:
        return folder
    if folder.exists() and _stamp(folder) is None and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds something else than the tiny model; name an empty or a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        fresh = Path(place) / "fresh"
        _write(fresh)
        (fresh / _STAMP).write_text(recipe)
        if folder.exists():
            folder.rename(Path(place) / "old")
        try:
            fresh.rename(folder)
        except OSError:
            if _stamp(folder) != recipe:  # else another process made the same one meanwhile
                raise
    return folder


def words(count: int, seed: int) -> str:
    """``count`` made-up words, the same for the same seed: text for training the tokenizer and for prompts."""
    dice = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    lexicon = ["".join(dice.choices(syllables, k=dice.randint(1, 4))) for _ in range(400)]
    return " ".join(dice.choices(lexicon, k=count))


def _recipe() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _stamp(folder: Path) -> str | None:
    try:
        return (folder / _STAMP).read_text()
    except OSError:
        return None


def _write(folder: Path) -> None:
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise ConfigError(f"the tiny model can't be made ({error}); `make setup` installs what it takes") from error

    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(SHARPNESS)
    folder.mkdir()
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, ROLE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(4000, seed) for seed in range(4)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
    )
