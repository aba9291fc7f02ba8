"""Statistics on their way from the workers to vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from neuron_pushkv.telemetry import FRACTIONS, GAUGES

_COUNTS = ("transfers", "bytes", "writes", "tokens", "refusals", "events")
_TIMES = ("phases", "durations")
_ABOUT = ("provider", "library")
_BUCKETS = (1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_MIB = 1 << 20


class PushKVStats(KVConnectorStats):
    """One or more of the engine's ``take_stats()`` dicts, added up over ranks and intervals."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to say in vLLM's log, which is all that vLLM asks this for."""
        return not self.reduce()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add ``other`` to this; returns this. Of each rank's gauges the latest stays, so nothing is added up twice."""
        theirs = other.data
        for name in _COUNTS:
            for key, count in theirs.get(name, {}).items():
                ours = self.data.setdefault(name, {})
                ours[key] = ours.get(key, 0) + count
        for name in _TIMES:
            for label, seconds in theirs.get(name, {}).items():
                self.data.setdefault(name, {}).setdefault(label, []).extend(seconds)
        for gauge, values in theirs.get("gauges", {}).items():
            self.data.setdefault("gauges", {}).setdefault(gauge, {}).update(values)
        self.data.update({name: theirs[name] for name in _ABOUT if theirs.get(name)})
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's log line."""
        summary: dict[str, int | float] = {}
        for way, name in (("in", "received"), ("out", "sent")):
            done = failed = 0
            for key, count in self.data.get("transfers", {}).items():
                direction, outcome, _ = _transfer(key)
                done += count if direction == way and outcome == "completed" else 0
                failed += count if direction == way and outcome != "completed" else 0
            if done or failed:
                summary[f"{name}"] = done
                summary[f"{name} failed"] = failed
                summary[f"{name} MiB"] = round(self.data.get("bytes", {}).get(way, 0) / _MIB, 3)
            times = self.data.get("phases", {}).get("in:transfer" if way == "in" else "out:drain", [])
            if times:
                summary[f"{name} mean ms"] = round(1000 * sum(times) / len(times), 3)
        for name in ("refusals", "events"):
            total = sum(self.data.get(name, {}).values())
            if total:
                summary[name] = total
        return summary


class PushKVMetrics(KVConnectorPromMetrics):
    """Metrics ``vllm:pushkv_*``, with vLLM's own labels and these.

    Both sides of a transfer count it, as in and out; with tensor parallelism each rank counts its own part of it.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]

        def count(name: str, text: str, *labels: str) -> Any:
            return counter(name=f"vllm:pushkv_{name}", documentation=text, labelnames=[*labelnames, *labels])

        self._transfers = count(
            "transfers", "Transfers by direction, outcome and, if failed, reason.", "direction", "outcome", "reason"
        )
        self._counters = {
            "bytes": count("bytes", "Bytes of KV moved by completed transfers.", "direction"),
            "writes": count("writes", "One-sided writes of completed transfers.", "direction"),
            "tokens": count("tokens", "Prompt tokens whose KV was moved by completed transfers.", "direction"),
            "refusals": count("refusals", "Connections and messages that were refused.", "reason"),
            "events": count("events", "Rare things worth counting, like hook errors.", "event"),
        }
        self._phases = histogram(
            name="vllm:pushkv_phase_seconds",
            documentation="How long each phase of a transfer took.",
            labelnames=[*labelnames, "direction", "phase"],
            buckets=list(_BUCKETS),
        )
        self._durations = histogram(
            name="vllm:pushkv_transfer_seconds",
            documentation="How long transfers took, from order or registration to their end.",
            labelnames=[*labelnames, "direction", "outcome"],
            buckets=list(_BUCKETS),
        )
        self._gauges = {
            name: gauge(
                name=f"vllm:pushkv_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        self._measured: dict[tuple[int, str], dict[str, float]] = {}
        self._info = gauge(
            name="vllm:pushkv_info",
            documentation="Always 1; the labels say which provider and library are in effect.",
            labelnames=[*labelnames, *_ABOUT],
            multiprocess_mode="mostrecent",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.get("transfers", {}).items():
            self._transfers.labels(*engine, *_transfer(key)).inc(count)
        for name, counter in self._counters.items():
            for label, count in transfer_stats_data.get(name, {}).items():
                counter.labels(*engine, label).inc(count)
        for name, histogram in (("phases", self._phases), ("durations", self._durations)):
            for key, times in transfer_stats_data.get(name, {}).items():
                observed = histogram.labels(*engine, *key.split(":"))
                for seconds in times:
                    observed.observe(seconds)
        for name, values in transfer_stats_data.get("gauges", {}).items():
            # A rank that has nothing new to tell isn't in this interval, and still has what it had.
            ranks = self._measured.setdefault((engine_idx, name), {})
            ranks.update(values)
            value = sum(ranks.values()) / (len(ranks) if name in FRACTIONS else 1)
            self._gauges[name].labels(*engine).set(value)
        if transfer_stats_data.get("provider"):
            about = [transfer_stats_data.get(name, "") for name in _ABOUT]
            self._info.labels(*engine, *about).set(1)


def _transfer(key: str) -> tuple[str, str, str]:
    """Direction, outcome and reason out of a key like ``in:failed:peer_lost``; a completed one has no reason."""
    direction, outcome, reason = (*key.split(":", 2), "")[:3]
    return direction, outcome, reason
