"""The sender's ledger: sources (prompts that we compute) and deliveries (receivers that registered for one).

KV is pushed as prefill goes: whenever a step fills blocks, and whenever somebody registers, everything that is ready
and was asked for is handed to the transport. A source is let go, once, when vLLM has finished its request, its time is
up and no ticket reads its blocks.
"""

from __future__ import annotations

from collections import Counter

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Layout
from neuron_pushkv.ledger.delivery import Delivery, Push, State
from neuron_pushkv.ledger.effects import CancelTicket, Count, Drop, Effect, Freed, Key, Send, Sent, Write
from neuron_pushkv.ledger.registration import fault
from neuron_pushkv.ledger.sources import Source, Sources
from neuron_pushkv.orders import Finish, Offer, Ready
from neuron_pushkv.wire import Accepted, Cancel, Cancelled, Done, Progress, Register, Rejected

MAX_DELIVERIES = 1 << 14
"""Registrations that a sender holds for one receiver at a time; one more is rejected."""
PROGRESS_SECONDS = 5.0
"""How often a waiting receiver hears how far the sender's engine has got."""


class Outbound:
    """All that this worker sends. ``layout`` is its own cache; a peer with another one was refused at connect."""

    def __init__(self, settings: ConnectorSettings, layout: Layout) -> None:
        self._settings = settings
        self._layout = layout
        self._sources = Sources()
        self._deliveries: dict[Key, Delivery] = {}
        self._by_ticket: dict[int, Delivery] = {}
        self._pending: dict[str, list[Delivery]] = {}
        self._per_connection: Counter[int] = Counter()
        self._steps = 0
        self._in_step = False

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def sources(self) -> int:
        """How many prompts are offered or kept."""
        return len(self._sources)

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
        source = self._sources.add(order.request, order.transfer, order.content, order.deliveries)
        effects: list[Effect] = []
        for delivery in [d for transfer in sorted({order.transfer, ""}) for d in self._pending.get(transfer, ())]:
            if self._sources.match(delivery.register) is source:
                self._unpend(delivery)
                self._attach(delivery, source, now)
                effects += self._say(delivery)
        return effects

    def advance(self, order: Ready, now: float) -> list[Effect]:
        """More of the prompt is computed (behind the step's ready word). Push what is new to whoever has registered."""
        source = self._sources.get(order.request)
        if source is None or order.tokens <= source.ready:
            return []
        source.ready, source.blocks = order.tokens, order.blocks[0]
        return [effect for key in sorted(source.active) for effect in self._push(self._deliveries[key], source, now)]

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

    def reading(self, request: str) -> set[int]:
        """Connections over which writes still read that request's blocks."""
        source = self._sources.get(request)
        return {key[0] for key in source.active if self._deliveries[key].tickets} if source else set()

    def drain(self, request: str) -> list[Effect]:
        """vLLM takes the request's blocks back: post no more from them, whoever registers meanwhile. When none are read
        is for :meth:`reading` to tell. The prompt may be computed once more."""
        source = self._sources.get(request)
        if source is None:
            return []
        source.ready, source.blocks = 0, ()
        effects: list[Effect] = []
        for key in sorted(source.active):
            delivery = self._deliveries[key]
            if delivery.state is not State.PUSHING or not delivery.tickets:
                continue
            if delivery.committed:
                effects += delivery.stop(Reason.PREEMPTED, "the sender's engine took its blocks back")
            else:
                delivery.rewinding = True
                effects += [CancelTicket(ticket) for ticket in delivery.tickets]
        return effects

    # What a receiver says.

    def register(self, connection: int, message: Register, peer_blocks: int, now: float) -> list[Effect]:
        """A receiver has blocks for a prompt. It is answered at once, whatever the answer."""
        key = (connection, message.slot, message.epoch)
        if key in self._deliveries:
            return [Count("duplicate_register")]
        refusal = fault(message, self._layout, peer_blocks)
        if refusal is None and self._per_connection[connection] >= MAX_DELIVERIES:
            refusal = (Reason.TABLE_FULL, f"{MAX_DELIVERIES} registrations of this peer are waiting here")
        source = self._sources.match(message) if refusal is None else None
        if refusal is None and source is None:
            if message.transfer and self._sources.gone(message.transfer):
                refusal = (Reason.GONE, "its KV was let go")
            elif message.transfer and not self._sources.can_still_match(message):
                refusal = (Reason.CONTENT_MISMATCH, "the prompts of sender and receiver differ")
        if refusal is not None:
            return [Send(connection, Rejected(message.slot, message.epoch, *refusal))]
        delivery = Delivery(key, message, now, now + self._settings.unknown_source_seconds, self._steps)
        self._deliveries[key] = delivery
        self._per_connection[connection] += 1
        if source is None:
            self._pending.setdefault(message.transfer, []).append(delivery)
            return [Send(connection, Accepted(message.slot, message.epoch, "unknown"))]
        self._attach(delivery, source, now)
        delivery.said = (source.state, 0)
        accepted = Send(connection, Accepted(message.slot, message.epoch, source.state))
        return [accepted, *self._push(delivery, source, now)]

    def cancel(self, connection: int, message: Cancel, now: float) -> list[Effect]:
        """The receiver gives up. It is told how many writes were made as soon as none is under way."""
        delivery = self._deliveries.get((connection, message.slot, message.epoch))
        if delivery is None:
            return [Count("stale_message")]
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
        return self._quiet(delivery, now)

    def release(self, transfer: str, now: float) -> list[Effect]:
        """Nobody will ask for that transfer any more."""
        effects: list[Effect] = []
        for source in self._sources.of_transfer(transfer):
            source.released = True
            effects += self._let_go(source, now)
        return effects

    def peer_down(self, connection: int, reason: Reason, detail: str, now: float) -> list[Effect]:
        """The connection has ended. Tickets that were open end through their own events."""
        effects: list[Effect] = []
        for delivery in [d for d in self._deliveries.values() if d.key[0] == connection]:
            if delivery.tickets:
                delivery.state, delivery.reason, delivery.detail = State.ORPHANED, reason, detail
            else:
                effects += self._end(delivery, reason, detail, now)
        return effects

    # What the transport says.

    def posted(self, write: Write, ticket: int, writes: int, size: int, now: float) -> list[Effect]:
        """A :class:`Write` was taken: ``writes`` will be counted by the receiver, ``size`` bytes moved."""
        delivery = self._deliveries[write.key]
        delivery.tickets[ticket] = Push(delivery.next, writes, size)
        self._by_ticket[ticket] = delivery
        delivery.next += len(write.source)
        delivery.posted_at = now
        delivery.deadline = min(delivery.deadline, now + self._settings.no_progress_seconds)
        return delivery.commit() if delivery.next == len(delivery.register.blocks[0]) else []

    def post_failed(self, key: Key, reason: Reason, detail: str, now: float) -> list[Effect]:
        """A :class:`Write` could not even be started."""
        delivery = self._deliveries[key]
        return [*delivery.stop(reason, detail), *self._quiet(delivery, now)]

    def ticket_written(self, ticket: int, now: float) -> list[Effect]:
        """All its bytes are in place."""
        delivery = self._by_ticket.pop(ticket)
        push = delivery.tickets.pop(ticket)
        delivery.written += push.writes
        delivery.bytes += push.bytes
        return self._quiet(delivery, now)

    def ticket_failed(self, ticket: int, written: int, in_doubt: int, detail: str, now: float) -> list[Effect]:
        """It has ended otherwise."""
        delivery = self._by_ticket.pop(ticket)
        push = delivery.tickets.pop(ticket)
        delivery.written += written
        delivery.in_doubt += in_doubt
        effects: list[Effect] = []
        if delivery.state is State.PUSHING and delivery.rewinding and not in_doubt:
            delivery.next = min(delivery.next, push.first)
        elif delivery.state is State.PUSHING:
            effects = delivery.stop(Reason.PREEMPTED if delivery.rewinding else Reason.WRITE_FAILED, detail)
        return effects + self._quiet(delivery, now)

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Act on every deadline that has passed, and tell waiting receivers how far the engine has got."""
        effects: list[Effect] = []
        for delivery in list(self._deliveries.values()):
            if delivery.deadline <= now:
                effects += self._expired(delivery, now)
        for source in self._sources.all():
            if source.keep_until <= now:
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
        return self._say(delivery) if delivery.state is State.PUSHING else []

    def _unmatched(self, delivery: Delivery, now: float) -> list[Effect]:
        if self._in_step and self._steps - delivery.steps < 2:
            return []  # Requests enter vLLM between steps, and this one is long: no fault of the router's.
        if delivery.register.transfer and self._sources.of_transfer(delivery.register.transfer):
            delivery.stop(Reason.CONTENT_MISMATCH, "no prompt of that transfer has the receiver's content")
        else:
            delivery.stop(Reason.UNKNOWN_SOURCE, f"no such prompt came within {now - delivery.since:.1f} s")
        return self._quiet(delivery, now)

    # Steps that several of the above share.

    def _attach(self, delivery: Delivery, source: Source, now: float) -> None:
        """The delivery has found its source."""
        delivery.source = source
        delivery.state = State.PUSHING
        delivery.deadline = now + PROGRESS_SECONDS
        source.deliveries += 1
        source.active.add(delivery.key)

    def _push(self, delivery: Delivery, source: Source, now: float) -> list[Effect]:
        """Hand over the blocks that are full now; the prompt's last one, or the receiver's, need not be full."""
        register = delivery.register
        if delivery.state is not State.PUSHING or delivery.committed:
            return []
        wanted = len(register.blocks[0])
        first = self._layout.block_index(register.start_token)
        ready = wanted if source.ready >= register.end_token else self._layout.block_index(source.ready) - first
        if ready <= delivery.next:
            return []
        blocks = source.blocks[first + delivery.next : first + ready]
        if len(blocks) != ready - delivery.next:
            delivery.stop(Reason.BAD_RANGE, f"the sender holds {len(source.blocks)} of {first + ready} blocks")
            return self._quiet(delivery, now)
        delivery.times.setdefault("wait", now - delivery.since)
        return [Write(delivery.key, blocks, register.blocks[0][delivery.next : ready])]

    def _say(self, delivery: Delivery) -> list[Effect]:
        news = (delivery.source.state if delivery.source else "unknown", self._steps - delivery.steps)
        if news == delivery.said:
            return []
        delivery.said = news
        return [Send(delivery.key[0], Progress(delivery.key[1], delivery.key[2], *news))]

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
            delivery.times["push"] = now - delivery.since - delivery.times.get("wait", 0.0)
            delivery.deadline = now + self._settings.no_progress_seconds
        return []

    def _revoke(self, source: Source, now: float) -> list[Effect]:
        """The source will never be complete: everything that waits for it fails."""
        effects: list[Effect] = []
        for key in sorted(source.active):
            delivery = self._deliveries[key]
            if delivery.state is State.PUSHING and not delivery.committed:
                effects += delivery.stop(Reason.PREFILL_FAILED, "the request ended before its prefill did")
                effects += self._quiet(delivery, now)
        self._sources.remove(source)
        return effects

    def _end(self, delivery: Delivery, reason: Reason | None, detail: str, now: float) -> list[Effect]:
        """The delivery is over; how long its source is kept depends on how."""
        del self._deliveries[delivery.key]
        self._per_connection[delivery.key[0]] -= 1
        if not self._per_connection[delivery.key[0]]:
            del self._per_connection[delivery.key[0]]
        source = delivery.source
        moved = delivery.bytes if reason is None else 0
        sent = Sent(source.request if source else "", reason, detail, delivery.written, moved, delivery.times)
        if source is None:
            self._unpend(delivery)
            return [sent]
        source.active.discard(delivery.key)
        source.keep_until = now + self._settings.keep_unclaimed_seconds
        for sibling in self._sources.delivered(source) if reason is None else ():
            sibling.keep_until = now + self._settings.keep_delivered_seconds
        return [sent, *self._let_go(source, now)]

    def _let_go(self, source: Source, now: float) -> list[Effect]:
        """Free the source if vLLM has finished it, its time is up and nobody reads or waits for it."""
        if not source.finished or source.active or (source.keep_until > now and not source.released):
            return []
        self._sources.remove(source)
        return [Freed(source.request)]

    def _unpend(self, delivery: Delivery) -> None:
        waiting = self._pending.get(delivery.register.transfer, [])
        if delivery in waiting:
            waiting.remove(delivery)
            if not waiting:
                del self._pending[delivery.register.transfer]
