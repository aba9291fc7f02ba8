"""The sender's ledger: sources (prompts that we compute) and deliveries (receivers that registered for one).

KV is pushed as prefill goes: whenever a step fills blocks, and whenever somebody registers, everything that is ready
and was asked for is handed to the transport. A source is let go, once, when vLLM has finished its request, its time is
up and no ticket reads its blocks.
"""

from __future__ import annotations

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Layout
from neuron_pushkv.ledger.deliveries import MAX_DELIVERIES, Deliveries
from neuron_pushkv.ledger.delivery import Delivery, Push, State
from neuron_pushkv.ledger.effects import Count, Drop, Effect, Freed, Key, Send, Write
from neuron_pushkv.ledger.pushes import Pushes, block_tables
from neuron_pushkv.ledger.registration import BadRegistration, Receiver, checked
from neuron_pushkv.ledger.sources import Source, Sources, ends
from neuron_pushkv.ledger.tracks import tracks
from neuron_pushkv.orders import Finish, Offer, Ready
from neuron_pushkv.wire import Accepted, Cancel, Cancelled, Done, Intent, Register, Rejected

PROGRESS_SECONDS = 5.0
"""How often a waiting receiver hears how far the sender's engine has got."""


class Outbound:
    """All that this worker sends. ``layout`` is its own cache. ``copied``: writes read from copies, not from there;
    ``late``: the transport ``reads_late``."""

    def __init__(
        self, settings: ConnectorSettings, layout: Layout, *, copied: bool = False, late: bool = False
    ) -> None:
        self._settings = settings
        self._copied = copied
        self._pushes = Pushes(layout, late)
        self._sources = Sources()
        self._deliveries = Deliveries()
        self._steps = 0
        self._in_step = False

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def sources(self) -> list[str]:
        """Prompts that are offered or kept."""
        return [source.request for source in self._sources.all()]

    # What the engine says of its own requests.

    def begin_step(self) -> None:
        """vLLM begins a step."""
        self._steps += 1
        self._in_step = True

    def end_step(self) -> None:
        """vLLM has ended it, and may be idle now."""
        self._in_step = False

    def offer(self, order: Offer, now: float) -> list[Effect]:
        """A prompt is going to be computed."""
        if self._sources.get(order.request) is not None:
            return [Count("duplicate_offer")]
        source = self._sources.add(
            order.request, order.transfer, order.content, order.deliveries, traceparent=order.traceparent
        )
        effects: list[Effect] = []
        for delivery in self._deliveries.waiting((order.transfer, *ends(order.content))):
            if self._sources.match(delivery.wish) is source:
                self._deliveries.found(delivery)
                delivery.attach(source, now, now + PROGRESS_SECONDS)
                effects += delivery.news(self._steps)
        return effects

    def advance_layer(self, order: Ready, layer: str, now: float) -> list[Effect]:
        """One layer of a step is computed (behind the ready word), the others are not: push what it fills."""
        source = self._sources.get(order.request)
        if source is None or order.tokens <= source.ready:
            return []
        tables = block_tables(order)
        return [
            effect
            for delivery in self._pushing(source)
            for effect in self._pushes.layer(delivery, tables, order.tokens, layer)
        ]

    def advance(self, order: Ready, now: float) -> list[Effect]:
        """More of the prompt is computed (behind the step's ready word). Push what is new to whoever has registered."""
        source = self._sources.get(order.request)
        if source is None or order.tokens <= source.ready:
            return []
        source.ready, source.blocks = order.tokens, block_tables(order)
        return [effect for delivery in self._pushing(source) for effect in self._push(delivery, source, now)]

    def finish(self, order: Finish, now: float) -> list[Effect]:
        """vLLM has finished the request; unless ``kept``, its blocks are free already."""
        source = self._sources.get(order.request)
        if source is None:
            return [Freed(order.request)] if order.kept else []
        if not order.kept:
            return self._revoke(source, now)
        source.finished = True
        if source.keep_until == float("inf"):
            source.keep_until = now + self._settings.keep_unclaimed_seconds
        return self._let_go(source, now)

    def evict(self, request: str, now: float) -> list[Effect]:
        """A kept request's blocks are wanted back: whoever has only said that it will ask is not waited for."""
        source = self._sources.get(request)
        if source is None:
            return []
        source.released = True
        for key in sorted(source.active):
            if self._deliveries[key].state is State.INTENDED:
                self._drop_intent(self._deliveries[key])
        return self._let_go(source, now)

    def reading(self, request: str) -> set[int]:
        """Connections over which writes still read that request's blocks."""
        if self._copied:
            return set()
        return {key[0] for key in self.open(request) if self._deliveries[key].tickets}

    def open(self, request: str) -> set[Key]:
        """Deliveries of that request's KV."""
        source = self._sources.get(request)
        return set(source.active) if source else set()

    def drain(self, request: str) -> list[Effect]:
        """vLLM takes the request's blocks back: post no more from them, whoever registers meanwhile. When none are read
        is for :meth:`reading` to tell. The prompt may be computed once more."""
        source = self._sources.get(request)
        if source is None:
            return []
        source.ready, source.blocks = 0, ()
        if self._copied:
            return []  # What has been handed over is right whatever becomes of the blocks.
        effects: list[Effect] = []
        for delivery in self._pushing(source):
            if not delivery.committed:
                effects += delivery.rewind()
            elif delivery.tickets:
                effects += delivery.stop(Reason.PREEMPTED, "the sender's engine took its blocks back")
        return effects

    # What a receiver says.

    def intend(self, connection: int, message: Intent, now: float) -> list[Effect]:
        """A receiver will ask for a prompt: its KV is kept for as long as that connection lives. Not answered."""
        key = (connection, message.slot, message.epoch)
        if self._deliveries.get(key) is not None or self._deliveries.full(connection):
            return [Count("intents_dropped")]  # Its registration will be answered.
        self._admit(Delivery(key, message, now, float("inf"), self._steps, State.INTENDED), now)
        return []

    def register(self, connection: int, message: Register, receiver: Receiver, now: float) -> list[Effect]:
        """A receiver has blocks for a prompt. It is answered at once, whatever the answer."""
        key = (connection, message.slot, message.epoch)
        if not self._takes_over(key):
            return [Count("duplicate_register")]
        try:
            receiver = checked(message, receiver)
            if self._deliveries.full(connection):
                text = f"{MAX_DELIVERIES} registrations of this peer are waiting here"
                raise BadRegistration(Reason.TABLE_FULL, text)
            deadline, todo = now + self._settings.unknown_source_seconds, tracks(message, receiver)
            delivery = Delivery(key, message, now, deadline, self._steps, State.PENDING, receiver, todo)
            source = self._admit(delivery, now)
        except BadRegistration as bad:
            return [Send(connection, Rejected(message.slot, message.epoch, bad.reason, str(bad)))]
        state = source.state if source else "unknown"
        delivery.said = (state, 0)
        accepted = Send(connection, Accepted(message.slot, message.epoch, state))
        return [accepted, *(self._push(delivery, source, now) if source else ())]

    def refuse(self, connection: int, message: Register, reason: Reason, detail: str) -> list[Effect]:
        """A registration that can't be looked at: what it intended is over."""
        if not self._takes_over((connection, message.slot, message.epoch)):
            return [Count("duplicate_register")]
        return [Send(connection, Rejected(message.slot, message.epoch, reason, detail))]

    def cancel(self, connection: int, message: Cancel, now: float) -> list[Effect]:
        """The receiver gives up. It is told how many writes were made as soon as none is under way."""
        delivery = self._deliveries.get((connection, message.slot, message.epoch))
        if delivery is None:
            return [Count("stale_message")]
        if delivery.state is State.INTENDED:
            return self._end(delivery, Reason.CANCELLED, "", now)
        if delivery.state is State.STOPPING:
            return []  # It hears of its end anyway.
        delivery.cancelled = True
        if delivery.tickets:
            return delivery.stop(Reason.CANCELLED, "")
        answer = Send(connection, Cancelled(message.slot, message.epoch, delivery.written))
        return [answer, *self._end(delivery, Reason.CANCELLED, "", now)]

    def done(self, connection: int, message: Done, now: float) -> list[Effect]:
        """All of it has arrived, by the receiver's own count."""
        delivery = self._deliveries.get((connection, message.slot, message.epoch))
        if delivery is None or not delivery.committed:
            return [Count("stale_message")]
        # With tickets open the bytes are there, but our own completions are not: the blocks stay ours until they are.
        delivery.done = True
        delivery.reached("done", now)
        return self._quiet(delivery, now)

    def release(self, transfer: str, asked: int, now: float) -> list[Effect]:
        """Nobody will ask for that transfer any more, whether it is known here yet or not."""
        return [effect for source in self._sources.release(transfer, asked) for effect in self._let_go(source, now)]

    def peer_down(self, connection: int, reason: Reason, detail: str, now: float) -> list[Effect]:
        """The connection has ended. Tickets that were open end through their own events."""
        effects: list[Effect] = []
        for delivery in [d for d in self._deliveries if d.key[0] == connection]:
            if delivery.tickets:
                delivery.state, delivery.reason, delivery.detail = State.ORPHANED, reason, detail
            else:
                effects += self._end(delivery, reason, detail, now)
        return effects

    # What the transport says.

    def posted(self, write: Write, end: int, ticket: int, writes: int, size: int, now: float) -> list[Effect]:
        """A :class:`Write` was taken up to token ``end``: the receiver will count ``writes``, ``size`` bytes move."""
        delivery = self._deliveries[write.key]
        self._deliveries.posted(delivery, ticket, Push(delivery.tracks[write.track], write.first, writes, size))
        delivery.moments.setdefault("first_write", now - delivery.since)
        delivery.posted_at = now
        delivery.deadline = min(delivery.deadline, now + self._settings.no_progress_seconds)
        return self._pushes.handed_over(delivery, write, end, now)

    def skipped(self, write: Write, now: float) -> list[Effect]:
        """There was nothing in a :class:`Write` for that receiver: it has none of those layers."""
        return self._pushes.handed_over(self._deliveries[write.key], write, write.end, now)

    def wants(self, key: Key) -> bool:
        """Whether a :class:`Write` of that delivery may still be started."""
        delivery = self._deliveries.get(key)
        return delivery is not None and delivery.state is State.PUSHING

    def post_failed(self, key: Key, reason: Reason, detail: str, now: float) -> list[Effect]:
        """A :class:`Write` could not even be started."""
        delivery = self._deliveries[key]
        return [*delivery.stop(reason, detail), *self._quiet(delivery, now)]

    def resume(self, key: Key, now: float) -> list[Effect]:
        """There is room again for what could not be posted whole."""
        delivery = self._deliveries.get(key)
        if delivery is None or delivery.source is None:
            return []
        return self._push(delivery, delivery.source, now)

    def ticket_written(self, ticket: int, now: float) -> list[Effect]:
        """All its bytes are in place."""
        delivery, push = self._deliveries.ended(ticket)
        delivery.written += push.writes
        delivery.bytes += push.bytes
        delivery.reached("last_write", now)
        return [*self._pushes.announced(delivery, now), *self._quiet(delivery, now)]

    def ticket_failed(self, ticket: int, written: int, in_doubt: int, detail: str, now: float) -> list[Effect]:
        """It has ended otherwise."""
        delivery, push = self._deliveries.ended(ticket)
        delivery.written += written
        delivery.in_doubt += in_doubt
        effects: list[Effect] = []
        if delivery.state is State.PUSHING and delivery.rewinding and not in_doubt:
            push.track.next = min(push.track.next, push.first)
        elif delivery.state is State.PUSHING:
            effects = delivery.stop(Reason.PREEMPTED if delivery.rewinding else Reason.WRITE_FAILED, detail)
        return effects + self._quiet(delivery, now)

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Act on every deadline that has passed, and tell waiting receivers how far the engine has got."""
        effects: list[Effect] = []
        for delivery in [d for d in self._deliveries if d.deadline <= now]:
            effects += self._expired(delivery, now)
        for source in [s for s in self._sources.all() if s.keep_until <= now]:
            effects += self._let_go(source, now)
        return effects

    def _expired(self, delivery: Delivery, now: float) -> list[Effect]:
        if delivery.state is State.PENDING:
            return self._unmatched(delivery, now)
        if delivery.state is State.WRITTEN:
            return self._end(delivery, Reason.TIMEOUT, "the receiver never said DONE", now)
        stalled = delivery.posted_at + self._settings.no_progress_seconds if delivery.tickets else float("inf")
        if now >= stalled:
            delivery.deadline = float("inf")
            text = f"writes have not ended for {now - delivery.posted_at:.1f} s"
            return [Drop(delivery.key[0], Reason.TIMEOUT, text)]
        delivery.deadline = min(now + PROGRESS_SECONDS, stalled)
        return delivery.news(self._steps) if delivery.state is State.PUSHING else []

    def _unmatched(self, delivery: Delivery, now: float) -> list[Effect]:
        if self._in_step and self._steps - delivery.steps < 2:
            return []  # Requests enter vLLM between steps, and this one is long: no fault of the router's.
        if delivery.wish.transfer and self._sources.of_transfer(delivery.wish.transfer):
            delivery.stop(Reason.CONTENT_MISMATCH, "no prompt of that transfer has the receiver's content")
        else:
            delivery.stop(Reason.UNKNOWN_SOURCE, f"no such prompt came within {now - delivery.since:.1f} s")
        return self._quiet(delivery, now)

    # Steps that several of the above share.

    def _admit(self, delivery: Delivery, now: float) -> Source | None:
        """Find its source, or let it wait for one. Raises :class:`BadRegistration` if none can come."""
        wish = delivery.wish
        source = self._sources.match(wish)
        if source is None and isinstance(wish, Register) and wish.transfer:
            if self._sources.gone(wish.transfer):
                raise BadRegistration(Reason.GONE, "its KV was let go")
            if not self._sources.can_still_match(wish.transfer):
                raise BadRegistration(Reason.CONTENT_MISMATCH, "the prompts of sender and receiver differ")
        if source is not None:
            delivery.attach(source, now, now + PROGRESS_SECONDS)
        self._deliveries.add(delivery)
        return source

    def _pushing(self, source: Source) -> list[Delivery]:
        asked = (self._deliveries[key] for key in sorted(source.active))
        return [delivery for delivery in asked if delivery.state is State.PUSHING]

    def _push(self, delivery: Delivery, source: Source, now: float) -> list[Effect]:
        """Hand over what is ready and was asked for."""
        if delivery.state is not State.PUSHING or delivery.committed:
            return []
        effects = self._pushes.all_ready(delivery, source, now)
        return self._quiet(delivery, now) if effects is None else effects

    def _quiet(self, delivery: Delivery, now: float) -> list[Effect]:
        """Something has ended: if nothing is open any more, the delivery goes on to its next state, or ends."""
        if delivery.tickets:
            return []
        arrived = delivery.committed > 0 and delivery.written == delivery.committed and not delivery.in_doubt
        if delivery.state is State.ORPHANED:
            return self._end(delivery, delivery.reason, delivery.detail, now)
        if delivery.state is State.STOPPING and not (arrived and not delivery.cancelled):
            return [delivery.last_word(), *self._end(delivery, delivery.reason, delivery.detail, now)]
        if not arrived:
            delivery.rewinding = False
            return []
        if delivery.done:
            return self._end(delivery, None, "", now)
        if delivery.state is not State.WRITTEN:
            delivery.state = State.WRITTEN
            delivery.deadline = now + self._settings.no_progress_seconds
        return []

    def _revoke(self, source: Source, now: float) -> list[Effect]:
        """The source will never be complete: everything that waits for it fails."""
        effects: list[Effect] = []
        for delivery in [self._deliveries[key] for key in sorted(source.active)]:
            if delivery.state is State.INTENDED:
                self._drop_intent(delivery)
            elif delivery.state is State.PUSHING and not delivery.committed:
                effects += delivery.stop(Reason.PREFILL_FAILED, "the request ended before its prefill did")
                effects += self._quiet(delivery, now)
        self._sources.remove(source)
        return effects

    def _takes_over(self, key: Key) -> bool:
        """Whether a registration may have that name: nobody had it, or what was meant to become one."""
        known = self._deliveries.get(key)
        if known is not None and known.state is State.INTENDED:
            self._drop_intent(known)
            return True
        return known is None

    def _drop_intent(self, delivery: Delivery) -> None:
        """It has become a registration, or there is nothing to be had any more, which a registration will hear."""
        self._deliveries.remove(delivery)
        if delivery.source is not None:
            delivery.source.active.discard(delivery.key)

    def _end(self, delivery: Delivery, reason: Reason | None, detail: str, now: float) -> list[Effect]:
        """The delivery is over; how long its source is kept depends on how."""
        self._deliveries.remove(delivery)
        source, wish = delivery.source, delivery.wish
        sent: list[Effect] = [delivery.sent(reason, detail)] if isinstance(wish, Register) else []
        if source is None:
            return sent
        source.active.discard(delivery.key)
        source.keep_until = now + self._settings.keep_unclaimed_seconds
        if reason is None and isinstance(wish, Register):
            for sibling in self._sources.delivered(source, wish.askers, wish.asked):
                sibling.satisfied = True
                sibling.keep_until = now + self._settings.keep_delivered_seconds
        return [*sent, *self._let_go(source, now)]

    def _let_go(self, source: Source, now: float) -> list[Effect]:
        """Free the source if vLLM has finished it, its time is up and nobody reads or waits for it."""
        if not source.finished or source.active or (source.keep_until > now and not source.released):
            return []
        self._sources.remove(source)
        return [Freed(source.request, source.asked if source.satisfied or source.released else 0)]
