"""Rows out of what was measured, and tables for the terminal out of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row
from benchmarks.serving import figures
from benchmarks.serving.ablation import QUESTIONS
from benchmarks.serving.figures import Figure
from benchmarks.serving.handover import Cell, Sample

OURS = "pushkv"
TARGET = 0.5
"""Of each of vLLM's own connectors' handover time."""
SHOWN = ("ttft p50", "ttft p99", "tpot p50", "itl p99", "e2el p50", "output_throughput", "request_goodput")
TURNS = ("ttft p50", "ttft of later turns p50", "ttft p99", "tpot p50", "e2el p50")
PARTS = ("handover", "first", "prefill", "step", "gap")
BETTER_IF_LESS = ("ttft p50", "tpot p50")
"""What has to be no worse than anybody else's under load."""


def handover_row(contestant: str, cell: Cell, samples: Sequence[Sample], phases: Mapping[str, Sequence[float]]) -> Row:
    """All times in seconds, with every sample of them."""
    taken = {part: [getattr(sample, part) for sample in samples] for part in (*PARTS, "writes")}
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


def runs_row(name: str, contestant: str, cell: str, runs: Sequence[Mapping[str, float]], **about: Any) -> Row:
    """Mean and interval over runs of what each run measured."""
    return {
        "name": name,
        "contestant": contestant,
        "cell": cell,
        **about,
        **{what: figures.mean([run[what] for run in runs]).row() for what in runs[0]},
        "runs": [dict(run) for run in runs],
    }


def ratio_rows(rows: Iterable[Row]) -> list[Row]:
    """Our handover in terms of each other's, cell by cell, and our TTFT and TPOT under load."""
    rows = list(rows)
    found = []
    for ours, other in _pairs(rows, "handover"):
        samples = [row["samples"]["handover"] for row in (ours, other)]
        found.append({**_versus("handover ratio", ours, other, figures.ratio(*samples)), "target": TARGET})
        samples = [row["samples"]["first"] for row in (ours, other)]
        found.append(_versus("first ratio", ours, other, figures.ratio(*samples)))
    for ours, other in _pairs(rows, "load"):
        for what in BETTER_IF_LESS:
            runs = [[run[what] for run in row["runs"]] for row in (ours, other)]
            found.append(_versus(f"{what} ratio", ours, other, figures.ratio(*runs)))
    return found


def ablation_rows(handovers: Iterable[Row]) -> list[Row]:
    """What each of our variants took, question by question, out of their handovers."""
    found = {(row["contestant"], row["cell"]): row for row in handovers}
    rows = []
    for question in QUESTIONS:
        for value in question.values:
            row = found.get((question.contestant(value).name, question.cell.name))
            if row:
                rows.append({**row, "name": "ablation", "question": question.name, "variant": value})
    return rows


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
            [row["cell"], row["other"], text(row["ratio"], 2), "yes" if row["ratio"]["value"] <= TARGET else "no"]
            for row in ratios
        ]
        _table(console, ["our handover", "in terms of", "ratio", f"at most {TARGET}"], lines)
    for name, shown in (("load", SHOWN), ("conversations", TURNS)):
        runs = [row for row in rows if row["name"] == name]
        if runs:
            lines = [[row["cell"], row["contestant"], *(text(row[what], 1) for what in shown)] for row in runs]
            _table(console, [name, "connector", *shown], lines)
    variants = [row for row in rows if row["name"] == "ablation"]
    if variants:
        lines = [[row["question"], row["variant"], _ms(row["handover"]), _ms(row["first"])] for row in variants]
        _table(console, ["what it buys", "variant", "handover ms", "first ms"], lines)


def text(row: Mapping[str, Any], digits: int) -> str:
    """A figure with its interval."""
    figure = Figure(**row)
    return f"{figure.value:,.{digits}f} ({figure.low:,.{digits}f} to {figure.high:,.{digits}f})"


def _pairs(rows: Sequence[Row], name: str) -> Iterable[tuple[Row, Row]]:
    """Ours and each other's, where both have moved KV in the same cell."""
    chosen = [row for row in rows if row["name"] == name]
    for ours in (row for row in chosen if row["contestant"] == OURS):
        for other in chosen:
            if other["cell"] == ours["cell"] and other["contestant"].startswith("nixl"):
                yield ours, other


def _versus(name: str, ours: Row, other: Row, ratio: Figure) -> Row:
    return {"name": name, "contestant": OURS, "other": other["contestant"], "cell": ours["cell"], "ratio": ratio.row()}


def _table(console: Console, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    table = Table()
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < 2 else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _ms(seconds: Mapping[str, float]) -> str:
    return text({name: value * 1e3 for name, value in seconds.items()}, 1)
