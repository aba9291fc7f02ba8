"""What a run measures, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.serving import handover, load
from benchmarks.serving.contestants import CONTESTANTS, Contestant

LATENCY_OBJECTIVES = load.Objective(ttft=4000, tpot=100)


@dataclass(frozen=True)
class Plan:
    """Every contestant is visited once a round; each visit starts its engines afresh."""

    contestants: tuple[Contestant, ...]
    rounds: int
    repeats: int
    handovers: tuple[handover.Cell, ...]
    loads: tuple[load.Cell, ...]
    objective: load.Objective = LATENCY_OBJECTIVES

    def visits(self) -> Iterator[tuple[int, Contestant]]:
        """In one order and then in the other, so that none is always measured on a warmer machine."""
        for number in range(self.rounds):
            yield from ((number, each) for each in self.contestants[:: -1 if number % 2 else 1])


def plan(
    *,
    only: Sequence[str],
    parts: Sequence[str],
    tokens: Sequence[int],
    short: bool,
    rounds: int,
    repeats: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    rates: Sequence[float],
    datasets: Sequence[str],
    requests: int,
) -> Plan:
    """From what the command line says. ``short`` leaves out what takes longest: long prompts that are computed."""
    cells = [handover.Cell(count, cached) for count, cached in itertools.product(tokens, (True, False))]
    if short:
        cells = [cell for cell in cells if cell.cached or cell.tokens < 4096]
    loads = [
        load.Cell(dataset, length, count, rate, requests)
        for dataset, length, count, rate in itertools.product(datasets, inputs, outputs, rates)
    ]
    return Plan(
        tuple(each for each in CONTESTANTS if each.name in only),
        rounds,
        repeats,
        tuple(cells) if "handover" in parts else (),
        tuple(loads) if "load" in parts else (),
    )
