"""Medians with their confidence intervals, by resampling: nothing is assumed of how times are distributed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

RESAMPLES = 4000
CONFIDENCE = 0.95
SEED = 1


@dataclass(frozen=True)
class Figure:
    """A value and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    def row(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def median(samples: Sequence[float]) -> Figure:
    """Of at least one sample; the interval is as wide as few samples make it."""
    return _resampled([samples], lambda drawn: statistics.median(drawn[0]))


def ratio(samples: Sequence[float], others: Sequence[float]) -> Figure:
    """The median of one in terms of the median of the other; samples are not paired."""
    return _resampled([samples, others], lambda drawn: statistics.median(drawn[0]) / statistics.median(drawn[1]))


def mean(samples: Sequence[float]) -> Figure:
    """Of at least one sample."""
    return _resampled([samples], lambda drawn: statistics.fmean(drawn[0]))


def _resampled(groups: list[Sequence[float]], estimate: Callable[[list[Sequence[float]]], float]) -> Figure:
    dice = random.Random(SEED)
    drawn = sorted(estimate([dice.choices(group, k=len(group)) for group in groups]) for _ in range(RESAMPLES))
    rest = (1 - CONFIDENCE) / 2
    low, high = drawn[int(rest * RESAMPLES)], drawn[int((1 - rest) * RESAMPLES) - 1]
    return Figure(estimate(list(groups)), low, high)
