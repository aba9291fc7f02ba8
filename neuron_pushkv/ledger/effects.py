"""What the ledgers want done. The engine carries effects out in order and feeds back what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from neuron_pushkv.errors import Reason
from neuron_pushkv.plan.pair import Move
from neuron_pushkv.wire import Message

Key: TypeAlias = tuple[int, int, int]
"""A delivery as its sender names it: connection, slot, epoch."""


@dataclass(frozen=True)
class Send:
    """Send ``message``; a connection that is gone is told by its end, not by this."""

    connection: int
    message: Message


@dataclass(frozen=True)
class Drop:
    """End the connection and fence the peer, because nothing else makes its memory quiet."""

    connection: int
    reason: Reason
    detail: str


@dataclass(frozen=True)
class Expect:
    """Count arrivals of (slot, epoch) from zero."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class Goal:
    """Tell when ``count`` have arrived."""

    slot: int
    epoch: int
    count: int


@dataclass(frozen=True)
class Forget:
    """The slot is quiet."""

    slot: int


@dataclass(frozen=True)
class Ended:
    """A delivery has ended on one side. ``reason`` is None if it was completed.

    ``started`` is by this process's monotonic clock; ``moments`` are seconds after it, for what was reached.
    """

    request: str
    transfer: str
    traceparent: str
    connection: int
    reason: Reason | None
    detail: str
    tokens: int
    writes: int
    started: float
    moments: dict[str, float]


@dataclass(frozen=True)
class Received(Ended):
    """Tell vLLM, once: the request's KV is there, or it isn't and nothing will touch its blocks. ``connection``: any of
    its senders, -1 if there was none."""


@dataclass(frozen=True)
class Sent(Ended):
    """For metrics. ``request`` is empty where no source was found."""

    bytes: int


@dataclass(frozen=True)
class Write:
    """Start writing; answer with posted, skipped or post_failed. ``track`` is the ledger's own.

    ``layers``: only these; None means all. ``ahead``: the step's other layers follow in a later one. ``heads`` are
    those that the receiver wants of us.
    """

    key: Key
    heads: tuple[int, int]
    track: int
    moves: tuple[Move, ...]
    layers: tuple[str, ...] | None = None
    ahead: bool = False

    @property
    def first(self) -> int:
        """First token of all its moves."""
        return self.moves[0].first

    @property
    def end(self) -> int:
        """One beyond the last."""
        return self.moves[0].end


@dataclass(frozen=True)
class CancelTicket:
    """Post no more of it."""

    ticket: int


@dataclass(frozen=True)
class Freed:
    """Nothing will read that request's kept blocks again. ``asked``: how many of the engine's ranks were asked for them
    where all that asked have got them, otherwise 0."""

    request: str
    asked: int = 0


@dataclass(frozen=True)
class Count:
    """Something worth a metric happened that no one needs to be told about."""

    event: str


Effect: TypeAlias = Send | Drop | Expect | Goal | Forget | Received | Write | CancelTicket | Sent | Freed | Count
