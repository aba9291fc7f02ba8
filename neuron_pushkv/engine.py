"""PushEngine: one worker's transfers. Ledgers decide; this carries out, over contacts and a transport.

Three threads meet here under one lock: vLLM's (the public methods), the node's (connections and messages) and our own
(transport events and deadlines). Nothing under the lock waits for the network; the native core does the data path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neuron_pushkv.bounce.bounce import Bounce
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.contacts.contacts import Contacts, Sizes
from neuron_pushkv.device.base import Accelerator, Memory
from neuron_pushkv.errors import DeviceError, LayoutError, PushKVError, Reason, RegistrationError, TransportError
from neuron_pushkv.layout import Layout, Region
from neuron_pushkv.ledger import effects as fx
from neuron_pushkv.ledger.inbound import Inbound, Share
from neuron_pushkv.ledger.outbound import Outbound
from neuron_pushkv.orders import Ready, StepOrders
from neuron_pushkv.posting import Posting
from neuron_pushkv.receiving import Receiving
from neuron_pushkv.steps import STEP_SECONDS, Steps
from neuron_pushkv.telemetry import Telemetry, transfer_of
from neuron_pushkv.transport.base import Arrived, Event, Failed, Registration, Transport, Written, immediate
from neuron_pushkv.transport.choosing import bounces
from neuron_pushkv.wire import (
    Accepted,
    AnyMessage,
    Cancel,
    Cancelled,
    Commit,
    Done,
    Fail,
    Identity,
    Intent,
    Progress,
    Rank,
    Register,
    Rejected,
    Release,
)

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
"""How late a deadline may act."""
DRAIN_SECONDS = 0.05
"""How long vLLM's thread waits for writes from blocks that it takes back, before the receiver is fenced instead."""
FENCED_SECONDS = 5.0
"""How long the events of a fence may take to be seen; beyond it the transport has broken its contract."""
FENCE_QUARANTINE_SECONDS = 5.0
"""How long a peer's last writes may still be in a network whose fence isn't final."""


@dataclass(frozen=True)
class Results:
    """Requests whose receiving has ended since the last call; ``failed`` is a subset of ``finished``."""

    finished: frozenset[str]
    failed: frozenset[str]


class PushEngine:
    """See the module's text. ``memory`` covers all of ``layout``'s regions; ``directory`` is our own engine's.

    ``sizes`` are the engine's pipeline and tensor parallel sizes. If some of the memory can't be shown to the network,
    all KV passes through a staging cache (:mod:`neuron_pushkv.bounce`).
    """

    def __init__(
        self,
        *,
        settings: ConnectorSettings,
        engine_id: str,
        incarnation: int,
        rank: Rank,
        model: str,
        layout: Layout,
        memory: Sequence[Memory],
        transport: Transport,
        accelerator: Accelerator,
        directory: tuple[str, int],
        sizes: Sizes = (1, 1),
    ) -> None:
        bounced = bounces(settings, memory)
        if accelerator.needs_flush and not bounced and not transport.flushes:
            raise DeviceError(
                f"{accelerator.name} memory must be flushed after each receipt, which transport '{transport.provider}' "
                f"doesn't do; set another transport or provider"
            )
        self._transport = transport
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._bounce = Bounce(settings, layout, transport, accelerator, self._lock) if bounced else None
        if self._bounce is not None:
            self._posting: Posting = self._bounce.posting
            registered, shown = [self._bounce.cache.registration], self._bounce.cache.layout
        else:
            self._posting = Posting(transport, settings.staging_bytes)
            registered, shown = [transport.register(part) for part in memory], layout
        quarantine = settings.quarantine_seconds
        if quarantine is None:
            quarantine = 0.0 if transport.fence_is_final else FENCE_QUARANTINE_SECONDS
        self._inbound = Inbound(settings, quarantine)
        self._outbound = Outbound(settings, layout, copied=bounced, late=transport.reads_late)
        self._telemetry = Telemetry(transport.provider, transport.library, engine=engine_id, rank=str(rank))
        self._steps = Steps(accelerator)
        self._stale = 0
        """Arrivals that nobody expected, as far as they are counted."""
        self._closed = threading.Event()
        self._contacts = Contacts(
            self,
            self._lock,
            settings=settings,
            identity=Identity(engine_id, incarnation, rank, model, transport.provider, shown),
            sizes=sizes,
            transport=transport,
            regions=[_registration(registered, shown, region) for region in shown.regions],
            directory=directory,
            staging=self._posting.staging,
        )
        self._receiving = Receiving(self._inbound, self._contacts, layout, self._carry_out, self._bounce)
        self._thread = threading.Thread(target=self._run, name="pushkv-engine", daemon=True)
        self._thread.start()

    # vLLM's thread.

    def begin_step(self, orders: StepOrders) -> None:
        """Carry out what the scheduler side wants before the forward pass, and push what earlier ones have filled."""
        now = time.monotonic()
        with self._lock:
            self._outbound.begin_step()
            for event, count in orders.counters.items():
                self._telemetry.event(event, count)
            for request in orders.preempted:
                self._take_back(request)
            for finish in orders.finished:
                if not finish.kept:
                    self._take_back(finish.request)
                self._carry_out(self._outbound.finish(finish, now))
            for request in orders.evicted:
                self._carry_out(self._outbound.evict(request, now))
            for offer in orders.offers:
                self._carry_out(self._outbound.offer(offer, now))
            self._receiving.begin(orders, now)
            self.advance(orders.cached)

    def advance_layer(self, layer: str, ready: Sequence[Ready]) -> None:
        """One layer of this step has been launched: push what it fills, behind it, while the next one is computed."""
        now = time.monotonic()
        with self._lock:
            if not ready or self._posting.copies or not self._steps.mark():
                return  # What is copied goes when its step has ended.
            for order in ready:
                self._carry_out(self._outbound.advance_layer(order, layer, now))

    def advance(self, ready: Sequence[Ready]) -> None:
        """After the forward pass has been launched: push the blocks that it fills to whoever has registered."""
        if not ready:
            return
        now = time.monotonic()
        with self._lock:
            for order in self._steps.launched(ready, wait=self._posting.copies):
                self._carry_out(self._outbound.advance(order, now))
            if self._steps:
                self._transport.wake()  # Our own thread looks when it has ended.

    def end_step(self) -> None:
        """The step is over; the engine may be idle from now on."""
        with self._lock:
            self._outbound.end_step()

    def take_results(self, patience: float = 0.0) -> Results:
        """What has ended since the last call, each request exactly once; waits up to ``patience`` s for the first."""
        with self._lock:
            self._quiet.wait_for(self._receiving.has_ended, patience)
            ended = self._receiving.take()
            now = time.monotonic()
            for transfer in ended:
                moments = {**transfer.moments, "seen": now - transfer.started}
                self._telemetry.ended(replace(transfer, moments=moments))
            failed = frozenset(transfer.request for transfer in ended if transfer.reason is not None)
            return Results(frozenset(transfer.request for transfer in ended), failed)

    def take_stats(self) -> dict[str, Any]:
        """What has been done since the last call, or {}; see :class:`~neuron_pushkv.telemetry.Telemetry`."""
        with self._lock:
            for reason, count in self._contacts.refusals().items():
                self._telemetry.refused(reason, count)
            stale = self._transport.counters().stale_arrivals
            if stale != self._stale:
                self._telemetry.event("stale_arrival", stale - self._stale)
                self._stale = stale
            self._telemetry.gauge("open_receives", len(self._inbound))
            self._telemetry.gauge("open_sends", len(self._outbound))
            self._telemetry.staging(self._posting.pool)
            self._telemetry.gauge("bounce_bytes", self._bounce.cache.used_bytes if self._bounce else 0)
            return self._telemetry.take()

    def close(self) -> None:
        """End all transfers and threads. Idempotent. Nothing touches the registered memory afterwards."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._contacts.close()
        self._transport.wake()
        self._thread.join()
        if self._bounce is not None:
            self._bounce.close()
        self._transport.close()
        self._telemetry.close()

    def _take_back(self, request: str) -> None:
        """Let no write read the request's blocks any more, within a bound: this is the thread that steps the engine."""
        self._steps.take_back(request)
        self._posting.take_back(self._outbound.open(request))
        self._carry_out(self._outbound.drain(request))
        if self._quiet.wait_for(lambda: not self._outbound.reading(request), DRAIN_SECONDS):
            return
        for connection in self._outbound.reading(request):
            self._carry_out([fx.Drop(connection, Reason.PREEMPTED, "writes were too slow for a preemption")])
        if not self._quiet.wait_for(lambda: not self._outbound.reading(request), FENCED_SECONDS):
            raise TransportError("writes went on after their peer was fenced; this engine can't go on safely")

    # Our own thread.

    def _run(self) -> None:
        tick = 0.0
        while not self._closed.is_set():
            events = self._transport.poll(STEP_SECONDS if self._steps else TICK_SECONDS)
            now = time.monotonic()
            with self._lock:
                for event in events:
                    self._safely(self._happened, event, now)
                for order in self._steps.ended():
                    self._safely(self._outbound.advance, order, now)
                for key in self._posting.waiting():
                    self._safely(self._outbound.resume, key, now)
                    self._posting.resumed(key)
                if now >= tick:
                    tick = now + TICK_SECONDS
                    self._safely(self._tick, now)
                self._quiet.notify_all()

    def _safely(self, decide: Callable[..., Sequence[fx.Effect]], *arguments: Any) -> None:
        """A bug must not take what else has happened with it."""
        try:
            self._carry_out(decide(*arguments))
        except Exception:
            logger.exception("a bug in neuron_pushkv: please report it; the transfer concerned may time out")
            self._telemetry.event("internal_error")

    def _tick(self, now: float) -> Sequence[fx.Effect]:
        if self._steps.failed:
            self._device_failed(self._steps.failed, now)
        self._receiving.tick(now)
        self._contacts.tick(now)
        return self._outbound.tick(now)

    def _device_failed(self, why: str, now: float) -> None:
        """Nothing that it computes will be there: whoever waits for it hears so, and may compute it."""
        self._steps.give_up()
        for request in self._outbound.sources:
            for key in sorted(self._outbound.open(request)):
                if self._outbound.wants(key):
                    logger.error("KV of request %s is not pushed: %s", request, why)
                    self._carry_out(self._outbound.post_failed(key, Reason.DEVICE_FAILED, why, now))
            self._carry_out(self._outbound.evict(request, now))

    def _happened(self, event: Event, now: float) -> list[fx.Effect]:
        match event:
            case Arrived(slot, epoch, count):
                return self._inbound.arrived(slot, epoch, count, now)
            case Written(ticket):
                self._posting.ended(ticket)
                return self._outbound.ticket_written(ticket, now)
            case Failed(ticket, written, in_doubt, detail):
                self._posting.ended(ticket)
                return self._outbound.ticket_failed(ticket, written, in_doubt, detail, now)

    # Under the lock, from our contacts (contacts.Owner).

    def reached(self, request: str, shares: Sequence[Share]) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        self._receiving.reached(request, shares)

    def unreachable(self, request: str, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        self._receiving.unreachable(request, reason, detail)

    def unasked(self, requests: Sequence[str]) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        for request in requests:
            self._carry_out(self._outbound.evict(request, time.monotonic()))

    def lost(self, connection: int, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        now = time.monotonic()
        self._carry_out(self._inbound.peer_down(connection, reason, detail, now))
        self._carry_out(self._outbound.peer_down(connection, reason, detail, now))

    def told(self, connection: int, message: AnyMessage) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        now = time.monotonic()
        match message:
            case Intent():
                self._carry_out(self._outbound.intend(connection, message, now))
            case Register():
                self._carry_out(self._registered(connection, message, now))
            case Cancel():
                self._carry_out(self._outbound.cancel(connection, message, now))
            case Done():
                self._carry_out(self._outbound.done(connection, message, now))
            case Release(transfer, asked):
                self._carry_out(self._outbound.release(transfer, asked, now))
            case Accepted() | Progress() | Rejected() | Commit() | Fail() | Cancelled():
                self._carry_out(self._inbound.heard(connection, message, now))
            case _:
                text = f"unexpected {type(message).__name__}"
                self._carry_out([fx.Drop(connection, Reason.BAD_FRAME, text)])

    # Under the lock, from any of the three.

    def _registered(self, connection: int, message: Register, now: float) -> list[fx.Effect]:
        try:
            receiver = self._contacts.links.receiver(connection, message.heads)
        except LayoutError as error:
            return self._outbound.refuse(connection, message, Reason.LAYOUT_MISMATCH, str(error))
        return self._outbound.register(connection, message, receiver, now)

    def _carry_out(self, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send(connection, message):
                    self._contacts.send(connection, message)
                case fx.Drop(connection, reason, detail):
                    self._contacts.drop(connection, reason, detail)
                case fx.Expect(slot, epoch):
                    self._transport.expect(slot, epoch)
                case fx.Goal(slot, epoch, count):
                    self._transport.goal(slot, epoch, count)
                case fx.Forget(slot):
                    self._transport.forget(slot)
                case fx.Received():
                    self._receiving.received(effect)
                    self._quiet.notify_all()
                case fx.Write():
                    self._write(effect)
                case fx.CancelTicket(ticket):
                    self._transport.cancel(ticket)
                case fx.Sent():
                    peer = self._contacts.name(effect.connection)
                    self._telemetry.ended(transfer_of("out", effect, peer, effect.bytes))
                case fx.Freed(request, asked):
                    self._contacts.freed(request, asked)
                case fx.Count(event):
                    self._telemetry.event(event)

    def _write(self, effect: fx.Write) -> None:
        if not self._outbound.wants(effect.key):
            return
        now = time.monotonic()
        connection, slot, epoch = effect.key
        try:
            link = self._contacts.links.get(connection)
            if link is None:
                raise PushKVError("the receiver's connection has ended")
            plan = self._contacts.links.plan(connection, effect.heads)
            may_pack = threading.current_thread() is self._thread
            posted = self._posting.post(link.peer, plan, effect, immediate(slot, epoch), self._steps.word, may_pack)
        except PushKVError as error:
            reason = Reason.DEVICE_FAILED if isinstance(error, DeviceError) else Reason.WRITE_FAILED
            self._carry_out(self._outbound.post_failed(effect.key, reason, str(error), now))
            return
        if not may_pack if posted is None else posted.end < effect.end:
            self._transport.wake()  # Our own thread goes on with it at once.
        if posted is None:
            return
        if posted.ticket is None:
            self._carry_out(self._outbound.skipped(effect, now))
        else:
            ticket = posted.ticket
            self._carry_out(self._outbound.posted(effect, posted.end, ticket.id, ticket.writes, ticket.bytes, now))


def _registration(registered: Sequence[Registration], layout: Layout, region: Region) -> Registration:
    """The registration whose memory holds all of ``region``."""
    for registration in registered:
        memory = registration.memory
        if memory.address <= region.address and region.address + layout.span(region) <= memory.address + memory.length:
            return registration
    raise RegistrationError(f"region {region.name} lies outside the registered memory")
