"""The model's fingerprint: equal for equal models wherever they lie, unlike for anything that changes a KV cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_pushkv.connector.fingerprint import fingerprint, weights_id


def folder(place: Path, weights: bytes = b"w" * 100_000) -> Path:
    place.mkdir()
    (place / "model.safetensors").write_bytes(weights)
    (place / "config.json").write_text("{}")
    return place


def config(model: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {"heads": 8, "head_size": 128, "dtype": "torch.bfloat16", "cache": "auto", "layers": 4}
    values |= {"rope": {"rope_theta": 1e6}, "quantization": None, "format": "auto", "revision": None} | changes
    text = SimpleNamespace(num_hidden_layers=values["layers"], rope_parameters=values["rope"])
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            revision=values["revision"],
            dtype=values["dtype"],
            quantization=values["quantization"],
            hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
            hf_text_config=text,
            get_total_num_kv_heads=lambda: values["heads"],
            get_head_size=lambda: values["head_size"],
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache"]),
        load_config=SimpleNamespace(load_format=values["format"]),
    )


def test_it_reads_like_a_sentence(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    words = fingerprint(config(model)).split()
    assert words[0] == "Qwen3ForCausalLM"
    assert words[2:6] == ["dtype=bfloat16", "kv=bfloat16", "heads=8x128", "layers=4"]


def test_the_same_model_elsewhere_is_the_same(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert fingerprint(config(model)) == fingerprint(config(copy, cache="bfloat16"))


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 4},
        {"head_size": 64},
        {"dtype": "torch.float16"},
        {"cache": "fp8"},
        {"layers": 5},
        {"rope": {"rope_theta": 1e4}},
        {"quantization": "fp8"},
        {"format": "dummy"},
    ],
)
def test_what_changes_a_kv_cache_changes_it(tmp_path: Path, change: dict[str, Any]) -> None:
    model = folder(tmp_path / "m")
    assert fingerprint(config(model)) != fingerprint(config(model, **change))


@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_other_weights_of_the_same_size_are_other_weights(tmp_path: Path, place: int) -> None:
    weights = bytearray(b"w" * 100_000)
    weights[place] = 0
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b", bytes(weights))
    assert weights_id(str(first), None, "auto") != weights_id(str(second), None, "auto")


def test_of_several_files_in_a_folder_only_the_one_that_is_served_counts(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    (model / "small.gguf").write_bytes(b"a")
    (model / "large.gguf").write_bytes(b"b")
    small, large = (weights_id(str(model / f"{name}.gguf"), None, "auto") for name in ("small", "large"))
    assert small != large


def test_an_empty_weight_file_is_no_trouble(tmp_path: Path) -> None:
    assert weights_id(str(folder(tmp_path / "a", b"")), None, "auto")


def test_weights_that_are_not_here_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert weights_id("nobody/nothing", None, "auto") == "nobody/nothing@main"
    assert weights_id("nobody/nothing", "v2", "auto") == "nobody/nothing@v2"
    assert weights_id("s3://bucket/some/model", None, "auto") == "s3://bucket/some/model@main"
