"""The sender's ledger: sources (prompts that we compute) and deliveries (receivers that registered for one).

A delivery is PENDING while there is no source for it, WAITING while the source is being computed, WRITING while a
ticket is open, WRITTEN when all bytes are in place and only the receiver's DONE is missing, CANCELLING when it has
been told to stop with a ticket open, and ORPHANED when its receiver is gone with a ticket open. A source is let go,
once, when vLLM has finished its request, its time is up and no ticket reads its blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Layout
from neuron_pushkv.ledger.effects import CancelTicket, Count, Drop, Effect, Freed, Key, Send, Sent, Write
from neuron_pushkv.ledger.registration import fault
from neuron_pushkv.ledger.sources import Source, Sources, SourceState
from neuron_pushkv.orders import Blocks, Finish, Offer
from neuron_pushkv.wire import Accepted, Cancel, Cancelled, Commit, Done, Fail, Progress, Register, Rejected

MAX_DELIVERIES = 1 << 14
"""Registrations that a sender holds for one receiver at a time; one more is rejected."""
PROGRESS_SECONDS = 5.0
"""How often a waiting receiver hears how far the sender's engine has got."""


class State(Enum):
    """See the module's text."""

    PENDING = auto()
    WAITING = auto()
    WRITING = auto()
    WRITTEN = auto()
    CANCELLING = auto()
    ORPHANED = auto()


_TICKET_OPEN = (State.WRITING, State.CANCELLING, State.ORPHANED)


@dataclass
class _Delivery:
    key: Key
    register: Register
    state: State
    since: float
    deadline: float
    steps: int
    """The engine's step count at the registration."""
    said: tuple[str, int] = ("", 0)
    source: Source | None = None
    ticket: int = -1
    writes: int = 0
    bytes: int = 0
    reason: Reason = Reason.WRITE_FAILED
    """What a ticket that fails has failed of."""
    times: dict[str, float] = field(default_factory=dict)


class Outbound:
    """All that this worker sends. ``layout`` is its own cache; a peer with another one was refused at connect."""

    def __init__(self, settings: ConnectorSettings, layout: Layout) -> None:
        self._settings = settings
        self._layout = layout
        self._sources = Sources()
        self._deliveries: dict[Key, _Delivery] = {}
        self._by_ticket: dict[int, _Delivery] = {}
        self._pending: dict[str, list[_Delivery]] = {}
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
        """A prompt is being computed. Known already (resumed after a preemption): computed once more."""
        if self._sources.get(order.request) is not None:
            return []
        source = self._sources.add(order.request, order.transfer, order.content, order.deliveries)
        effects: list[Effect] = []
        for delivery in [d for transfer in sorted({order.transfer, ""}) for d in self._pending.get(transfer, ())]:
            if self._sources.match(delivery.register) is source:
                self._unpend(delivery)
                effects += self._attach(delivery, source, now)
        return effects

    def seal(self, request: str, blocks: Blocks, now: float) -> list[Effect]:
        """The prompt is computed: ``blocks`` hold it (behind the step's ready word). Serve whoever waits."""
        source = self._sources.get(request)
        if source is None or source.state is SourceState.SEALED:
            return []
        source.state = SourceState.SEALED
        source.blocks = blocks[0]
        effects: list[Effect] = []
        for key in sorted(source.active):
            if self._deliveries[key].state is State.WAITING:
                effects += self._start(self._deliveries[key], source, now)
        return effects

    def finish(self, order: Finish, now: float) -> list[Effect]:
        """vLLM has finished the request; unless ``kept``, its blocks are free already."""
        source = self._sources.get(order.request)
        if source is None:
            return [Freed(order.request)] if order.kept else []
        if not order.kept:
            return self._revoke(source, Reason.PREFILL_FAILED, "the request ended before its prefill did", now)
        source.finished = True
        if source.keep_until == float("inf"):
            source.keep_until = now + self._settings.keep_unclaimed_seconds
        return self._let_go(source, now)

    def reading(self, request: str) -> set[int]:
        """Connections over which writes still read that request's blocks."""
        source = self._sources.get(request)
        return {key[0] for key in source.active if self._deliveries[key].state in _TICKET_OPEN} if source else set()

    def drain(self, request: str) -> list[Effect]:
        """vLLM takes the request's blocks back: post no more from them. :meth:`reading` tells when none are read."""
        source = self._sources.get(request)
        effects: list[Effect] = []
        for key in sorted(source.active) if source else ():
            delivery = self._deliveries[key]
            if delivery.state in _TICKET_OPEN:
                delivery.reason = Reason.PREEMPTED
                effects.append(CancelTicket(delivery.ticket))
        return effects

    def preempted(self, request: str) -> None:
        """No write reads its blocks any more, and they are vLLM's again. The prompt will be computed once more."""
        source = self._sources.get(request)
        if source is not None:
            source.state, source.blocks = SourceState.COMPUTING, ()

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
        patience = self._settings.unknown_source_seconds
        delivery = _Delivery(key, message, State.PENDING, now, now + patience, self._steps)
        self._deliveries[key] = delivery
        self._per_connection[connection] += 1
        if source is not None:
            return self._attach(delivery, source, now, first=True)
        self._pending.setdefault(message.transfer, []).append(delivery)
        delivery.said = ("unknown", 0)
        return [Send(connection, Accepted(message.slot, message.epoch, "unknown"))]

    def cancel(self, connection: int, message: Cancel, now: float) -> list[Effect]:
        """The receiver gives up. It is told how many writes were made as soon as none is under way."""
        delivery = self._deliveries.get((connection, message.slot, message.epoch))
        if delivery is None:
            return [Count("stale_message")]
        match delivery.state:
            case State.PENDING | State.WAITING | State.WRITTEN:
                answer = Send(connection, Cancelled(message.slot, message.epoch, delivery.writes))
                return [answer, *self._end(delivery, Reason.CANCELLED, "", now)]
            case State.WRITING:
                delivery.state = State.CANCELLING
                return [CancelTicket(delivery.ticket)]
            case _:
                return []

    def done(self, connection: int, message: Done, now: float) -> list[Effect]:
        """All of it has arrived, by the receiver's own count."""
        delivery = self._deliveries.get((connection, message.slot, message.epoch))
        if delivery is None:
            return [Count("stale_message")]
        if delivery.state is State.WRITTEN:
            return self._end(delivery, None, "", now)
        if delivery.state is State.WRITING:
            # The bytes are there, but our own completions are not: the blocks stay ours until they are.
            delivery.times["done"] = now
            return []
        return [Count("stale_message")]

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
            if delivery.state in _TICKET_OPEN:
                delivery.state = State.ORPHANED
            else:
                effects += self._end(delivery, reason, detail, now)
        return effects

    # What the transport says.

    def posted(self, key: Key, ticket: int, writes: int, size: int, tokens: int, now: float) -> list[Effect]:
        """A :class:`Write` was taken: ``writes`` will be counted by the receiver, ``size`` bytes moved."""
        delivery = self._deliveries[key]
        delivery.ticket, delivery.writes, delivery.bytes = ticket, writes, size
        self._by_ticket[ticket] = delivery
        return [Send(key[0], Commit(key[1], key[2], writes, tokens))]

    def post_failed(self, key: Key, reason: Reason, detail: str, now: float) -> list[Effect]:
        """A :class:`Write` could not even be started."""
        return [self._fail(key, 0, 0, reason, detail), *self._end(self._deliveries[key], reason, detail, now)]

    def ticket_written(self, ticket: int, now: float) -> list[Effect]:
        """All its bytes are in place."""
        delivery = self._by_ticket.pop(ticket)
        delivery.times["write"] = now - delivery.since
        match delivery.state:
            case State.CANCELLING:
                answer = Send(delivery.key[0], Cancelled(delivery.key[1], delivery.key[2], delivery.writes))
                return [answer, *self._end(delivery, Reason.CANCELLED, "", now)]
            case State.ORPHANED:
                return self._end(delivery, Reason.PEER_LOST, "the receiver is gone", now)
            case _:
                delivery.state = State.WRITTEN
                delivery.deadline = now + self._settings.no_progress_seconds
                return self._end(delivery, None, "", now) if "done" in delivery.times else []

    def ticket_failed(self, ticket: int, written: int, in_doubt: int, detail: str, now: float) -> list[Effect]:
        """It has ended otherwise."""
        delivery = self._by_ticket.pop(ticket)
        delivery.writes = written
        if delivery.state is State.ORPHANED:
            return self._end(delivery, Reason.PEER_LOST, detail, now)
        if delivery.state is State.CANCELLING and not in_doubt:
            answer = Send(delivery.key[0], Cancelled(delivery.key[1], delivery.key[2], written))
            return [answer, *self._end(delivery, Reason.CANCELLED, detail, now)]
        fail = self._fail(delivery.key, written, in_doubt, delivery.reason, detail)
        return [fail, *self._end(delivery, delivery.reason, detail, now)]

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

    def _expired(self, delivery: _Delivery, now: float) -> list[Effect]:
        steps = self._steps - delivery.steps
        match delivery.state:
            case State.PENDING:
                if self._in_step and steps < 2:
                    return []  # Requests enter vLLM between steps, and this one is long: no fault of the router's.
                if delivery.register.transfer and self._sources.of_transfer(delivery.register.transfer):
                    reason, text = Reason.CONTENT_MISMATCH, "no prompt of that transfer has the receiver's content"
                else:
                    reason, text = Reason.UNKNOWN_SOURCE, f"no such prompt came within {now - delivery.since:.1f} s"
                return [self._fail(delivery.key, 0, 0, reason, text), *self._end(delivery, reason, text, now)]
            case State.WAITING:
                delivery.deadline = now + PROGRESS_SECONDS
                return self._say(delivery)
            case State.WRITTEN:
                return self._end(delivery, Reason.TIMEOUT, "the receiver never said DONE", now)
            case _:
                delivery.deadline = float("inf")
                text = f"writes have not ended for {now - delivery.since:.1f} s"
                return [Drop(delivery.key[0], Reason.TIMEOUT, text)]

    # Steps that several of the above share.

    def _attach(self, delivery: _Delivery, source: Source, now: float, first: bool = False) -> list[Effect]:
        """The delivery has found its source."""
        delivery.source = source
        delivery.state = State.WAITING
        delivery.deadline = now + PROGRESS_SECONDS
        source.deliveries += 1
        source.active.add(delivery.key)
        if first:
            delivery.said = (source.state, 0)
            said: list[Effect] = [Send(delivery.key[0], Accepted(delivery.key[1], delivery.key[2], source.state))]
        else:
            said = self._say(delivery)
        return said + (self._start(delivery, source, now) if source.state is SourceState.SEALED else [])

    def _say(self, delivery: _Delivery) -> list[Effect]:
        state = delivery.source.state if delivery.source else "unknown"
        news = (str(state), self._steps - delivery.steps)
        if news == delivery.said:
            return []
        delivery.said = news
        return [Send(delivery.key[0], Progress(delivery.key[1], delivery.key[2], *news))]

    def _start(self, delivery: _Delivery, source: Source, now: float) -> list[Effect]:
        register = delivery.register
        first = self._layout.block_index(register.start_token)
        count = self._layout.blocks_for(register.start_token, register.end_token)
        blocks = source.blocks[first : first + count]
        if len(blocks) != count:
            text = f"the sender holds {len(blocks)} of {count} blocks"
            fail = self._fail(delivery.key, 0, 0, Reason.BAD_RANGE, text)
            return [fail, *self._end(delivery, Reason.BAD_RANGE, text, now)]
        delivery.state = State.WRITING
        delivery.times["wait"] = now - delivery.since
        delivery.since, delivery.deadline = now, now + self._settings.no_progress_seconds
        return [Write(delivery.key, blocks, register.blocks[0], register.end_token - register.start_token)]

    def _fail(self, key: Key, writes: int, in_doubt: int, reason: Reason, detail: str) -> Send:
        return Send(key[0], Fail(key[1], key[2], writes, in_doubt, reason, detail))

    def _revoke(self, source: Source, reason: Reason, detail: str, now: float) -> list[Effect]:
        """The source will never be sealed: everything that waits for it fails."""
        effects: list[Effect] = []
        for key in sorted(source.active):
            delivery = self._deliveries[key]
            if delivery.state is State.WAITING:
                effects += [self._fail(key, 0, 0, reason, detail), *self._end(delivery, reason, detail, now)]
        self._sources.remove(source)
        return effects

    def _end(self, delivery: _Delivery, reason: Reason | None, detail: str, now: float) -> list[Effect]:
        """The delivery is over; how long its source is kept depends on how."""
        del self._deliveries[delivery.key]
        self._per_connection[delivery.key[0]] -= 1
        if not self._per_connection[delivery.key[0]]:
            del self._per_connection[delivery.key[0]]
        delivery.times.pop("done", None)
        source = delivery.source
        if source is None:
            self._unpend(delivery)
            return [Sent("", reason, detail, 0, 0, delivery.times)]
        source.active.discard(delivery.key)
        moved = delivery.bytes if reason is None else 0
        effects: list[Effect] = [
            Sent(source.request, reason, detail, delivery.writes, moved, delivery.times),
        ]
        source.keep_until = now + self._settings.keep_unclaimed_seconds
        for sibling in self._sources.delivered(source) if reason is None else ():
            sibling.keep_until = now + self._settings.keep_delivered_seconds
        return effects + self._let_go(source, now)

    def _let_go(self, source: Source, now: float) -> list[Effect]:
        """Free the source if vLLM has finished it, its time is up and nobody reads or waits for it."""
        if not source.finished or source.active or (source.keep_until > now and not source.released):
            return []
        self._sources.remove(source)
        return [Freed(source.request)]

    def _unpend(self, delivery: _Delivery) -> None:
        waiting = self._pending.get(delivery.register.transfer, [])
        if delivery in waiting:
            waiting.remove(delivery)
            if not waiting:
                del self._pending[delivery.register.transfer]
