"""One receiver's registration, as its sender sees it.

INTENDED while the receiver has no blocks yet, and only wants the KV kept; PENDING while there is no source for it;
PUSHING while blocks are still to come or tickets are open; WRITTEN when all bytes are in place and only the receiver's
DONE is missing; STOPPING when it has failed or been cancelled with tickets open; ORPHANED when its receiver is gone
with tickets open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.effects import CancelTicket, Effect, Key, Send, Sent
from neuron_pushkv.ledger.registration import Receiver
from neuron_pushkv.ledger.sources import Source
from neuron_pushkv.ledger.tracks import Track
from neuron_pushkv.wire import Cancelled, Commit, Fail, Intent, Progress, Register


class State(Enum):
    """See the module's text."""

    INTENDED = auto()
    PENDING = auto()
    PUSHING = auto()
    WRITTEN = auto()
    STOPPING = auto()
    ORPHANED = auto()


@dataclass(frozen=True)
class Push:
    """One ticket: on which track and at which token it began."""

    track: Track
    first: int
    writes: int
    bytes: int


@dataclass
class Delivery:
    """``steps`` is the engine's step count at the registration. ``key`` is how the receiver names it.

    ``wish`` is what the receiver has sent; what only a registration has is None or empty before it.
    """

    key: Key
    wish: Intent | Register
    since: float
    deadline: float
    steps: int
    state: State
    receiver: Receiver | None = None
    tracks: tuple[Track, ...] = ()
    said: tuple[str, int] = ("unknown", 0)
    source: Source | None = None
    tickets: dict[int, Push] = field(default_factory=dict)
    posted_at: float = 0.0
    written: int = 0
    in_doubt: int = 0
    bytes: int = 0
    committed: int = 0
    """Writes that COMMIT announced; 0 before it."""
    rewinding: bool = False
    """The sender's engine takes the blocks back: what is not written will be pushed again from others."""
    cancelled: bool = False
    done: bool = False
    """The receiver has counted everything, before our own completions have come."""
    reason: Reason = Reason.WRITE_FAILED
    detail: str = ""
    moments: dict[str, float] = field(default_factory=dict)

    def attach(self, source: Source, now: float, deadline: float) -> None:
        """It has found its source; an intent only keeps it."""
        self.source = source
        source.active.add(self.key)
        if self.state is State.PENDING:
            self.state, self.deadline = State.PUSHING, deadline
            self.reached("matched", now)
            source.deliveries += 1

    def news(self, steps: int) -> list[Effect]:
        """What its receiver does not know yet, if it waits for anything: how far the engine has got."""
        news = (self.source.state if self.source else "unknown", steps - self.steps)
        if news == self.said or self.state is State.INTENDED:
            return []
        self.said = news
        return [Send(self.key[0], Progress(self.key[1], self.key[2], *news))]

    def reached(self, moment: str, now: float) -> None:
        """Note when something happened last."""
        self.moments[moment] = now - self.since

    @property
    def complete(self) -> bool:
        """Whether all that was asked for has been handed to the transport."""
        return all(track.complete for track in self.tracks)

    def commit(self) -> list[Effect]:
        """All blocks are posted: announce how many writes they were."""
        assert isinstance(self.wish, Register)
        self.committed = self.written + sum(push.writes for push in self.tickets.values())
        tokens = self.wish.end_token - self.wish.start_token
        return [Send(self.key[0], Commit(self.key[1], self.key[2], self.committed, tokens))]

    def stop(self, reason: Reason, detail: str) -> list[Effect]:
        """It has failed or been cancelled: post no more, and wait for what is open."""
        self.state, self.reason, self.detail = State.STOPPING, reason, detail
        return [CancelTicket(ticket) for ticket in self.tickets]

    def rewind(self) -> list[Effect]:
        """The blocks are taken back: what has not been written will be pushed again, from the first gap on."""
        for track in self.tracks:
            track.ahead.clear()
        if not self.tickets:
            return []
        self.rewinding = True
        return [CancelTicket(ticket) for ticket in self.tickets]

    def last_word(self) -> Effect:
        """What the receiver hears when nothing is open any more."""
        connection, slot, epoch = self.key
        if self.cancelled and not self.in_doubt:
            return Send(connection, Cancelled(slot, epoch, self.written))
        return Send(connection, Fail(slot, epoch, self.written, self.in_doubt, self.reason, self.detail))

    def sent(self, reason: Reason | None, detail: str) -> Sent:
        """How it ended, for metrics."""
        wish, source = self.wish, self.source
        tokens = wish.end_token - wish.start_token if isinstance(wish, Register) and reason is None else 0
        return Sent(
            request=source.request if source else "",
            transfer=wish.transfer,
            traceparent=source.traceparent if source else "",
            connection=self.key[0],
            reason=reason,
            detail=detail,
            tokens=tokens,
            writes=self.written,
            started=self.since,
            moments=self.moments,
            bytes=self.bytes if reason is None else 0,
        )
