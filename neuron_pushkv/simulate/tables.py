"""Service times of an engine: a data file with its provenance, interpolated."""

from __future__ import annotations

from bisect import bisect_left
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, PositiveInt, model_validator

from neuron_pushkv.config import Strict, parse
from neuron_pushkv.errors import ConfigError

DEFAULT_TABLE = "h200-tp8-qwen3-32b"
Point = tuple[PositiveInt, Annotated[float, Field(ge=0)]]


class ServiceTable(Strict):
    """How long one engine takes, and what its KV weighs on each of its ranks."""

    name: str
    model: str
    machine: str
    source: str
    """Where the times come from; printed with every result."""
    prefill_ms: tuple[Point, ...] = Field(min_length=2)
    """(prompt tokens, milliseconds) of cold prompts that have the engine to themselves."""
    decode_ms: tuple[Point, ...] = Field(min_length=1)
    """(sequences, milliseconds) of one decode step."""
    kv_bytes_per_token: PositiveInt
    """On one rank."""
    regions: PositiveInt
    """Pieces of memory that hold a block on one rank; each costs a descriptor."""

    @model_validator(mode="after")
    def _ascend(self) -> Self:
        for name in ("prefill_ms", "decode_ms"):
            points = getattr(self, name)
            for before, after in pairwise(points):
                if after[0] <= before[0] or after[1] < before[1]:
                    raise ValueError(
                        f"{name}: {list(after)} must have a larger count than {list(before)} and no less time"
                    )
        return self

    @property
    def step_seconds(self) -> float:
        """What a prefill costs before its first token: the line through the first two points, at length 0."""
        (near, low), (far, high) = self.prefill_ms[:2]
        return max(0.0, low - near * (high - low) / (far - near)) / 1000

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that the table knows."""
        return self.prefill_ms[-1][0]

    @property
    def most_sequences(self) -> int:
        """The largest decode batch that the table knows."""
        return self.decode_ms[-1][0]

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from ``start`` to ``end`` of a prompt whose first ``start`` are cached.

        The difference of two cold prompts, since the rest attends to what is cached as it would to what it had just
        computed, plus the cost of beginning. Linear between the table's points.
        """
        return self.step_seconds + self.chunk_seconds(start, end)

    def chunk_seconds(self, start: int, end: int) -> float:
        """The same without the cost of beginning, so that a prompt's chunks add up to it."""
        return self._cold(end) - self._cold(start)

    def decode_seconds(self, sequences: int) -> float:
        """Seconds of one decode step of so many sequences. Linear between the points, flat below the first."""
        return _between(self.decode_ms, sequences, "sequences in a decode batch", self.name) / 1000

    def _cold(self, tokens: int) -> float:
        points = ((0, self.step_seconds * 1000), *self.prefill_ms)
        return _between(points, tokens, "tokens", self.name) / 1000


def _between(points: tuple[tuple[int, float], ...], at: int, what: str, table: str) -> float:
    """The value at ``at`` on the broken line through ``points``. Raises :class:`ConfigError` beyond its end."""
    if at > points[-1][0]:
        raise ConfigError(
            f"the table {table} ends at {points[-1][0]:,} {what} and can't tell of {at:,}; ask for less, or give a "
            "table that goes further"
        )
    index = bisect_left(points, at, key=lambda point: point[0])
    right, high = points[index]
    if index == 0:
        return high
    left, low = points[index - 1]
    return low + (high - low) * (at - left) / (right - left)


def load_table(name: str) -> ServiceTable:
    """The table of that name in this package, or of that file. Raises :class:`ConfigError` if there is none."""
    own = files("neuron_pushkv.simulate") / "tables" / f"{name}.yaml"
    source = own if own.is_file() else Path(name)
    try:
        values: Any = yaml.safe_load(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"service times {name} can't be read: {error.strerror}; give {DEFAULT_TABLE} or a file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"service times {name} are not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"service times {name} must be `name: value` lines like those of {DEFAULT_TABLE}")
    return parse(ServiceTable, values, name)
