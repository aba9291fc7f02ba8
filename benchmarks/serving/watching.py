"""What decides TTFT and TPOT, read from the engines while a load runs: counts before and after, states in between.

States are sampled five times a second; a reading costs an engine about 2 ms of the core that it has for itself, the
same for every contestant. An engine's gauges are those of its last step.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import httpx

from benchmarks.serving.contestants import DECODE, PREFILL, Engines
from benchmarks.serving.running import Running
from neuron_pushkv.errors import FleetError
from neuron_pushkv.fleet.client import Metrics

SECONDS = 0.2
COUNTED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "transferred_tokens": ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
    "computed_tokens": ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    "cached_tokens": ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
    "queued_seconds": ("vllm:request_queue_time_seconds_sum", {}),
    "preemptions": ("vllm:num_preemptions_total", {}),
    "pushkv_bytes": ("vllm:pushkv_bytes_total", {}),
    "pushkv_writes": ("vllm:pushkv_writes_total", {}),
    "nixl_bytes": ("vllm:nixl_bytes_transferred_sum", {}),
    "nixl_descriptors": ("vllm:nixl_num_descriptors_sum", {}),
}
"""By what they are called here. ``queued_seconds``: from arrival to the first step, summed over requests."""


@dataclass(frozen=True)
class State:
    """One engine at one moment. ``fetching``: requests whose blocks are reserved while their KV is still to come."""

    running: float
    fetching: float
    held_share: float
    parked_bytes: float

    @classmethod
    def of(cls, metrics: Metrics) -> State:
        """As the engine says."""
        return cls(
            metrics.total("vllm:num_requests_running"),
            metrics.total("vllm:num_requests_kv_fetch_by_stage", stage="in_progress"),
            metrics.total("vllm:kv_cache_usage_perc"),
            metrics.total("vllm:pushkv_parked_bytes"),
        )


class Watch:
    """A context manager; :meth:`figures` has what happened inside it. ``tokens``: of a request under this load."""

    def __init__(self, running: Running, engines: Engines, tokens: int) -> None:
        self._running = running
        self._engines = engines
        self._tokens = tokens
        self._before: dict[str, Metrics] = {}
        self._after: dict[str, Metrics] = {}
        self._cpu: Mapping[str, float] = {}
        self._used: dict[str, float] = {}
        self._states: dict[str, list[State]] = {member: [] for member in running.members}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._before = {member: self._running.metrics(member) for member in self._running.members}
        self._cpu = self._running.cpu_seconds()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            self._used = {member: now - self._cpu[member] for member, now in self._running.cpu_seconds().items()}
            self._after = {member: self._running.metrics(member) for member in self._running.members}

    def figures(self) -> dict[str, float]:
        """By name: ``<engine> <what>`` as counted, or the mean over time; ``<member> cpu_seconds``."""
        found = {f"{member} cpu_seconds": seconds for member, seconds in self._used.items()}
        for member in self._running.members:
            counts = counted(self._after[member], self._before[member])
            found |= {f"{member} {what}": value for what, value in counts.items()}
            found |= {
                f"{member} {what}": value
                for what, value in over_time(member, self._states[member], self._engines, self._tokens).items()
            }
        return found

    def _sample(self) -> None:
        with httpx.Client(timeout=10, trust_env=False) as client:
            while not self._ended.wait(SECONDS):
                for member, states in self._states.items():
                    try:
                        states.append(State.of(self._running.metrics(member, client)))
                    except FleetError:
                        continue  # An engine may be gone; the next reading will tell.


def counted(now: Metrics, before: Metrics) -> Mapping[str, float]:
    """What an engine has counted between two readings."""
    return {what: now.total(name, **labels) - before.total(name, **labels) for what, (name, labels) in COUNTED.items()}


def over_time(member: str, states: Sequence[State], engines: Engines, tokens: int) -> dict[str, float]:
    """Means over time. Bytes of KV that requests hold which are not being served are those of decode's that are still
    to be filled, and those that prefill holds beyond its running requests (as if each held all of its prompt)."""
    if not states:
        return {}
    held = [state.held_share * engines.kv_bytes for state in states]
    request = engines.bytes_per_token * tokens
    found = {
        "running": statistics.fmean(state.running for state in states),
        "slots_occupied": statistics.fmean(state.running / engines.sequences for state in states),
        "held_bytes": statistics.fmean(held),
        "held_bytes_most": max(held),
    }
    if member == DECODE:
        waiting = [min(each, state.fetching * request) for each, state in zip(held, states, strict=True)]
        found["waiting_bytes"] = statistics.fmean(waiting)
    if member == PREFILL:
        parked = [max(0.0, each - state.running * request) for each, state in zip(held, states, strict=True)]
        found["parked_bytes"] = statistics.fmean(parked)
        found["parked_bytes_told"] = statistics.fmean(state.parked_bytes for state in states)
    return found
