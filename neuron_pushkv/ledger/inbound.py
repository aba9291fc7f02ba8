"""The receiver's ledger: one entry for each request whose KV is to be pushed to us.

    CONNECTING -> REGISTERED -> ACCEPTED -> COMMITTED -> reported as received
         |            |            |            |
         |            +------------+------------+--> CANCELLING --> SETTLING --> reported as failed
         +--> reported as failed        (the peer's end, after its fence: QUARANTINED --> reported as failed)

Every state but the last has a deadline that acts, and an entry is reported exactly once, when nothing can write to its
blocks any more. Nothing here trusts a sender's word that the data is there: only the count of arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.effects import Count, Drop, Effect, Expect, Forget, Goal, Received, Send
from neuron_pushkv.ledger.slots import SlotTable
from neuron_pushkv.orders import Receive
from neuron_pushkv.wire import Accepted, Cancel, Cancelled, Commit, Done, Fail, Progress, Register, Rejected

MAX_DELIVERIES = 1 << 16
"""More requests than vLLM can have waiting; beyond it a load fails at once."""


class State(Enum):
    """See the module's picture."""

    CONNECTING = auto()
    REGISTERED = auto()
    ACCEPTED = auto()
    COMMITTED = auto()
    CANCELLING = auto()
    SETTLING = auto()
    QUARANTINED = auto()


_OPEN = (State.REGISTERED, State.ACCEPTED, State.COMMITTED)


@dataclass
class _Delivery:
    order: Receive
    state: State
    since: float
    deadline: float
    connection: int = -1
    slot: int = -1
    epoch: int = -1
    steps: int = -1
    sender_state: str = ""
    writes: int = 0
    reason: Reason = Reason.TIMEOUT
    detail: str = ""
    times: dict[str, float] = field(default_factory=dict)


class Inbound:
    """All deliveries that this worker receives. ``quarantine`` is in seconds, after a fence."""

    def __init__(self, settings: ConnectorSettings, block_size: int, quarantine: float) -> None:
        self._settings = settings
        self._block_size = block_size
        self._quarantine = quarantine
        self._slots = SlotTable()
        self._by_request: dict[str, _Delivery] = {}
        self._by_slot: dict[int, _Delivery] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    # What the engine asks for.

    def receive(self, order: Receive, now: float) -> list[Effect]:
        """A request waits for its KV; :meth:`connected` or :meth:`unreachable` must follow."""
        if order.request in self._by_request:
            return [Count("duplicate_receive")]
        delivery = _Delivery(order, State.CONNECTING, now, now + self._settings.no_progress_seconds)
        self._by_request[order.request] = delivery
        if len(self._by_request) > MAX_DELIVERIES:
            return self._report(delivery, Reason.TABLE_FULL, f"over {MAX_DELIVERIES} requests wait for KV", now)
        return []

    def connected(self, request: str, connection: int, now: float) -> list[Effect]:
        """The sender can be reached over ``connection``: announce the blocks to it."""
        delivery = self._by_request.get(request)
        if delivery is None or delivery.state is not State.CONNECTING:
            return []
        taken = self._slots.take()
        if taken is None:
            return self._report(delivery, Reason.TABLE_FULL, "no slot is free", now)
        delivery.slot, delivery.epoch = taken
        delivery.connection = connection
        delivery.state = State.REGISTERED
        self._news(delivery, "connect", now)
        self._by_slot[delivery.slot] = delivery
        order = delivery.order
        register = Register(
            transfer=order.transfer,
            slot=delivery.slot,
            epoch=delivery.epoch,
            start_token=order.start_token,
            end_token=order.end_token,
            start_content=order.start_content,
            end_content=order.end_content,
            blocks=order.blocks,
            block_size=self._block_size,
        )
        return [Expect(delivery.slot, delivery.epoch), Send(connection, register)]

    def unreachable(self, request: str, reason: Reason, detail: str, now: float) -> list[Effect]:
        """The sender can't be reached; nothing has been announced."""
        delivery = self._by_request.get(request)
        if delivery is None or delivery.state is not State.CONNECTING:
            return []
        return self._report(delivery, reason, detail, now)

    def withdraw(self, request: str, now: float) -> list[Effect]:
        """vLLM has aborted the request. It is still reported, once its blocks are quiet."""
        delivery = self._by_request.get(request)
        if delivery is None:
            return []
        if delivery.state is State.CONNECTING:
            return self._report(delivery, Reason.ABORTED, "", now)
        if delivery.state in _OPEN:
            return self._cancel(delivery, Reason.ABORTED, "the engine aborted the request", now)
        return []

    # What the sender says.

    def heard(
        self, connection: int, message: Accepted | Progress | Rejected | Commit | Fail | Cancelled, now: float
    ) -> list[Effect]:
        """One message about one of our slots. One that fits no delivery is stale, and counted."""
        delivery = self._by_slot.get(message.slot)
        if delivery is None or (delivery.connection, delivery.epoch) != (connection, message.epoch):
            return [Count("stale_message")]
        match message:
            case Accepted() | Progress():
                return self._heard_progress(delivery, message, now)
            case Rejected():
                return self._settle(delivery, 0, 0, message.reason, message.detail, now)
            case Commit():
                return self._heard_commit(delivery, message, now)
            case Fail():
                return self._settle(delivery, message.writes, message.in_doubt, message.reason, message.detail, now)
            case Cancelled():
                if delivery.state is not State.CANCELLING:
                    return self._distrust(delivery, "CANCELLED without CANCEL")
                return self._settle(delivery, message.writes, 0, delivery.reason, delivery.detail, now)

    def arrived(self, slot: int, epoch: int, count: int, now: float) -> list[Effect]:
        """The count that was asked for has been reached."""
        delivery = self._by_slot.get(slot)
        if delivery is None or delivery.epoch != epoch or count < delivery.writes:
            return []
        if delivery.state is State.COMMITTED:
            self._news(delivery, "transfer", now)
            done = Send(delivery.connection, Done(slot, epoch))
            return [done, *self._report(delivery, None, "", now)]
        if delivery.state is State.SETTLING:
            return self._report(delivery, delivery.reason, delivery.detail, now)
        return []

    def peer_down(self, connection: int, reason: Reason, detail: str, now: float) -> list[Effect]:
        """The connection has ended and the peer has been fenced: its deliveries are dead, whatever they count later."""
        effects: list[Effect] = []
        for delivery in [d for d in self._by_slot.values() if d.connection == connection]:
            if delivery.state in _OPEN:
                delivery.reason, delivery.detail = reason, detail
            delivery.state = State.QUARANTINED
            delivery.deadline = now + self._quarantine
            if not self._quarantine:
                effects += self._report(delivery, delivery.reason, delivery.detail, now)
        return effects

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Act on every deadline that has passed."""
        effects: list[Effect] = []
        for delivery in [d for d in self._by_request.values() if d.deadline <= now]:
            effects += self._expired(delivery, now)
        return effects

    def _expired(self, delivery: _Delivery, now: float) -> list[Effect]:
        waited = f"{now - delivery.since:.1f} s"
        match delivery.state:
            case State.CONNECTING:
                return self._report(delivery, Reason.TIMEOUT, f"not connected within {waited}", now)
            case State.QUARANTINED:
                return self._report(delivery, delivery.reason, delivery.detail, now)
            case State.CANCELLING | State.SETTLING:
                delivery.deadline = float("inf")
                return [Drop(delivery.connection, Reason.TIMEOUT, f"a cancelled transfer isn't quiet after {waited}")]
            case _:
                text = f"no news from the sender for {waited} (its last: {delivery.sender_state or 'none'})"
                return self._cancel(delivery, Reason.TIMEOUT, text, now)

    # Steps that several of the above share.

    def _news(self, delivery: _Delivery, phase: str, now: float) -> None:
        """The delivery has got on: note how long ``phase`` took and give it new patience."""
        delivery.times[phase] = now - delivery.since
        delivery.since = now
        delivery.deadline = now + self._settings.no_progress_seconds

    def _heard_progress(self, delivery: _Delivery, message: Accepted | Progress, now: float) -> list[Effect]:
        if delivery.state not in (State.REGISTERED, State.ACCEPTED):
            return []
        if delivery.state is State.REGISTERED:
            delivery.state = State.ACCEPTED
            self._news(delivery, "register", now)
        steps = message.steps if isinstance(message, Progress) else 0
        if (message.state, steps) != (delivery.sender_state, delivery.steps):
            delivery.sender_state, delivery.steps = message.state, steps
            delivery.deadline = now + self._settings.no_progress_seconds
        return []

    def _heard_commit(self, delivery: _Delivery, message: Commit, now: float) -> list[Effect]:
        if delivery.state is State.CANCELLING:
            return []  # The CANCEL is on its way; CANCELLED will say how many there were.
        if delivery.state is not State.ACCEPTED:
            return self._distrust(delivery, f"COMMIT in state {delivery.state.name}")
        wanted = delivery.order.end_token - delivery.order.start_token
        if message.tokens != wanted or message.writes < 1:
            return self._distrust(delivery, f"COMMIT of {message.tokens} tokens for {wanted} asked")
        self._news(delivery, "wait", now)
        delivery.state = State.COMMITTED
        delivery.writes = message.writes
        return [Goal(delivery.slot, delivery.epoch, message.writes)]

    def _cancel(self, delivery: _Delivery, reason: Reason, detail: str, now: float) -> list[Effect]:
        delivery.state = State.CANCELLING
        delivery.reason, delivery.detail = reason, detail
        delivery.since, delivery.deadline = now, now + self._settings.cancel_seconds
        return [Send(delivery.connection, Cancel(delivery.slot, delivery.epoch))]

    def _settle(
        self, delivery: _Delivery, writes: int, in_doubt: int, reason: Reason, detail: str, now: float
    ) -> list[Effect]:
        """The sender has ended it: wait for the writes that it made, or fence it if it can't say how many."""
        if delivery.state not in (*_OPEN, State.CANCELLING):
            return [Count("stale_message")]
        if delivery.state is not State.CANCELLING:
            delivery.reason, delivery.detail = reason, detail
        delivery.state = State.SETTLING
        delivery.since, delivery.deadline = now, now + self._settings.cancel_seconds
        delivery.writes = writes
        if in_doubt:
            delivery.deadline = float("inf")
            return [Drop(delivery.connection, Reason.WRITE_FAILED, f"{in_doubt} writes are in doubt: {detail}")]
        if writes == 0:
            return self._report(delivery, delivery.reason, delivery.detail, now)
        return [Goal(delivery.slot, delivery.epoch, writes)]

    def _distrust(self, delivery: _Delivery, what: str) -> list[Effect]:
        """The sender breaks the protocol: its word on what is quiet isn't worth anything either."""
        delivery.deadline = float("inf")
        return [Drop(delivery.connection, Reason.BAD_FRAME, f"protocol violation: {what}")]

    def _report(self, delivery: _Delivery, reason: Reason | None, detail: str, now: float) -> list[Effect]:
        del self._by_request[delivery.order.request]
        effects: list[Effect] = []
        if delivery.slot >= 0:
            del self._by_slot[delivery.slot]
            self._slots.give_back(delivery.slot)
            effects.append(Forget(delivery.slot))
        tokens = delivery.order.end_token - delivery.order.start_token if reason is None else 0
        writes = delivery.writes if reason is None else 0
        return [*effects, Received(delivery.order.request, reason, detail, tokens, writes, delivery.times)]
