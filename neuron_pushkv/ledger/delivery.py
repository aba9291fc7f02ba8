"""One receiver's registration, as its sender sees it.

PENDING while there is no source for it; PUSHING while blocks are still to come or tickets are open; WRITTEN when all
bytes are in place and only the receiver's DONE is missing; STOPPING when it has failed or been cancelled with tickets
open; ORPHANED when its receiver is gone with tickets open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.effects import CancelTicket, Effect, Key, Send
from neuron_pushkv.ledger.sources import Source
from neuron_pushkv.wire import Cancelled, Commit, Fail, Register


class State(Enum):
    """See the module's text."""

    PENDING = auto()
    PUSHING = auto()
    WRITTEN = auto()
    STOPPING = auto()
    ORPHANED = auto()


@dataclass(frozen=True)
class Push:
    """One ticket: ``first`` is the index of its first block among the registered ones."""

    first: int
    writes: int
    bytes: int


@dataclass
class Delivery:
    """``steps`` is the engine's step count at the registration. ``key`` is how the receiver names it."""

    key: Key
    register: Register
    since: float
    deadline: float
    steps: int
    state: State = State.PENDING
    said: tuple[str, int] = ("unknown", 0)
    source: Source | None = None
    next: int = 0
    """How many of the registered blocks have been handed to the transport."""
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
    times: dict[str, float] = field(default_factory=dict)

    def commit(self) -> list[Effect]:
        """All blocks are posted: announce how many writes they were."""
        self.committed = self.written + sum(push.writes for push in self.tickets.values())
        tokens = self.register.end_token - self.register.start_token
        return [Send(self.key[0], Commit(self.key[1], self.key[2], self.committed, tokens))]

    def stop(self, reason: Reason, detail: str) -> list[Effect]:
        """It has failed or been cancelled: post no more, and wait for what is open."""
        self.state, self.reason, self.detail = State.STOPPING, reason, detail
        return [CancelTicket(ticket) for ticket in self.tickets]

    def last_word(self) -> Effect:
        """What the receiver hears when nothing is open any more."""
        connection, slot, epoch = self.key
        if self.cancelled and not self.in_doubt:
            return Send(connection, Cancelled(slot, epoch, self.written))
        return Send(connection, Fail(slot, epoch, self.written, self.in_doubt, self.reason, self.detail))
