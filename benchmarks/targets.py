"""What is aimed at, and what a run came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row
from benchmarks.work import BLOCK_BYTES, ORDERS, REGIONS

Rows = Sequence[Row]


class Missing(LookupError):
    """The run has no such row."""


@dataclass(frozen=True)
class Target:
    """``measured`` gives a number for a run's rows and raises :class:`Missing` where they don't."""

    text: str
    unit: str
    limit: float
    at_most: bool
    measured: Callable[[Rows], float]


def find(rows: Rows, name: str, engine: str = "", order: str = "") -> Row:
    """The first row whose name begins so, of that engine and order if they are given."""
    for each in rows:
        if each["name"].startswith(name) and engine in ("", each["engine"]) and order in ("", each["order"]):
            return each
    raise Missing(name)


def _rate(order: str, against: str) -> Callable[[Rows], float]:
    def measured(rows: Rows) -> float:
        ours, other = (find(rows, "transfer", engine, order) for engine in ("pushkv", against))
        return float(ours["gb_per_s"] / other["gb_per_s"])

    return measured


def _gil(order: str) -> Callable[[Rows], float]:
    def measured(rows: Rows) -> float:
        held = find(rows, "transfer", "pushkv", order)["gil_ms_p50"]
        if held is None:
            raise Missing("gil_ms_p50")
        return float(held)

    return measured


def _left(order: str) -> Callable[[Rows], float]:
    def measured(rows: Rows) -> float:
        whole = find(rows, "after an unstreamed prefill", order=order)["bytes"]
        left = find(rows, "after a streamed prefill", order=order)["bytes"]
        return float((left - BLOCK_BYTES * REGIONS) / whole * 16)

    return measured


def _added(order: str) -> Callable[[Rows], float]:
    def measured(rows: Rows) -> float:
        streamed = find(rows, "after a streamed prefill", order=order)["seconds_p50"]
        return float(streamed / find(rows, "after an unstreamed prefill", order=order)["seconds_p50"])

    return measured


def _contact(rows: Rows) -> float:
    first = find(rows, "first transfer to a new peer")["seconds_p50"]
    return float(first - find(rows, "next transfer to it")["seconds_p50"]) * 1e3


def _microseconds(name: str) -> Callable[[Rows], float]:
    return lambda rows: float(find(rows, name)["seconds_p50"]) * 1e6


def _step(rows: Rows) -> float:
    return float(find(rows, "arrival to report")["seconds_p50"]) * 1e3


TARGETS = (
    Target("random order: times NIXL's rate", "x", 5, False, _rate("random", "nixl")),
    Target("in order: times NIXL's rate", "x", 1.25, False, _rate("in order", "nixl")),
    *(Target(f"GIL held per transfer, {order}", "ms", 0.5, True, _gil(order)) for order in ORDERS),
    *(Target(f"left when prefill ends, less one block, {order}", "/16", 1, True, _left(order)) for order in ORDERS),
    *(
        Target(f"time after prefill, streamed to unstreamed, {order}", "x", 0.125, True, _added(order))
        for order in ORDERS
    ),
    Target("first transfer to a new peer, longer than the next", "ms", 50, True, _contact),
    *(
        Target(f"{what}, {by}", "us", 20, True, _microseconds(f"{what}, 5000 others unmatched, by {by}"))
        for by in ("transfer id", "content")
        for what in ("a registration pairs with an offer", "an offer pairs with a registration")
    ),
    Target("arrival to report with steps of 20 ms, mean", "ms", 11, True, _step),
)


def show(rows: Rows, console: Console, *, every_target: bool) -> None:
    """Every row, then the targets: all of them, or those that these rows can tell something of."""
    table = Table()
    for heading in (
        "what",
        "engine",
        "provider",
        "order",
        "bytes",
        "writes",
        "p50",
        "p90",
        "GB/s",
        "of memcpy",
        "GIL ms",
    ):
        table.add_column(heading, justify="left" if heading in ("what", "engine", "provider", "order") else "right")
    for each in rows:
        table.add_row(*_cells(each, rows))
    console.print(table)
    table = Table()
    for heading in ("target", "aim", "measured", "met"):
        table.add_column(heading, justify="left" if heading == "target" else "right")
    for target in TARGETS:
        aim = f"{'at most' if target.at_most else 'at least'} {target.limit:g} {target.unit}"
        try:
            value = target.measured(rows)
        except Missing:
            if every_target:
                table.add_row(target.text, aim, "", "not measured")
        else:
            met = value <= target.limit if target.at_most else value >= target.limit
            table.add_row(target.text, aim, f"{value:.3g} {target.unit}", "yes" if met else "no")
    if table.row_count:
        console.print(table)


def _cells(each: Row, rows: Rows) -> list[str]:
    share = ""
    if each["gb_per_s"] is not None:
        try:
            share = f"{each['gb_per_s'] / find(rows, 'transfer', 'memcpy', each['order'])['gb_per_s']:.2f}"
        except Missing:
            share = ""
    return [
        each["name"],
        each["engine"],
        each["provider"],
        each["order"] or "",
        "" if each["bytes"] is None else f"{each['bytes']:,}",
        "" if each["writes"] is None else f"{each['writes']:,}",
        duration(each["seconds_p50"]),
        duration(each["seconds_p90"]),
        "" if each["gb_per_s"] is None else f"{each['gb_per_s']:.2f}",
        share,
        "" if each["gil_ms_p50"] is None else f"{each['gil_ms_p50']:.2f}",
    ]


def duration(seconds: float) -> str:
    """For people."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
