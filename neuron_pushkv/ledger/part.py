"""What one sending rank owes to one delivery: its own slot, epoch and count.

INTENDED -> REGISTERED -> ACCEPTED -> COMMITTED -> ARRIVED
                |            |            |           |
                +------------+------------+-----------+--> CANCELLING --> SETTLING --> QUIET
                   (the peer's end, after its fence: QUARANTINED --> QUIET)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.effects import Drop, Effect, Goal
from neuron_pushkv.wire import Accepted, Progress


class State(Enum):
    """See the module's picture."""

    INTENDED = auto()
    REGISTERED = auto()
    ACCEPTED = auto()
    COMMITTED = auto()
    ARRIVED = auto()
    CANCELLING = auto()
    SETTLING = auto()
    QUARANTINED = auto()
    QUIET = auto()


OPEN = (State.REGISTERED, State.ACCEPTED, State.COMMITTED, State.ARRIVED)


@dataclass
class Part:
    """``heads``, ``askers`` and ``asked``: see :class:`~neuron_pushkv.wire.Register`. ``since``: its last news."""

    connection: int
    slot: int
    epoch: int
    heads: tuple[int, int]
    askers: int
    asked: int
    since: float
    state: State = State.INTENDED
    deadline: float = float("inf")
    steps: int = -1
    sender_state: str = ""
    writes: int = 0

    def progress(self, message: Accepted | Progress, deadline: float) -> bool:
        """The sender has it, or its engine has got on. Whether this is the first that is heard of it."""
        if self.state not in (State.REGISTERED, State.ACCEPTED):
            return False
        first = self.state is State.REGISTERED
        self.state = State.ACCEPTED
        steps = message.steps if isinstance(message, Progress) else 0
        if first or (message.state, steps) != (self.sender_state, self.steps):
            self.sender_state, self.steps = message.state, steps
            self.deadline = deadline
        return first

    def committed(self, writes: int, now: float, deadline: float) -> list[Effect]:
        """All of it is posted: this many writes."""
        self.state, self.since, self.deadline, self.writes = State.COMMITTED, now, deadline, writes
        return [Goal(self.slot, self.epoch, writes)]

    def settle(self, writes: int, in_doubt: int, detail: str, now: float, deadline: float) -> list[Effect]:
        """The sender has ended it after so many writes. QUIET at once if there were none."""
        self.since, self.writes = now, writes
        if in_doubt:
            self.state, self.deadline = State.SETTLING, float("inf")
            return [Drop(self.connection, Reason.WRITE_FAILED, f"{in_doubt} writes are in doubt: {detail}")]
        if writes == 0:
            self.state, self.deadline = State.QUIET, float("inf")
            return []
        self.state, self.deadline = State.SETTLING, deadline
        return [Goal(self.slot, self.epoch, writes)]

    def cut_off(self, now: float) -> list[Effect]:
        """It isn't quiet in time: nothing but a fence makes it so."""
        self.deadline = float("inf")
        text = f"a cancelled transfer isn't quiet after {now - self.since:.1f} s"
        return [Drop(self.connection, Reason.TIMEOUT, text)]

    def distrust(self, what: str) -> list[Effect]:
        """The sender breaks the protocol: its word on what is quiet isn't worth anything either."""
        self.deadline = float("inf")
        return [Drop(self.connection, Reason.BAD_FRAME, f"protocol violation: {what}")]
