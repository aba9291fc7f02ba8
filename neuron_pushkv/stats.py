"""What a worker has done since it was last asked: counts and phase times, flat, so that ranks can be summed."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.effects import Received, Sent

MAX_SAMPLES = 1 << 14
"""Phase times kept between two reads; an engine that never steps doesn't grow without bound."""


class Tally:
    """Counts of one worker. Not thread-safe: its owner holds a lock."""

    def __init__(self, provider: str, library: str) -> None:
        self._about = {"provider": provider, "library": library}
        self._clear()

    def _clear(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._phases: defaultdict[str, list[float]] = defaultdict(list)

    def received(self, effect: Received, size: int) -> None:
        """A delivery to us has ended; ``size`` is in bytes, 0 if it failed."""
        self._ended("in", effect.reason, effect.writes, size, effect.phases)
        self._counts["tokens"]["in"] += effect.tokens

    def sent(self, effect: Sent) -> None:
        """A delivery from us has ended."""
        self._ended("out", effect.reason, effect.writes if effect.reason is None else 0, effect.bytes, effect.phases)

    def event(self, name: str, count: int = 1) -> None:
        """Something that is only counted."""
        self._counts["events"][name] += count

    def refused(self, reason: Reason, count: int = 1) -> None:
        """A connection or frame was refused."""
        self._counts["refusals"][reason] += count

    def take(self) -> dict[str, Any]:
        """All of it, and begin anew; {} if there is nothing."""
        if not self._counts and not self._phases:
            return {}
        taken: dict[str, Any] = {name: dict(counts) for name, counts in self._counts.items()}
        taken["phases"] = dict(self._phases)
        self._clear()
        return {**taken, **self._about}

    def _ended(self, way: str, reason: Reason | None, writes: int, size: int, phases: dict[str, float]) -> None:
        self._counts["transfers"][f"{way}:completed" if reason is None else f"{way}:failed:{reason}"] += 1
        self._counts["writes"][way] += writes
        self._counts["bytes"][way] += size
        for phase, seconds in phases.items():
            samples = self._phases[f"{way}:{phase}"]
            if len(samples) < MAX_SAMPLES:
                samples.append(seconds)
