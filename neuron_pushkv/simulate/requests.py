"""One request's way through the fleet, as times."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

PHASES = ("return", "prefill queue", "prefill", "room at D", "transfer", "slot at D", "first step")
"""What TTFT consists of, in this order, gapless."""


@dataclass(eq=False)
class Request:
    """Lengths in tokens, times in seconds since the simulation's begin."""

    number: int
    """Of its conversation, in order of arrival."""
    turn: int
    prompt: int
    output: int
    prefill_hit: int
    """Tokens that P need not compute."""
    decode_hit: int
    """Tokens that D need not be sent."""
    arrived: float
    returned: float = 0.0
    """P has what D gave back: it may be computed now."""
    prefill_begun: float = 0.0
    prefill_ended: float = 0.0
    allocated: float = 0.0
    """D has reserved its blocks, and says so (push), or reads (pull)."""
    landed: float = 0.0
    """All of its KV is at D."""
    joined: float = 0.0
    """It is part of D's batch."""
    first: float = 0.0
    """The first token is there."""
    finished: float = 0.0
    steps: list[float] = field(default_factory=list)
    """When each of its tokens was there."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        return (self.finished - self.first) / (self.output - 1) if self.output > 1 else None

    @property
    def end_to_end(self) -> float:
        """Seconds to the last token."""
        return self.finished - self.arrived

    def phases(self) -> dict[str, float]:
        """Seconds of each of :data:`PHASES`; they add up to TTFT.

        What happens at D while P still computes is hidden behind the prefill and counts as nothing.
        """
        ready = max(self.prefill_ended, self.allocated)
        marks = (
            self.arrived,
            self.returned,
            self.prefill_begun,
            self.prefill_ended,
            ready,
            self.landed,
            self.joined,
            self.first,
        )
        return {name: after - before for name, (before, after) in zip(PHASES, pairwise(marks), strict=True)}
