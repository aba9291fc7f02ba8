"""Independent replications, and how sure their mean is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from neuron_pushkv.simulate.measures import figures, parked_series
from neuron_pushkv.simulate.scenario import Scenario
from neuron_pushkv.simulate.tables import ServiceTable

REPLICATIONS = 5
# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom (any table of it); 1.96 beyond would be 4 % short at 31.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean over replications and half the width of its 95 % confidence interval; nan where there is only one."""

    mean: float
    half_width: float

    @property
    def sure(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half_width


@dataclass(frozen=True)
class Result:
    """A scenario and its simulated figures."""

    scenario: Scenario
    table: ServiceTable
    seed: int
    replications: int
    samples: Mapping[str, Sequence[float]]
    """Each figure in each replication."""
    parked: Sequence[tuple[float, float]]
    """Parked KV over the first replication: (seconds, GB of one rank)."""

    def __getitem__(self, name: str) -> Estimate:
        return estimate(self.samples[name])

    def __contains__(self, name: str) -> bool:
        return name in self.samples


def estimate(samples: Sequence[float]) -> Estimate:
    """Of independent samples of one figure."""
    if len(samples) < 2:
        return Estimate(samples[0], math.nan)
    student = _STUDENT[min(len(samples) - 1, len(_STUDENT)) - 1]
    return Estimate(float(np.mean(samples)), float(student * np.std(samples, ddof=1) / math.sqrt(len(samples))))


def replicate(
    scenario: Scenario,
    table: ServiceTable,
    seed: int = 0,
    replications: int = REPLICATIONS,
    finished: Callable[[], None] = lambda: None,
) -> Result:
    """Simulate with seeds ``seed``, ``seed + 1``, ...; scenarios with the same seeds get the same load."""
    from neuron_pushkv.simulate.model import simulate

    every: list[dict[str, float]] = []
    parked: list[tuple[float, float]] = []
    for number in range(replications):
        trace = simulate(scenario, table, seed + number, finished)
        every.append(figures(trace))
        parked = parked or parked_series(trace)
    samples = {name: [each[name] for each in every if name in each] for name in every[0]}
    return Result(scenario, table, seed, replications, samples, parked)


def difference(left: Result, right: Result, name: str) -> Estimate:
    """``left`` less ``right``, load by load: both must have been simulated with the same seeds."""
    return estimate([a - b for a, b in zip(left.samples[name], right.samples[name], strict=True)])
