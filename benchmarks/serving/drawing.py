"""Tables and plots for the documents, out of the serving benchmark's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.markdown import interval, provenance, table
from benchmarks.rows import Row
from benchmarks.serving.contestants import DECODE, PREFILL, UNDIVIDED
from benchmarks.serving.report import TARGET
from neuron_pushkv.report.plots import Series, bars, lines

NOTE = "median or mean of all rounds, 95 % confidence intervals; CPU engines of this project's own tiny model"


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """By the name of the block that they go to."""
    rows: list[Row] = results["rows"]
    makers: Mapping[str, Callable[[list[Row]], str]] = {
        "handover": _handovers,
        "handover ratio": _ratios,
        "load": _loads,
        "conversations": _conversations,
        "ablation": _ablation,
    }
    about = results["about"]
    found = {"serving: machine": f"{provenance(about)} {_visits(about['visits'])}"}
    for name, maker in makers.items():
        chosen = [row for row in rows if row["name"] == name]
        if chosen:
            found[f"serving: {name}"] = maker(chosen)
    deciding = [row for row in rows if row["name"] in ("load", "conversations")]
    if deciding:
        found["serving: what decides"] = _deciding(deciding)
    versus = [row for row in rows if row["name"] in ("ttft p50 ratio", "tpot p50 ratio")]
    if versus:
        found["serving: no worse"] = _no_worse(versus)
    return found


def plots(results: Mapping[str, Any]) -> dict[str, Figure]:
    """By the name of their file."""
    rows: list[Row] = results["rows"]
    found = {}
    handovers = [row for row in rows if row["name"] == "handover"]
    if handovers:
        cells = list(dict.fromkeys(row["cell"] for row in handovers))
        found["handover"] = bars(
            [cell.replace(", ", "\n") for cell in cells],
            [_bars(name, [_found(handovers, name, cell) for cell in cells]) for name in _names(handovers)],
            title="Handover: TTFT less prefill less a decode step",
            y_label="milliseconds",
            note=NOTE,
        )
    for question in dict.fromkeys(row["question"] for row in rows if row["name"] == "ablation"):
        chosen = [row for row in rows if row["name"] == "ablation" and row["question"] == question]
        series = [_bars(row["variant"], [row]) for row in chosen]
        title = f"Handover with and without {question}"
        found[question] = bars([chosen[0]["cell"]], series, title=title, y_label="milliseconds", note=NOTE)
    loads = [row for row in rows if row["name"] == "load"]
    for dataset in dict.fromkeys(row["cell"].split()[0] for row in loads):
        chosen = [row for row in loads if row["cell"].startswith(dataset)]
        if len({row["rate"] for row in chosen}) > 1:
            found[f"ttft {dataset}"] = _by_rate(chosen, "ttft p50", f"TTFT against load, {dataset.replace('_', ' ')}")
    return found


def _visits(visits: Sequence[Mapping[str, Any]]) -> str:
    busy = [visit["before"] for visit in visits]
    rounds = 1 + max(visit["round"] for visit in visits)
    return f"{rounds} rounds; the machine's load as each visit began: {min(busy):.1f} to {max(busy):.1f}."


def _handovers(rows: list[Row]) -> str:
    headings = [
        "prompt",
        "connector",
        "handover, ms",
        "TTFT, ms",
        "prefill, ms",
        "decode step, ms",
        "gap, ms",
        "writes",
    ]
    return table(
        headings,
        [
            [row["cell"], row["contestant"]]
            + [interval(row[part], 1, 1e3) for part in ("handover", "first", "prefill", "step", "gap")]
            + [f"{row['writes']['value']:,.0f}"]
            for row in rows
        ],
    )


def _ratios(rows: list[Row]) -> str:
    lines_ = [
        [row["cell"], row["other"], interval(row["ratio"], 2), "yes" if row["ratio"]["value"] <= TARGET else "**no**"]
        for row in rows
    ]
    return table(["prompt", "ours in terms of", "handover", f"at most {TARGET}"], lines_)


def _loads(rows: list[Row]) -> str:
    shown = {
        "ttft p50": "TTFT p50, ms",
        "ttft p90": "p90",
        "ttft p99": "p99",
        "tpot p50": "TPOT p50, ms",
        "itl p99": "ITL p99, ms",
        "e2el p50": "E2EL p50, ms",
        "output_throughput": "tokens/s",
        "request_goodput": "good requests/s",
    }
    return table(["load", "connector", *shown.values()], [_line(row, shown) for row in rows])


def _conversations(rows: list[Row]) -> str:
    shown = {
        "ttft of first turns p50": "TTFT of first turns, p50, ms",
        "ttft of later turns p50": "of later turns",
        "ttft p99": "of all, p99",
        "tpot p50": "TPOT p50, ms",
        "e2el p50": "E2EL p50, ms",
    }
    return table(["conversations", "connector", *shown.values()], [_line(row, shown) for row in rows])


def _line(row: Row, shown: Mapping[str, str]) -> list[str]:
    digits = {"request_goodput": 2}
    return [row["cell"], row["contestant"], *(interval(row[what], digits.get(what, 1)) for what in shown)]


def _deciding(rows: list[Row]) -> str:
    headings = ["load", "connector", "moved, MiB", "writes", "D: slots taken", "P: queue, ms/request", "D: queue"]
    headings += ["P: prefix hits", "waiting KV on D, MiB", "KV not running on P, MiB", "CPU s: P", "D", "proxy"]
    return table(headings, [_deciding_line(row) for row in rows])


def _deciding_line(row: Row) -> list[str]:
    undivided = row["contestant"] == UNDIVIDED
    first, last = (UNDIVIDED, UNDIVIDED) if undivided else (PREFILL, DECODE)

    def mean(name: str) -> float:
        return float(row[name]["value"]) if name in row else 0.0

    moved = mean(f"{last} pushkv_bytes") or mean(f"{first} nixl_bytes") + mean(f"{last} nixl_bytes")
    writes = mean(f"{last} pushkv_writes") or mean(f"{first} nixl_descriptors") + mean(f"{last} nixl_descriptors")
    prompt = mean(f"{first} cached_tokens") + mean(f"{first} computed_tokens")
    requests = mean("completed")
    found = [
        f"{moved / 2**20:,.0f}",
        f"{writes:,.0f}",
        f"{mean(f'{last} slots_occupied'):.1%}",
        f"{mean(f'{first} queued_seconds') / requests * 1e3:,.0f}",
        f"{mean(f'{last} queued_seconds') / requests * 1e3:,.0f}",
        f"{mean(f'{first} cached_tokens') / prompt:.0%}" if prompt else "",
        f"{mean(f'{last} waiting_bytes') / 2**20:,.0f}",
        f"{mean(f'{first} parked_bytes') / 2**20:,.0f}",
        f"{mean(f'{first} cpu_seconds'):.1f}",
        f"{mean(f'{last} cpu_seconds'):.1f}",
        f"{mean('proxy cpu_seconds'):.1f}",
    ]
    if undivided:
        found[0] = found[1] = found[4] = found[6] = found[7] = found[9] = ""
    return [row["cell"], row["contestant"], *found]


def _no_worse(rows: list[Row]) -> str:
    """A cell is worse where the whole interval is above 1."""
    lines_ = []
    for row in rows:
        low, high = row["ratio"]["low"], row["ratio"]["high"]
        verdict = "better" if high < 1 else "**worse**" if low > 1 else "as good"
        what = row["name"].split()[0].upper()
        lines_.append([row["cell"], what, row["other"], interval(row["ratio"], 2), verdict])
    return table(["load", "of medians", "ours in terms of", "ratio", ""], lines_, names=3)


def _ablation(rows: list[Row]) -> str:
    base = {row["question"]: row for row in reversed(rows)}
    lines_ = []
    for row in rows:
        first = base[row["question"]]["first"]["value"]
        name, spent = f"{row['question']} ({row['cell']})", f"{row['first']['value'] / first:.2f}"
        times = [interval(row[part], 1, 1e3) for part in ("handover", "first")]
        lines_.append([name, row["variant"], *times, spent, f"{row['writes']['value']:,.0f}"])
    headings = ["mechanism", "variant", "handover, ms", "TTFT, ms", "TTFT to the first variant's", "writes"]
    return table(headings, lines_)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["contestant"] for row in rows))


def _found(rows: Sequence[Row], name: str, cell: str) -> Row | None:
    return next((row for row in rows if (row["contestant"], row["cell"]) == (name, cell)), None)


def _bars(name: str, rows: Sequence[Row | None], part: str = "handover") -> Series:
    def values(which: str) -> list[float]:
        return [row[part][which] * 1e3 if row else math.nan for row in rows]

    return Series(name, range(len(rows)), values("value"), values("low"), values("high"))


def _by_rate(rows: Sequence[Row], what: str, title: str) -> Figure:
    series = []
    for name in _names(rows):
        own = sorted((row for row in rows if row["contestant"] == name), key=lambda row: row["rate"])
        figures = {which: [row[what][which] for row in own] for which in ("value", "low", "high")}
        rates = [row["rate"] for row in own]
        series.append(Series(name, rates, figures["value"], figures["low"], figures["high"]))
    return lines(series, title=title, x_label="requests a second", y_label="TTFT p50, ms", note=NOTE)
