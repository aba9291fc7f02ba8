"""Network: what an engine posts, what it sends and what it receives, each one thing after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Wire:
    """One direction of one engine's network, or its posting thread. All ranks do their shares at the same time, so one
    rank stands for all.
    """

    free_at: float = 0.0
    busy_seconds: float = 0.0


def occupy(wires: Sequence[Wire], now: float, seconds: float) -> float:
    """Take all for ``seconds`` as soon as all are free, after whatever took them before. When that begins.

    First come, first served: two transfers over one wire take turns and don't share it.
    """
    begin = max(now, *(wire.free_at for wire in wires))
    for wire in wires:
        wire.free_at = begin + seconds
        wire.busy_seconds += seconds
    return begin
