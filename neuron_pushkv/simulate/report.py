"""Simulated figures as tables and JSON. Each says that it is simulated, wherever it stands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from neuron_pushkv.simulate.replication import Estimate, Result
from neuron_pushkv.simulate.requests import PHASES
from neuron_pushkv.simulate.tables import ServiceTable

MARK = "simulated"
BAR = 40
ROWS = (
    *((f"{label} {part}, ms", f"{name}.{part}") for label, name in (
        ("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2EL", "e2e_ms"),
        ("TTFT last turn", "ttft_last_turn_ms"),
    ) for part in ("median", "p90", "p99")),
    ("requests/s", "throughput.requests_per_second"),
    ("output tokens/s", "throughput.output_tokens_per_second"),
    ("goodput, requests/s", "goodput.requests_per_second"),
    ("share within the SLO", "goodput.share"),
    ("P busy", "utilisation.prefill"),
    ("D busy", "utilisation.decode"),
    ("D's slots occupied", "utilisation.decode_slots"),
    ("busiest network direction", "utilisation.network"),
    ("busiest posting thread", "utilisation.posting"),
    ("waiting at P, ms, mean", "prefill_queue_ms.mean"),
    ("waiting for room at D, ms, mean", "room_at_D_ms.mean"),
    ("waiting for a slot at D, ms, mean", "slot_at_D_ms.mean"),
    ("KV held at D, GB a rank", "kv_gigabytes.held_at_decode"),
    ("KV kept at P after prefill, GB a rank", "kv_gigabytes.kept_at_prefill"),
    ("KV parked at D, GB a rank", "kv_gigabytes.parked"),
)  # fmt: skip
SUMMARY = (
    ("TTFT median ms", "ttft_ms.median"),
    ("TTFT p90 ms", "ttft_ms.p90"),
    ("TPOT median ms", "tpot_ms.median"),
    ("within SLO", "goodput.share"),
    ("P busy", "utilisation.prefill"),
    ("slots occupied", "utilisation.decode_slots"),
)
_COLOURS = ("magenta", "blue", "cyan", "yellow", "green", "red", "white")


def shown(estimate: Estimate) -> str:
    """``12.3 ± 0.4``, with as many digits as help."""
    digits = 0 if abs(estimate.mean) >= 100 else 1 if abs(estimate.mean) >= 10 else 3 if abs(estimate.mean) < 1 else 2
    text = f"{estimate.mean:,.{digits}f}"
    return text if math.isnan(estimate.half_width) else f"{text} ± {estimate.half_width:,.{digits}f}"


def headed(title: str, headings: Iterable[str], simulated: Iterable[str]) -> Table:
    """An empty table whose ``simulated`` columns say so, as its title does."""
    table = Table(title=f"{title} ({MARK}, not measured)", title_justify="left", show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    for heading in simulated:
        table.add_column(f"{MARK}\n{heading}", justify="right")
    return table


def details(results: Sequence[Result]) -> Table:
    """All figures, a column for each result, headed by its mode."""
    table = headed("Figures", ("",), (result.scenario.mode for result in results))
    for label, name in ROWS:
        cells = [shown(result[name]) if name in result else "" for result in results]
        if any(cells):
            table.add_row(label, *cells)
    return table


def phases(results: Sequence[Result]) -> Table:
    """Mean TTFT by phase, stacked: one bar for each result, to one scale."""
    longest = max(result["ttft_ms.mean"].mean for result in results)
    table = headed("What TTFT consists of, mean ms", ("phase",), (result.scenario.mode for result in results))
    for name, colour in zip(PHASES, _COLOURS, strict=True):
        cells = [shown(result[f"phase_ms.{name}"]) for result in results]
        table.add_row(f"[{colour}]█[/] {name}", *cells)
    table.add_row("all", *(shown(result["ttft_ms.mean"]) for result in results))
    bars = []
    for result in results:
        parts = ""
        for name, colour in zip(PHASES, _COLOURS, strict=True):
            parts += f"[{colour}]{'█' * round(result[f'phase_ms.{name}'].mean / longest * BAR)}[/]"
        bars.append(parts)
    table.add_section()
    table.caption = "\n".join(f"{result.scenario.mode:>9} {bar}" for result, bar in zip(results, bars, strict=True))
    table.caption_justify = "left"
    return table


def summary(title: str, name: str, results: Sequence[tuple[str, Result]]) -> Table:
    """One row for each result, headed by the value of what was varied, and its mode."""
    table = headed(title, (name, "mode"), (heading for heading, _ in SUMMARY))
    for value, result in results:
        cells = [shown(result[figure]) if figure in result else "" for _, figure in SUMMARY]
        table.add_row(value, result.scenario.mode, *cells)
    return table


def provenance(table: ServiceTable) -> str:
    """Where the service times come from, in one line."""
    return f"service times: {table.name} ({table.model}; {table.machine}) by {table.source}"


def as_json(result: Result) -> dict[str, Any]:
    """One scenario and its figures, nested by their names' dots, each as mean and half a 95 % confidence interval."""
    nested: dict[str, Any] = {}
    for name in result.samples:
        group, _, part = name.partition(".")
        value = estimate_json(result[name])
        if part:
            nested.setdefault(group, {})[part] = value
        else:
            nested[group] = value
    return {
        "scenario": result.scenario.model_dump(mode="json"),
        "seed": result.seed,
        "replications": result.replications,
        MARK: nested,
        f"{MARK}_parked_gigabytes_over_time": [list(point) for point in result.parked],
    }


def estimate_json(estimate: Estimate) -> dict[str, float | None]:
    """A figure; its half width is null if there was one replication only."""
    half_width = None if math.isnan(estimate.half_width) else estimate.half_width
    return {"mean": estimate.mean, "half_width_95": half_width}


def document(table: ServiceTable, question: str, **parts: Any) -> dict[str, Any]:
    """The whole JSON document."""
    about = table.model_dump(mode="json")
    return {
        MARK: True,
        "note": "Nothing in this file was measured.",
        "question": question,
        "service_times": about,
        **parts,
    }
