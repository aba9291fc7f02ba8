"""What the ledgers want done. The engine carries effects out in order and feeds back what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from neuron_pushkv.errors import Reason
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
class Received:
    """Tell vLLM, once: the request's KV is there (``reason`` None), or it isn't and nothing will touch its blocks."""

    request: str
    reason: Reason | None
    detail: str
    tokens: int
    writes: int
    phases: dict[str, float]
    """Seconds of each phase that was reached."""


@dataclass(frozen=True)
class Write:
    """Start writing ``source`` blocks into the receiver's ``target`` blocks; answer with posted or post_failed."""

    key: Key
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class CancelTicket:
    """Post no more of it."""

    ticket: int


@dataclass(frozen=True)
class Sent:
    """A delivery has ended on the sender's side; for metrics."""

    request: str
    reason: Reason | None
    detail: str
    writes: int
    bytes: int
    phases: dict[str, float]


@dataclass(frozen=True)
class Freed:
    """Nothing will read that request's kept blocks again."""

    request: str


@dataclass(frozen=True)
class Count:
    """Something worth a metric happened that no one needs to be told about."""

    event: str


Effect: TypeAlias = Send | Drop | Expect | Goal | Forget | Received | Write | CancelTicket | Sent | Freed | Count
