"""The tiny model: made once, in one piece, the same every time, and sharp enough to notice one wrong KV block."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv import tinymodel
from neuron_pushkv.errors import ConfigError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BLOCK, ANSWER = 32, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodel.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_same_recipe_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert contents(tinymodel.make(tmp_path / "other")) == contents(folder)


def test_second_time_touches_nothing(folder: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    tinymodel.make(folder)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_another_recipe_replaces_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tinymodel.make(tmp_path / "tiny")
    monkeypatch.setattr(tinymodel, "_recipe", lambda: "tomorrow's")
    tinymodel.make(path)
    stamp = "pushkv-recipe.txt"
    assert contents(path) == {**contents(folder), stamp: b"tomorrow's"}
    assert list(tmp_path.iterdir()) == [path]


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tinymodel, "_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        tinymodel.make(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else than the tiny model"):
        tinymodel.make(tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


def test_tokenizer_round_trip_and_chat(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == tinymodel.VOCABULARY
    text = tinymodel.words(50, seed=1) + " é 漢\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "bada"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|role|>user\nbada<|end|>\n<|role|>assistant\n"


@pytest.mark.parametrize("length", [BLOCK + 1, 200, 1500])
def test_any_wrong_block_changes_the_tokens(model: Any, length: int) -> None:
    cache, last = prefilled(model, length, seed=1)
    foreign, _ = prefilled(model, length, seed=2)
    right = decoded(model, copy.deepcopy(cache), last)
    assert len(set(right)) > 4, "greedy decoding has settled on few tokens"
    blocks = list(range((length - 1) // BLOCK))
    for block in random.Random(length).sample(blocks, min(5, len(blocks))):
        wrong = copy.deepcopy(cache)
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        for layer, other in zip(wrong.layers, foreign.layers, strict=True):
            layer.keys[:, :, part] = other.keys[:, :, part]
            layer.values[:, :, part] = other.values[:, :, part]
        assert decoded(model, wrong, last) != right, f"block {block} of another prompt goes unnoticed"


def prefilled(model: Any, length: int, seed: int) -> tuple[Any, int]:
    """KV of all tokens of a random prompt but the last, and the last."""
    prompt = random.Random(seed).choices(range(3, tinymodel.VOCABULARY), k=length)
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt[:-1]]), use_cache=True).past_key_values, prompt[-1]


def decoded(model: Any, cache: Any, token: int) -> list[int]:
    tokens = []
    with torch.no_grad():
        for _ in range(ANSWER):
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            tokens.append(token)
    return tokens
