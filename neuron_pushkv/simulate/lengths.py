"""How long prompts and answers are, and when they come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from pydantic_core import CoreSchema, core_schema

Arrivals = Literal["poisson", "fixed"]


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, as it is written on a command line.

    ``16384`` is always that; ``uniform:LOW:HIGH`` is each from LOW to HIGH alike; ``lognormal:MEDIAN:SIGMA:HIGH`` is
    log-normal (SIGMA of the logarithm), at least 1 and at most HIGH.
    """

    text: str
    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises :class:`ValueError` with a sentence if ``text`` is none of the three."""
        kind, *rest = text.split(":") if ":" in text else ("always", text)
        try:
            numbers = tuple(float(each) for each in rest)
        except ValueError:
            numbers = ()
        counts = [number for at, number in enumerate(numbers) if (kind, at) != ("lognormal", 1)]
        sound = all(math.isfinite(each) and each > 0 for each in numbers) and all(each == int(each) for each in counts)
        expected = {"always": 1, "uniform": 2, "lognormal": 3}.get(kind)
        if not sound or len(numbers) != expected or counts != sorted(counts):
            raise ValueError(f"{text!r} is no length; write 16384, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:HIGH")
        return cls(text, kind, numbers)

    @property
    def longest(self) -> int:
        """The largest that can come."""
        return int(self.numbers[-1])

    def draw(self, random: np.random.Generator) -> int:
        """One length."""
        if self.kind == "always":
            return int(self.numbers[0])
        if self.kind == "uniform":
            low, high = self.numbers
            return int(random.integers(int(low), int(high), endpoint=True))
        median, sigma, high = self.numbers
        return int(min(max(round(random.lognormal(math.log(median), sigma)), 1), high))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """As a setting: its text, or a number."""

        def validate(value: Any) -> Lengths:
            return value if isinstance(value, Lengths) else cls.read(str(value))

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


def gaps(arrivals: Arrivals, rate: float, count: int, random: np.random.Generator) -> list[float]:
    """Seconds before each of ``count`` arrivals at ``rate`` a second."""
    if arrivals == "fixed":
        return [1 / rate] * count
    return [float(gap) for gap in random.exponential(1 / rate, count)]
