"""Rows out of what was measured, and tables out of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row
from benchmarks.serving import figures
from benchmarks.serving.figures import Figure
from benchmarks.serving.handover import Cell, Sample

OURS = "pushkv"
TARGET = 0.5
"""Of each of vLLM's own connectors' handover time."""
SHOWN = ("ttft p50", "ttft p99", "tpot p50", "itl p99", "e2el p50", "output_throughput", "request_goodput")
PARTS = ("handover", "first", "prefill", "step", "gap")


def handover_row(contestant: str, cell: Cell, samples: Sequence[Sample], phases: Mapping[str, Sequence[float]]) -> Row:
    """All times in seconds, with every sample of them."""
    taken = {part: [getattr(sample, part) for sample in samples] for part in PARTS}
    return {
        "name": "handover",
        "contestant": contestant,
        "cell": cell.name,
        "tokens": cell.tokens,
        "cached": cell.cached,
        **{part: figures.median(values).row() for part, values in taken.items()},
        "samples": taken,
        "phases": {phase: figures.median(values).row() for phase, values in phases.items()},
    }


def load_row(contestant: str, cell: str, runs: Sequence[Mapping[str, float]]) -> Row:
    """Mean and interval over runs of what each run measured."""
    return {
        "name": "load",
        "contestant": contestant,
        "cell": cell,
        **{what: figures.mean([run[what] for run in runs]).row() for what in runs[0]},
        "runs": [dict(run) for run in runs],
    }


def ratio_rows(rows: Iterable[Row]) -> list[Row]:
    """Our handover in terms of each other's, cell by cell."""
    handovers = [row for row in rows if row["name"] == "handover"]
    found = []
    for ours in (row for row in handovers if row["contestant"] == OURS):
        for other in handovers:
            if other["cell"] == ours["cell"] and other["contestant"].startswith("nixl"):
                samples = [row["samples"]["handover"] for row in (ours, other)]
                found.append(
                    {
                        "name": "handover ratio",
                        "contestant": OURS,
                        "other": other["contestant"],
                        "cell": ours["cell"],
                        "ratio": figures.ratio(*samples).row(),
                        "target": TARGET,
                    }
                )
    return found


def show(rows: Sequence[Row], console: Console) -> None:
    """Tables of all rows."""
    handovers = [row for row in rows if row["name"] == "handover"]
    if handovers:
        headings = ["handover", "connector", *(f"{part} ms" for part in PARTS)]
        lines = [[row["cell"], row["contestant"], *(_ms(row[part]) for part in PARTS)] for row in handovers]
        _table(console, headings, lines)
    ratios = [row for row in rows if row["name"] == "handover ratio"]
    if ratios:
        lines = [
            [row["cell"], row["other"], _figure(row["ratio"], 2), "yes" if row["ratio"]["value"] <= TARGET else "no"]
            for row in ratios
        ]
        _table(console, ["our handover", "in terms of", "ratio", f"at most {TARGET}"], lines)
    loads = [row for row in rows if row["name"] == "load"]
    if loads:
        lines = [[row["cell"], row["contestant"], *(_figure(row[what], 1) for what in SHOWN)] for row in loads]
        _table(console, ["load", "connector", *SHOWN], lines)


def _table(console: Console, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    table = Table()
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _ms(seconds: Mapping[str, float]) -> str:
    return _figure({name: value * 1e3 for name, value in seconds.items()}, 1)


def _figure(row: Mapping[str, Any], digits: int) -> str:
    figure = Figure(**row)
    return f"{figure.value:.{digits}f} ({figure.low:.{digits}f} to {figure.high:.{digits}f})"
