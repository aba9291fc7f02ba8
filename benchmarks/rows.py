"""What benchmarks write: rows of one form, and the machine that they come from."""

from __future__ import annotations

import os
import platform
import socket
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.native import native

Row: TypeAlias = dict[str, Any]
LOOPBACK = "127.0.0.1"
ROUND_TRIPS = 100_000


def row(
    name: str,
    engine: str,
    provider: str,
    *,
    seconds: Sequence[float],
    order: str | None = None,
    tokens: int | None = None,
    size: int | None = None,
    writes: int | None = None,
    rate: bool = False,
    gil_ms: Sequence[float] = (),
    versions: Mapping[str, str] | None = None,
) -> Row:
    """One row of the JSON file; None where something has no meaning. ``rate``: whether ``size`` took ``seconds``."""
    middle = statistics.median(seconds)
    return {
        "name": name,
        "engine": engine,
        "provider": provider,
        "order": order,
        "tokens": tokens,
        "bytes": size,
        "writes": writes,
        "seconds_p50": middle,
        "seconds_p90": statistics.quantiles(seconds, n=10, method="inclusive")[8],
        "gb_per_s": size / middle / 1e9 if rate and size else None,
        "gil_ms_p50": statistics.median(gil_ms) if gil_ms else None,
        "versions": {"python": platform.python_version(), **(versions or {})},
    }


def core_to_core() -> Row:
    """How long a cache line takes from one CPU to another: virtual ones move, and with them go all other figures."""
    times = [native().lib.core_to_core(ROUND_TRIPS) / 1e9 for _ in range(7)]
    return row("a cache line from core to core", "memory", "loads and stores", size=64, seconds=times)


def machine() -> str:
    """One line: processor, cores, load, kernel."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")), "?")
    load = os.getloadavg()
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, load {load[0]:.1f} (1 min) {load[1]:.1f} (5 min), "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
