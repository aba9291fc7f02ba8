"""From what happened to figures: percentiles of requests, means over time of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from neuron_pushkv.simulate.requests import PHASES, Request

if TYPE_CHECKING:
    from neuron_pushkv.simulate.model import Trace

SERIES_POINTS = 50


class Level:
    """A number that changes at known times, 0 before the first."""

    def __init__(self) -> None:
        self._times = [0.0]
        self._values = [0.0]

    def set(self, now: float, value: float) -> None:
        """From ``now`` on it is ``value``. ``now`` never goes back."""
        if now == self._times[-1]:
            self._values[-1] = value
        elif value != self._values[-1]:
            self._times.append(now)
            self._values.append(value)

    def add(self, now: float, difference: float) -> None:
        """From ``now`` on it is that much more."""
        self.set(now, self._values[-1] + difference)

    def mean(self, begin: float, end: float) -> float:
        """Over the time between; what it is at ``begin`` if that is ``end``."""
        times, values = np.array(self._times), np.array(self._values)
        if end <= begin:
            return float(self._at(begin))
        inside = (times > begin) & (times < end)
        marks = np.concatenate(([begin], times[inside], [end]))
        levels = np.concatenate(([self._at(begin)], values[inside]))
        return float(np.dot(np.diff(marks), levels) / (end - begin))

    def peak(self, begin: float, end: float) -> float:
        """The most between, both ends included."""
        inside = [value for time, value in zip(self._times, self._values, strict=True) if begin < time <= end]
        return max([self._at(begin), *inside])

    def series(self, begin: float, end: float) -> list[tuple[float, float]]:
        """(time, mean until the next of these times) at :data:`SERIES_POINTS` equal distances."""
        marks = [float(mark) for mark in np.linspace(begin, end, SERIES_POINTS + 1)]
        return [(left, self.mean(left, right)) for left, right in pairwise(marks)]

    def _at(self, time: float) -> float:
        return self._values[max(0, int(np.searchsorted(self._times, time, side="right")) - 1)]


def counted(trace: Trace) -> list[Request]:
    """The requests that the figures are about: all but the warm-up's."""
    return [request for request in trace.requests if request.number >= trace.scenario.warm_up]


def window(trace: Trace) -> tuple[float, float]:
    """Begin and end of the time that means over time are about: from the first arrival after the warm-up to the last
    new one; where that is no time, to the end.
    """
    first_turns = [request.arrived for request in counted(trace) if request.turn == 0]
    begin, end = first_turns[0], first_turns[-1]
    return begin, end if end > begin else max(request.finished for request in trace.requests)


def figures(trace: Trace) -> dict[str, float]:
    """All figures of one replication; names with a dot belong together, times are milliseconds, sizes GB (10^9 bytes).

    KV sizes are those of one rank, and the sum of all engines of that kind.
    """
    requests = counted(trace)
    begin, end = window(trace)
    scenario, table = trace.scenario, trace.table
    tpots = [tpot for request in requests if (tpot := request.tpot) is not None]
    result = {"requests": float(len(requests))}
    result |= _spread("ttft_ms", [request.ttft for request in requests])
    result |= _spread("tpot_ms", tpots)
    result |= _spread("itl_ms", [gap for request in requests for gap in np.diff(request.steps)])
    result |= _spread("e2e_ms", [request.end_to_end for request in requests])
    if scenario.turns > 1:
        last = [request.ttft for request in requests if request.turn == scenario.turns - 1]
        result |= _spread("ttft_last_turn_ms", last)
    phases = [request.phases() for request in requests]
    for name in PHASES:
        times = [phase[name] for phase in phases]
        result[f"phase_ms.{name}"] = float(np.mean(times)) * 1000
    for name in ("prefill queue", "room at D", "slot at D"):
        result |= _spread(f"{name.replace(' ', '_')}_ms", [phase[name] for phase in phases])

    ended = [request for request in trace.requests if begin < request.finished <= end]
    good = [_good(trace, request) for request in requests]
    length = end - begin
    result["throughput.requests_per_second"] = len(ended) / length
    result["throughput.output_tokens_per_second"] = sum(request.output for request in ended) / length
    result["goodput.requests_per_second"] = sum(_good(trace, request) for request in ended) / length
    result["goodput.share"] = sum(good) / len(good)

    def mean_of(levels: Sequence[Level]) -> float:
        return sum(level.mean(begin, end) for level in levels)

    gigabytes = table.kv_bytes_per_token / 1e9
    result["utilisation.prefill"] = mean_of([engine.busy for engine in trace.prefills]) / scenario.prefills
    result["utilisation.decode"] = mean_of([engine.busy for engine in trace.decodes]) / scenario.decodes
    occupied = mean_of([engine.occupied for engine in trace.decodes])
    result["utilisation.decode_slots"] = occupied / (scenario.decodes * scenario.slots)
    # Over the whole run: an engine's wires are booked ahead of time.
    whole = max(request.finished for request in trace.requests)
    wires = [*(engine.out for engine in trace.prefills), *(engine.into for engine in trace.decodes)]
    posters = [*(engine.poster for engine in trace.prefills), *(engine.poster for engine in trace.decodes)]
    result["utilisation.network"] = max(wire.busy_seconds for wire in wires) / whole
    result["utilisation.posting"] = max(poster.busy_seconds for poster in posters) / whole
    result["queue.prefill_waiting"] = mean_of([engine.queue for engine in trace.prefills])
    result["queue.present"] = trace.present.mean(begin, end)
    result["kv_gigabytes.held_at_decode"] = mean_of([engine.held for engine in trace.decodes]) * gigabytes
    result["kv_gigabytes.kept_at_prefill"] = trace.kept.mean(begin, end) * gigabytes
    result["kv_gigabytes.kept_at_prefill_peak"] = trace.kept.peak(begin, end) * gigabytes
    result["kv_gigabytes.parked"] = mean_of([engine.parked for engine in trace.decodes]) * gigabytes
    result["kv_gigabytes.parked_peak_of_one"] = (
        max(engine.parked.peak(begin, end) for engine in trace.decodes) * gigabytes
    )
    result["evicted_conversations"] = float(sum(engine.memory.evicted for engine in trace.decodes))
    return result


def parked_series(trace: Trace) -> list[tuple[float, float]]:
    """(seconds since the begin, GB of one rank) of parked KV at all decode engines over the whole run."""
    end = max(request.finished for request in trace.requests)
    every = [engine.parked.series(0.0, end) for engine in trace.decodes]
    gigabytes = trace.table.kv_bytes_per_token / 1e9
    return [(points[0][0], sum(value for _, value in points) * gigabytes) for points in zip(*every, strict=True)]


def _good(trace: Trace, request: Request) -> bool:
    tpot = request.tpot or 0.0
    return request.ttft * 1000 <= trace.scenario.slo_ttft_ms and tpot * 1000 <= trace.scenario.slo_tpot_ms


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.array(seconds) * 1000
    quantiles = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    spread = {f"{name}.{part}": float(np.quantile(values, share)) for part, share in quantiles.items()}
    return {f"{name}.mean": float(values.mean())} | spread
