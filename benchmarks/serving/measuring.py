"""One run of the benchmark, visit by visit, and what it has measured so far."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.rows import Row
from benchmarks.serving import conversations, handover, load, report
from benchmarks.serving.ablation import QUESTIONS
from benchmarks.serving.contestants import Engines
from benchmarks.serving.handover import Sample
from benchmarks.serving.phases import phases
from benchmarks.serving.plan import Plan, Visit
from benchmarks.serving.running import Running
from benchmarks.serving.wearing import wear


class Run:
    """``cores``: prefill's and decode's. ``say``: told what is being done. ``multi_turn``: vLLM's script, if there."""

    def __init__(
        self,
        plan: Plan,
        engines: Engines,
        cores: tuple[int, ...],
        folder: Path,
        say: Callable[[str], None],
        multi_turn: Path | None = None,
    ) -> None:
        self._plan = plan
        self._engines = engines
        self._cores = cores
        self._folder = folder
        self._say = say
        self._multi_turn = multi_turn
        self._handovers: defaultdict[tuple[handover.Cell, str], list[Sample]] = defaultdict(list)
        self._phases: defaultdict[tuple[handover.Cell, str], defaultdict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._loads: defaultdict[tuple[load.Cell, str], list[Mapping[str, float]]] = defaultdict(list)
        self._conversations: defaultdict[tuple[conversations.Cell, str], list[Mapping[str, float]]] = defaultdict(list)
        self.visits: list[dict[str, Any]] = []

    def run(self) -> Iterator[None]:
        """All visits; a turn of the caller's after each."""
        for number, visit in enumerate(self._plan.visits()):
            before = os.getloadavg()[0]
            logs = self._folder / f"{number} {visit.contestant.name}"
            with Running(visit.contestant, self._engines, self._cores, logs) as running:
                self._visit(visit, running)
            self.visits.append(
                {
                    "round": visit.round,
                    "contestant": visit.contestant.name,
                    "before": before,
                    "after": os.getloadavg()[0],
                }
            )
            yield

    def rows(self) -> list[Row]:
        """Everything that was measured, cell by cell."""
        handovers = [
            report.handover_row(name, cell, samples, self._phases[cell, name])
            for (cell, name), samples in sorted(self._handovers.items(), key=lambda item: item[0][0].name)
        ]
        asked = {question.contestant(value).name for question in QUESTIONS for value in question.values}
        rows = [row for row in handovers if row["contestant"] not in asked]
        rows += [
            report.runs_row("load", name, cell.name, runs, input_tokens=cell.input_tokens, rate=cell.rate)
            for (cell, name), runs in self._loads.items()
        ]
        rows += [
            report.runs_row("conversations", name, cell.name, runs)
            for (cell, name), runs in self._conversations.items()
        ]
        return rows + report.ratio_rows(rows) + report.ablation_rows(handovers)

    def _visit(self, visit: Visit, running: Running) -> None:
        contestant = visit.contestant
        cache_tokens = self._engines.kv_bytes // self._engines.bytes_per_token
        if contestant.worn:
            self._say(f"round {visit.round + 1}, {contestant.name}: wearing the block pools")
            wear(running, cache_tokens)
        elif contestant.divided:
            handover.touch(running, cache_tokens)
        for cell in visit.handovers:
            self._say(f"round {visit.round + 1}, {contestant.name}: handover of {cell.name}")
            begun = len(running.log(running.last))
            samples = handover.measure(running, cell, self._plan.repeats, visit.round)
            self._handovers[cell, contestant.name] += samples
            for phase, seconds in phases(running.log(running.last)[begun:], "kv_received").items():
                self._phases[cell, contestant.name][phase] += seconds[-len(samples) :]
        for load_cell in visit.loads:
            self._say(f"round {visit.round + 1}, {contestant.name}: {load_cell.name}")
            self._loads[load_cell, contestant.name].append(
                load.measure(running, load_cell, self._plan.objective, self._engines, visit.round)
            )
        if self._multi_turn is None:
            return
        for talk in visit.conversations:
            self._say(f"round {visit.round + 1}, {contestant.name}: {talk.name}")
            self._conversations[talk, contestant.name].append(
                conversations.measure(running, talk, self._multi_turn, self._engines, visit.round)
            )
