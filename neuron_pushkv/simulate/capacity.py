"""How many engines a load and an SLO need, and how much memory conversations take that wait for their next turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from neuron_pushkv.simulate.replication import Result
from neuron_pushkv.simulate.scenario import Scenario, changed
from neuron_pushkv.simulate.tables import ServiceTable

MORE_ENGINES = 6
"""How many engines beyond the fewest imaginable are tried."""
_DRAWS = 500


@dataclass(frozen=True)
class Offered:
    """What a load asks of the engines, on average."""

    prefills: float
    """Prefill engines that it keeps busy."""
    decodes: float
    """Decode engines whose slots it fills, at full batches."""

    @property
    def fewest(self) -> tuple[int, int]:
        """Engines below which the queues grow without end."""
        return max(1, math.floor(self.prefills) + 1), max(1, math.floor(self.decodes) + 1)


def offered(scenario: Scenario, table: ServiceTable) -> Offered:
    """From the lengths alone, nothing simulated. With a return path, P computes what each turn adds."""
    scenario.fits(table)
    random = np.random.default_rng(0)
    prefill = decode = 0.0
    step = table.decode_seconds(scenario.slots)
    for _ in range(_DRAWS):
        history = 0
        for _ in range(scenario.turns):
            prompt = history + scenario.input.draw(random)
            hit = max(int(scenario.prefix_hit * prompt), history if scenario.return_path else 0)
            prefill += table.prefill_seconds(min(hit, prompt - 1), prompt)
            answer = scenario.output.draw(random)
            decode += answer * step / scenario.slots
            history = prompt + answer
    return Offered(scenario.rate * prefill / _DRAWS, scenario.rate * decode / _DRAWS)


@dataclass(frozen=True)
class Tried:
    """One fleet and whether it does."""

    result: Result
    enough: bool
    """The SLO's share of good requests, less its uncertainty, reaches the goal."""


def fleets(
    scenario: Scenario, table: ServiceTable, goal: float, replicate: Callable[[Scenario], Result]
) -> list[Tried]:
    """Fleets of ever more engines until one does, in order; of equally many engines, all. The last ones decide.

    ``goal`` is the share of requests that must be good. ``replicate`` simulates one scenario.
    """
    least_prefills, least_decodes = offered(scenario, table).fewest
    tried: list[Tried] = []
    for more in range(MORE_ENGINES + 1):
        for extra in range(more + 1):
            fleet = changed(scenario, prefills=least_prefills + extra, decodes=least_decodes + more - extra)
            result = replicate(fleet)
            share = result["goodput.share"]
            slack = 0.0 if math.isnan(share.half_width) else share.half_width
            tried.append(Tried(result, share.mean - slack >= goal))
        if any(each.enough for each in tried):
            break
    return tried


def best(tried: list[Tried]) -> Tried | None:
    """Of the fleets that do, that of the most good requests; None if none does."""
    enough = [each for each in tried if each.enough]
    return max(enough, key=lambda each: each.result["goodput.share"].mean) if enough else None


def parked_tokens(scenario: Scenario) -> float:
    """Tokens parked on average over all decode engines, by Little's law: how many turns end a second, times how long
    their KV waits.

    Without eviction. Each turn but the last waits for the user or until its time is up; the last always until then.
    """
    random = np.random.default_rng(0)
    total = 0.0
    waits = min(scenario.think_seconds, scenario.keep_seconds)
    for _ in range(_DRAWS):
        history = 0
        for turn in range(scenario.turns):
            history += scenario.input.draw(random) + scenario.output.draw(random)
            total += history * (scenario.keep_seconds if turn == scenario.turns - 1 else waits)
    return scenario.rate * total / _DRAWS
