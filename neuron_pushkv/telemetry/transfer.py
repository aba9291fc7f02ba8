"""One transfer that has ended, as one of its two sides has seen it, and the phases that its time divides into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.effects import Ended

Way: TypeAlias = Literal["in", "out"]

PHASES: Mapping[Way, Mapping[str, tuple[str, str]]] = {
    "in": {
        "connect": ("started", "connected"),
        "register": ("connected", "accepted"),
        "wait": ("accepted", "committed"),
        "transfer": ("committed", "arrived"),
        "report": ("arrived", "seen"),
    },
    "out": {
        "match": ("started", "matched"),
        "ready": ("matched", "first_write"),
        "push": ("first_write", "posted"),
        "drain": ("posted", "last_write"),
        "confirm": ("last_write", "done"),
    },
}
"""Phases of each side in order, with the moments that each lies between. ``started`` is the transfer's own beginning.

They have fixed ends, so that a phase means the same in every transfer: two moments may come in either order (a small
delivery's last write may complete before COMMIT is sent, a quick receiver's DONE before our own completions), and then
the later phase took no time.
"""


@dataclass(frozen=True)
class Transfer:
    """A delivery that has ended. Times are of ``time.monotonic()``, in seconds."""

    way: Way
    request: str
    """vLLM's request id on this side."""
    transfer: str
    """The router's transfer id, "" if there is none."""
    traceparent: str
    """W3C trace context of the request, "" if it has none."""
    peer: str
    """The other engine's id, "" if it was never reached."""
    reason: Reason | None
    """Why it has failed; None if it has not."""
    detail: str
    tokens: int
    writes: int
    bytes: int
    started: float
    """When it was ordered (in), or registered by its receiver (out)."""
    moments: Mapping[str, float]
    """Seconds from ``started`` to each moment that was reached: of ``in`` connected, accepted, committed, arrived (the
    last write was counted) and seen (vLLM's worker took the result); of ``out`` registered (0), matched (the source was
    known), first_write (posted), posted (all is), last_write (completed) and done."""

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """Beginning and end of each phase that has ended, in seconds from ``started``."""
        moments = {"started": 0.0, **self.moments}
        found = {}
        for phase, (begin, end) in PHASES[self.way].items():
            if begin in moments and end in moments:
                found[phase] = (moments[begin], max(moments[begin], moments[end]))
        return found


def transfer_of(way: Way, ended: Ended, peer: str, size: int) -> Transfer:
    """What the ledger has told of. ``peer`` is the other engine's id, ``size`` in bytes."""
    return Transfer(
        way,
        ended.request,
        ended.transfer,
        ended.traceparent,
        peer,
        ended.reason,
        ended.detail,
        ended.tokens,
        ended.writes,
        size,
        ended.started,
        ended.moments,
    )
