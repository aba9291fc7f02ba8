"""The receiver's ledger: one entry for each request whose KV is to be pushed to us, with a part for each sending rank.

    CONNECTING --> a part for each sender --> reported as received, when all parts have ARRIVED
         |                 |
         |                 +--> reported as failed, when one has failed and no part's writes can land any more
         +--> reported as failed

Parts live in :mod:`~neuron_pushkv.ledger.part`. A request that has no blocks yet has parts too (INTENDED), so that its
senders keep the KV; it is not reported. Every wait has a deadline that acts, and an entry is reported exactly once,
when nothing can write to its blocks any more. Nothing here trusts a sender's word that the data is there: only the
count of arrivals.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.effects import Count, Effect, Expect, Forget, Received, Send
from neuron_pushkv.ledger.part import OPEN, Part, State
from neuron_pushkv.ledger.slots import SlotTable
from neuron_pushkv.orders import Intent, Receive
from neuron_pushkv.wire import Accepted, Cancel, Cancelled, Commit, Done, Fail, Progress, Register, Rejected
from neuron_pushkv.wire import Intent as IntentMessage

MAX_DELIVERIES = 1 << 16
"""More requests than vLLM can have waiting; beyond it a load fails at once."""


@dataclass(frozen=True)
class Share:
    """What one sending rank is asked for; see :class:`~neuron_pushkv.wire.Register`."""

    connection: int
    heads: tuple[int, int] = (0, 1)
    askers: int = 1
    asked: int = 1


@dataclass
class _Delivery:
    """``order`` is None as long as vLLM has no blocks for the request."""

    intent: Intent | Receive
    order: Receive | None
    since: float
    deadline: float
    parts: list[Part] = field(default_factory=list)
    failure: tuple[Reason, str] | None = None
    moments: dict[str, float] = field(default_factory=dict)

    def reached(self, moment: str, now: float) -> None:
        """The last part to get there is what counts."""
        self.moments[moment] = now - self.since


class Inbound:
    """All deliveries that this worker receives. ``quarantine`` is in seconds, after a fence."""

    def __init__(self, settings: ConnectorSettings, quarantine: float) -> None:
        self._settings = settings
        self._quarantine = quarantine
        self._slots = SlotTable()
        self._by_request: dict[str, _Delivery] = {}
        self._by_slot: dict[int, tuple[_Delivery, Part]] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    # What the engine asks for.

    def intend(self, intent: Intent, now: float) -> list[Effect]:
        """A request will want its KV; :meth:`connected` or :meth:`unreachable` must follow."""
        if intent.request in self._by_request:
            return [Count("duplicate_receive")]
        if len(self._by_request) >= MAX_DELIVERIES:
            return [Count("intents_dropped")]  # Its Receive may still find room.
        self._by_request[intent.request] = _Delivery(intent, None, now, float("inf"))
        return []

    def receive(self, order: Receive, now: float) -> list[Effect]:
        """A request waits for its KV; :meth:`connected` or :meth:`unreachable` must follow unless :meth:`routed`."""
        deadline = now + self._settings.no_progress_seconds
        delivery = self._by_request.get(order.request)
        if delivery is None:
            delivery = _Delivery(order, order, now, deadline)
            self._by_request[order.request] = delivery
            if len(self._by_request) > MAX_DELIVERIES:
                return self._report(delivery, Reason.TABLE_FULL, f"over {MAX_DELIVERIES} requests wait for KV")
            return []
        if delivery.order is not None:
            return [Count("duplicate_receive")]
        delivery.order, delivery.since, delivery.deadline = order, now, deadline
        if not delivery.parts:
            return []
        delivery.reached("connected", now)
        return [effect for part in delivery.parts for effect in self._register(delivery, part, now)]

    def routed(self, request: str) -> bool:
        """Whether the way to its senders is known, or being looked for."""
        return request in self._by_request

    def connected(self, request: str, shares: Sequence[Share], now: float) -> list[Effect]:
        """The senders can be reached: announce the blocks to them, or that there will be some."""
        delivery = self._by_request.get(request)
        if delivery is None or delivery.parts:
            return []
        for share in shares:
            taken = self._slots.take()
            if taken is None:
                return self._no_room(delivery)
            part = Part(share.connection, *taken, share.heads, share.askers, share.asked, now)
            delivery.parts.append(part)
            self._by_slot[part.slot] = delivery, part
        if delivery.order is not None:
            delivery.reached("connected", now)
            return [effect for part in delivery.parts for effect in self._register(delivery, part, now)]
        intent = delivery.intent
        assert isinstance(intent, Intent)
        return [
            Send(
                part.connection,
                IntentMessage(intent.transfer, part.slot, part.epoch, intent.end_token, intent.end_content),
            )
            for part in delivery.parts
        ]

    def unreachable(self, request: str, reason: Reason, detail: str) -> list[Effect]:
        """The senders can't be reached; nothing has been announced."""
        delivery = self._by_request.get(request)
        if delivery is None or delivery.parts:
            return []
        if delivery.order is None:
            return self._drop_intent(delivery)
        return self._report(delivery, reason, detail)

    def withdraw(self, request: str, now: float) -> list[Effect]:
        """vLLM has aborted the request. It is still reported, once its blocks are quiet, if it has any."""
        delivery = self._by_request.get(request)
        if delivery is None:
            return []
        if delivery.order is None:
            return self._drop_intent(delivery)
        if not delivery.parts:
            return self._report(delivery, Reason.ABORTED, "")
        return self._give_up(delivery, Reason.ABORTED, "the engine aborted the request", now)

    # What the senders say.

    def heard(
        self, connection: int, message: Accepted | Progress | Rejected | Commit | Fail | Cancelled, now: float
    ) -> list[Effect]:
        """One message about one of our slots. One that fits no part is stale, and counted."""
        delivery, part = self._by_slot.get(message.slot, (None, None))
        if delivery is None or part is None or (part.connection, part.epoch) != (connection, message.epoch):
            return [Count("stale_message")]
        match message:
            case Accepted() | Progress():
                if part.progress(message, now + self._settings.no_progress_seconds):
                    delivery.reached("accepted", now)
                return []
            case Rejected():
                return self._ended_by_sender(delivery, part, 0, 0, message.reason, message.detail, now)
            case Commit():
                return self._committed(delivery, part, message, now)
            case Fail(_, _, writes, in_doubt, reason, detail):
                return self._ended_by_sender(delivery, part, writes, in_doubt, reason, detail, now)
            case Cancelled():
                if part.state is not State.CANCELLING:
                    return part.distrust("CANCELLED without CANCEL")
                return self._ended_by_sender(delivery, part, message.writes, 0, Reason.CANCELLED, "", now)

    def arrived(self, slot: int, epoch: int, count: int, now: float) -> list[Effect]:
        """The count that was asked for has been reached."""
        delivery, part = self._by_slot.get(slot, (None, None))
        if delivery is None or part is None or part.epoch != epoch or count < part.writes:
            return []
        if count > part.writes and part.state in (State.COMMITTED, State.SETTLING):
            # Then one write has counted for another that may be missing.
            return part.distrust(f"{count} writes arrived where {part.writes} were made")
        if part.state is State.COMMITTED:
            part.state, part.deadline = State.ARRIVED, float("inf")
            delivery.reached("arrived", now)
            return self._finished(delivery)
        if part.state is State.SETTLING:
            return self._quiet(delivery, part)
        return []

    def peer_down(self, connection: int, reason: Reason, detail: str, now: float) -> list[Effect]:
        """The connection has ended and the peer has been fenced: its parts are dead, whatever they count later."""
        effects: list[Effect] = []
        for delivery, part in [pair for pair in self._by_slot.values() if pair[1].connection == connection]:
            if delivery.order is None:
                effects += self._drop_intent(delivery, gone=connection)
                continue
            part.state, part.deadline = State.QUARANTINED, now + self._quarantine
            effects += self._give_up(delivery, reason, detail, now)
            if not self._quarantine:
                effects += self._quiet(delivery, part)
        return effects

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Act on every deadline that has passed."""
        effects: list[Effect] = []
        for delivery in [d for d in self._by_request.values() if not d.parts and d.deadline <= now]:
            text = f"not connected within {now - delivery.since:.1f} s"
            effects += self._report(delivery, Reason.TIMEOUT, text)
        for delivery, part in [pair for pair in self._by_slot.values() if pair[1].deadline <= now]:
            effects += self._expired(delivery, part, now)
        return effects

    def _expired(self, delivery: _Delivery, part: Part, now: float) -> list[Effect]:
        if part.slot not in self._by_slot:
            return []  # An earlier one of this tick has ended the delivery.
        match part.state:
            case State.QUARANTINED:
                return self._quiet(delivery, part)
            case State.CANCELLING | State.SETTLING:
                return part.cut_off(now)
            case _:
                text = f"no news from the sender for {now - part.since:.1f} s (its last: {part.sender_state or 'none'})"
                return self._give_up(delivery, Reason.TIMEOUT, text, now)

    # Steps that several of the above share.

    def _register(self, delivery: _Delivery, part: Part, now: float) -> list[Effect]:
        order = delivery.order
        assert order is not None
        part.state, part.since = State.REGISTERED, now
        part.deadline = now + self._settings.no_progress_seconds
        register = Register(
            transfer=order.transfer,
            slot=part.slot,
            epoch=part.epoch,
            start_token=order.start_token,
            end_token=order.end_token,
            start_content=order.start_content,
            end_content=order.end_content,
            blocks=tuple(array("I", group).tobytes() for group in order.blocks),
            heads=part.heads,
            askers=part.askers,
            asked=part.asked,
        )
        return [Expect(part.slot, part.epoch), Send(part.connection, register)]

    def _committed(self, delivery: _Delivery, part: Part, message: Commit, now: float) -> list[Effect]:
        if part.state is State.CANCELLING:
            return []  # The CANCEL is on its way; CANCELLED will say how many there were.
        order = delivery.order
        if part.state is not State.ACCEPTED or order is None:
            return part.distrust(f"COMMIT in state {part.state.name}")
        wanted = order.end_token - order.start_token
        if message.tokens != wanted or message.writes < 1:
            return part.distrust(f"COMMIT of {message.tokens} tokens for {wanted} asked")
        delivery.reached("committed", now)
        return part.committed(message.writes, now, now + self._settings.no_progress_seconds)

    def _ended_by_sender(
        self, delivery: _Delivery, part: Part, writes: int, in_doubt: int, reason: Reason, detail: str, now: float
    ) -> list[Effect]:
        """A sender has ended its part: wait for the writes that it made, or fence it if it can't say how many."""
        if part.state not in (*OPEN, State.CANCELLING):
            return [Count("stale_message")]
        effects = part.settle(writes, in_doubt, detail, now, now + self._settings.cancel_seconds)
        effects += self._give_up(delivery, reason, detail, now)
        if part.state is State.QUIET:
            effects += self._quiet(delivery, part)
        return effects

    def _give_up(self, delivery: _Delivery, reason: Reason, detail: str, now: float) -> list[Effect]:
        """It has failed, for the first reason that is heard of: no part shall be written to any more."""
        if delivery.failure is None:
            delivery.failure = reason, detail
        effects: list[Effect] = []
        for part in delivery.parts:
            if part.state in OPEN:
                part.state, part.since = State.CANCELLING, now
                part.deadline = now + self._settings.cancel_seconds
                effects.append(Send(part.connection, Cancel(part.slot, part.epoch)))
        return effects

    def _quiet(self, delivery: _Delivery, part: Part) -> list[Effect]:
        """Nothing can land for that part any more."""
        part.state, part.deadline = State.QUIET, float("inf")
        if any(other.state is not State.QUIET for other in delivery.parts):
            return []
        assert delivery.failure is not None
        return self._report(delivery, *delivery.failure)

    def _finished(self, delivery: _Delivery) -> list[Effect]:
        """A part has arrived. Its sender is told with all the others, since the delivery may still fail."""
        if any(part.state is not State.ARRIVED for part in delivery.parts):
            return []
        done: list[Effect] = [Send(part.connection, Done(part.slot, part.epoch)) for part in delivery.parts]
        return [*done, *self._report(delivery, None, "")]

    def _no_room(self, delivery: _Delivery) -> list[Effect]:
        """All slots are taken."""
        if delivery.order is None:
            return [Count("intents_dropped"), *self._drop_intent(delivery, gone=None, announced=False)]
        return self._report(delivery, Reason.TABLE_FULL, "no slot is free")

    def _drop_intent(self, delivery: _Delivery, gone: int | None = None, announced: bool = True) -> list[Effect]:
        """It has no blocks, so nothing of it can land anywhere: its slots are quiet, and nobody is told but senders."""
        del self._by_request[delivery.intent.request]
        effects: list[Effect] = []
        for part in delivery.parts:
            del self._by_slot[part.slot]
            self._slots.give_back(part.slot)
            if announced and part.connection != gone:
                effects.append(Send(part.connection, Cancel(part.slot, part.epoch)))
        return effects

    def _report(self, delivery: _Delivery, reason: Reason | None, detail: str) -> list[Effect]:
        order = delivery.order
        assert order is not None
        del self._by_request[order.request]
        effects: list[Effect] = []
        for part in delivery.parts:
            del self._by_slot[part.slot]
            self._slots.give_back(part.slot)
            effects.append(Forget(part.slot))
        done = reason is None
        received = Received(
            request=order.request,
            transfer=order.transfer,
            traceparent=order.traceparent,
            connection=delivery.parts[0].connection if delivery.parts else -1,
            reason=reason,
            detail=detail,
            tokens=order.end_token - order.start_token if done else 0,
            writes=sum(part.writes for part in delivery.parts) if done else 0,
            started=delivery.since,
            moments=delivery.moments,
        )
        return [*effects, received]
