"""Service times between, at and beyond the points of a table."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from neuron_pushkv.errors import ConfigError
from neuron_pushkv.simulate.tables import DEFAULT_TABLE, ServiceTable, load_table


@pytest.fixture(scope="module")
def shipped() -> ServiceTable:
    return load_table(DEFAULT_TABLE)


@pytest.mark.parametrize(
    ("tokens", "milliseconds"),
    [(1024, 24.7), (2048, 42.6), (4096, 83.5), (8192, 164.6), (16384, 346.0), (24576, 555.0)],
)
def test_a_cold_prompt_takes_what_the_source_says(shipped: ServiceTable, tokens: int, milliseconds: float) -> None:
    assert shipped.prefill_seconds(0, tokens) * 1000 == pytest.approx(milliseconds)


@pytest.mark.parametrize(
    ("sequences", "milliseconds"), [(1, 5.37), (4, 5.59), (8, 6.39), (2, 5.37 + 0.22 / 3), (6, 5.99)]
)
def test_a_decode_step_takes_what_the_source_says_and_lies_between(
    shipped: ServiceTable, sequences: int, milliseconds: float
) -> None:
    assert shipped.decode_seconds(sequences) * 1000 == pytest.approx(milliseconds)


def test_provenance_comes_with_it(shipped: ServiceTable) -> None:
    assert "AIConfigurator 0.12" in shipped.source
    assert "H200" in shipped.machine
    assert shipped.kv_bytes_per_token * 16384 == 512 * 1024**2


def test_what_is_cached_is_not_computed_again(shipped: ServiceTable) -> None:
    begin = 24.7 - 17.9  # the line through 1k and 2k at 0
    assert shipped.prefill_seconds(8192, 16384) * 1000 == pytest.approx(346.0 - 164.6 + begin)
    assert shipped.step_seconds * 1000 == pytest.approx(begin)


def test_chunks_add_up_to_the_prompt(shipped: ServiceTable) -> None:
    marks = [0, 100, 2048, 5000, 11_111, 20_000]
    parts = sum(shipped.chunk_seconds(left, right) for left, right in pairwise(marks))
    assert shipped.step_seconds + parts == pytest.approx(shipped.prefill_seconds(0, 20_000))


def test_beyond_its_end_a_table_says_so(shipped: ServiceTable) -> None:
    with pytest.raises(ConfigError, match=r"ends at 24,576 tokens and can't tell of 24,577"):
        shipped.prefill_seconds(0, 24_577)
    with pytest.raises(ConfigError, match="ends at 8 sequences in a decode batch"):
        shipped.decode_seconds(9)


FALLING = """
name: x
model: x
machine: x
source: x
prefill_ms: [[2, 5], [1, 6]]
decode_ms: [[1, 1]]
kv_bytes_per_token: 1
regions: 1
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "can't be read"),
        ("a: [", "are not YAML"),
        ("7", "must be `name: value` lines"),
        ("name: x", "is missing"),
        (FALLING, "larger count"),
    ],
)
def test_a_bad_table_is_one_sentence(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "table.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_table(str(path))
    assert "\n" not in str(caught.value)
