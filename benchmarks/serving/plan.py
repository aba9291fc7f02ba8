"""What a run measures, and in which order."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.serving import conversations, handover, load
from benchmarks.serving.ablation import QUESTIONS, Question
from benchmarks.serving.contestants import CONTESTANTS, Contestant

PARTS = ("handover", "load", "conversations", "ablation")
LATENCY_OBJECTIVES = load.Objective(ttft=4000, tpot=100)
CONVERSATIONS = conversations.Cell(
    conversations=8, turns=4, first_tokens=1024, question_tokens=128, answer_tokens=16, at_once=2
)


@dataclass(frozen=True)
class Visit:
    """One start of a contestant's engines, and what is measured while they run."""

    round: int
    contestant: Contestant
    handovers: tuple[handover.Cell, ...] = ()
    loads: tuple[load.Cell, ...] = ()
    conversations: tuple[conversations.Cell, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Every contestant, and every variant of ours, is visited once a round; each visit starts its engines afresh."""

    contestants: tuple[Contestant, ...]
    questions: tuple[Question, ...]
    rounds: int
    repeats: int
    handovers: tuple[handover.Cell, ...]
    loads: tuple[load.Cell, ...]
    conversations: tuple[conversations.Cell, ...]
    objective: load.Objective = LATENCY_OBJECTIVES

    def visits(self) -> Iterator[Visit]:
        """In one order and then in the other, so that none is always measured on a warmer machine."""
        for number in range(self.rounds):
            one_way = list(self._round(number))
            yield from one_way[:: -1 if number % 2 else 1]

    def _round(self, number: int) -> Iterator[Visit]:
        for each in self.contestants:
            visit = Visit(number, each, self.handovers if each.divided else (), self.loads, self.conversations)
            if visit.handovers or visit.loads or visit.conversations:
                yield visit
        for question in self.questions:
            for value in question.values:
                yield Visit(number, question.contestant(value), (question.cell,))


def plan(given: argparse.Namespace) -> Plan:
    """From the command line. Its ``short`` leaves out what takes longest: long prompts that are computed."""
    cells = [handover.Cell(count, cached) for count, cached in itertools.product(given.tokens, (True, False))]
    if given.short:
        cells = [cell for cell in cells if cell.cached or cell.tokens < 4096]
    loads = [
        load.Cell(dataset, length, count, rate, given.requests)
        for dataset, length, count, rate in itertools.product(given.datasets, given.inputs, given.outputs, given.rates)
    ]
    return Plan(
        tuple(each for each in CONTESTANTS if each.name in given.only),
        QUESTIONS if "ablation" in given.parts else (),
        given.rounds,
        given.repeats,
        tuple(cells) if "handover" in given.parts else (),
        tuple(loads) if "load" in given.parts else (),
        (CONVERSATIONS,) if "conversations" in given.parts else (),
    )
