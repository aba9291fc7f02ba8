"""What a worker has done since it was last asked: flat and picklable, so that ranks and intervals can be added up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from neuron_pushkv.errors import Reason
from neuron_pushkv.telemetry.transfer import Transfer

MAX_SAMPLES = 1 << 14
"""Times kept per phase between two reads; an engine that never steps doesn't grow without bound."""

Gauge: TypeAlias = Literal[
    "parked_bytes",
    "parked_requests",
    "open_receives",
    "open_sends",
    "bounce_bytes",
    "slab_bytes",
    "staging_bytes",
    "staging_largest_bytes",
    "staging_fragmentation",
]

GAUGES: Mapping[Gauge, str] = {
    "parked_bytes": "Bytes of finished KV that is kept for receivers, on one rank.",
    "parked_requests": "Finished requests whose KV is kept for receivers.",
    "open_receives": "Deliveries to this engine that have not ended.",
    "open_sends": "Deliveries from this engine that have not ended.",
    "bounce_bytes": "Bytes of the staging cache in use, where KV passes through host memory.",
    "slab_bytes": "Bytes of the engine's KV cache that lie in slabs of the connector's.",
    "staging_bytes": "Bytes of the staging buffer in use.",
    "staging_largest_bytes": "Bytes of the longest free run of the staging buffer.",
    "staging_fragmentation": "How much of the staging buffer's free bytes lies outside of their longest run, 0 to 1.",
}
"""What is measured and not counted. Each rank may set each; the engine's value is the sum of its ranks', or the mean
where it is one of :data:`FRACTIONS`."""
FRACTIONS: frozenset[Gauge] = frozenset({"staging_fragmentation"})


class Counts:
    """Counts, times and gauges of one worker. ``rank`` tells its gauges from other ranks'. Not thread-safe."""

    def __init__(self, provider: str, library: str, rank: str) -> None:
        self._about = {"provider": provider, "library": library}
        self._rank = rank
        self._gauges: dict[str, float] = {}
        self._measured = False
        self._clear()

    def _clear(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._times: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._measured = False

    def ended(self, transfer: Transfer, seconds: float) -> None:
        """A transfer has ended, ``seconds`` after it was started. Only what a completed one has moved is counted."""
        way = transfer.way
        if transfer.reason is None:
            self._counts["transfers"][f"{way}:completed"] += 1
            self._counts["writes"][way] += transfer.writes
            self._counts["bytes"][way] += transfer.bytes
            self._counts["tokens"][way] += transfer.tokens
        else:
            self._counts["transfers"][f"{way}:failed:{transfer.reason}"] += 1
        self._sample("durations", f"{way}:{'completed' if transfer.reason is None else 'failed'}", seconds)
        for phase, (begin, end) in transfer.phases.items():
            self._sample("phases", f"{way}:{phase}", end - begin)

    def event(self, name: str, count: int = 1) -> None:
        """Something that is only counted."""
        self._counts["events"][name] += count

    def refused(self, reason: Reason, count: int = 1) -> None:
        """A connection or frame was refused."""
        self._counts["refusals"][reason] += count

    def gauge(self, name: Gauge, value: float) -> None:
        """How much of it there is now."""
        if self._gauges.get(name) != value:
            self._gauges[name] = value
            self._measured = True

    def take(self) -> dict[str, Any]:
        """All of it, and count anew; {} if nothing has happened or changed.

        ``transfers``, ``writes``, ``bytes``, ``tokens``, ``events`` and ``refusals`` map labels to counts, ``phases``
        and ``durations`` labels to lists of seconds, ``gauges`` a name to {rank: value}. Labels are parts joined by
        colons, like ``in:failed:peer_lost``.
        """
        if not (self._counts or self._times or self._measured):
            return {}
        taken: dict[str, Any] = {name: dict(counts) for name, counts in self._counts.items()}
        taken |= {name: dict(samples) for name, samples in self._times.items()}
        if self._gauges:
            taken["gauges"] = {name: {self._rank: value} for name, value in self._gauges.items()}
        self._clear()
        return {**taken, **self._about}

    def _sample(self, name: str, label: str, seconds: float) -> None:
        samples = self._times[name][label]
        if len(samples) < MAX_SAMPLES:
            samples.append(seconds)
