"""PushEngine: one worker's transfers. Ledgers decide; this carries out, over contacts and a transport.

Three threads meet here under one lock: vLLM's (the public methods), the node's (connections and messages) and our own
(transport events and deadlines). Nothing under the lock waits for the network; the native core does the data path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.contacts.contacts import Contacts, Sizes
from neuron_pushkv.device.base import Accelerator, Memory, ReadyWord
from neuron_pushkv.errors import DeviceError, LayoutError, PushKVError, Reason, RegistrationError, TransportError
from neuron_pushkv.layout import Layout, Region
from neuron_pushkv.ledger import effects as fx
from neuron_pushkv.ledger.inbound import Inbound, Share
from neuron_pushkv.ledger.outbound import Outbound
from neuron_pushkv.orders import Ready, StepOrders
from neuron_pushkv.posting import Posting
from neuron_pushkv.telemetry import Telemetry, Transfer, Way
from neuron_pushkv.transport.base import Arrived, Event, Failed, Registration, Transport, Written, immediate
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

    ``sizes`` are the engine's pipeline and tensor parallel sizes.
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
        if accelerator.needs_flush and not transport.flushes:
            raise DeviceError(
                f"{accelerator.name} memory must be flushed after each receipt, which transport '{transport.provider}' "
                f"doesn't do; set another transport or provider"
            )
        self._transport = transport
        self._accelerator = accelerator
        self._layout = layout
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        registered = [transport.register(part) for part in memory]
        quarantine = settings.quarantine_seconds
        if quarantine is None:
            quarantine = 0.0 if transport.fence_is_final else FENCE_QUARANTINE_SECONDS
        self._inbound = Inbound(settings, quarantine)
        self._outbound = Outbound(settings, layout)
        self._sizes: dict[str, int] = {}
        self._releases: dict[str, str] = {}
        self._ended: list[Transfer] = []
        """Loads that vLLM has not heard of yet."""
        self._telemetry = Telemetry(transport.provider, transport.library, engine=engine_id, rank=str(rank))
        self._ready: ReadyWord | None = None
        self._posting = Posting(transport, settings.staging_bytes)
        self._stale = 0
        """Arrivals that nobody expected, as far as they are counted."""
        self._closed = threading.Event()
        self._contacts = Contacts(
            self,
            self._lock,
            settings=settings,
            identity=Identity(engine_id, incarnation, rank, model, transport.provider, layout),
            sizes=sizes,
            transport=transport,
            regions=[_registration(registered, layout, region) for region in layout.regions],
            directory=directory,
            staging=self._posting.staging,
        )
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
            for intent in orders.intents:
                self._carry_out(self._inbound.intend(intent, now))
                self._contacts.reach((intent.remote.host, intent.remote.port), intent.request, now)
            for receive in orders.receives:
                self._sizes[receive.request] = sum(
                    len(blocks) * self._layout.bytes_of(group) for group, blocks in enumerate(receive.blocks)
                )
                routed = self._inbound.routed(receive.request)
                self._carry_out(self._inbound.receive(receive, now))
                if not routed:
                    self._contacts.reach((receive.remote.host, receive.remote.port), receive.request, now)
            for release in orders.releases:
                errand = f"release {len(self._releases)} {release.transfer}"
                self._releases[errand] = release.transfer
                self._contacts.reach((release.remote.host, release.remote.port), errand, now)
            for request in orders.withdrawn:
                self._carry_out(self._inbound.withdraw(request, now))
            self.advance(orders.cached)

    def advance_layer(self, layer: str, ready: Sequence[Ready]) -> None:
        """One layer of this step has been launched: push what it fills, behind it, while the next one is computed."""
        now = time.monotonic()
        with self._lock:
            if ready:
                self._ready = self._accelerator.mark_step()
            for order in ready:
                self._carry_out(self._outbound.advance_layer(order, layer, now))

    def advance(self, ready: Sequence[Ready]) -> None:
        """After the forward pass has been launched: push the blocks that it fills to whoever has registered."""
        now = time.monotonic()
        with self._lock:
            if ready:
                # Kept after this call: a registration may come before the step is ready, and waits for the same word.
                self._ready = self._accelerator.mark_step()
            for order in ready:
                self._carry_out(self._outbound.advance(order, now))

    def end_step(self) -> None:
        """The step is over; the engine may be idle from now on."""
        with self._lock:
            self._outbound.end_step()

    def take_results(self, patience: float = 0.0) -> Results:
        """What has ended since the last call, each request exactly once; waits up to ``patience`` s for the first."""
        with self._lock:
            self._quiet.wait_for(lambda: self._ended, patience)
            ended, self._ended = self._ended, []
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
            self._telemetry.gauge("staging_bytes", self._posting.staged)
            return self._telemetry.take()

    def close(self) -> None:
        """End all transfers and threads. Idempotent. Nothing touches the registered memory afterwards."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._contacts.close()
        self._transport.wake()
        self._thread.join()
        self._transport.close()
        self._telemetry.close()

    def _take_back(self, request: str) -> None:
        """Let no write read the request's blocks any more, within a bound: this is the thread that steps the engine."""
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
            events = self._transport.poll(TICK_SECONDS)
            now = time.monotonic()
            with self._lock:
                try:
                    for event in events:
                        self._carry_out(self._happened(event, now))
                    for key in self._posting.waiting():
                        self._carry_out(self._outbound.resume(key, now))
                    if now >= tick:
                        tick = now + TICK_SECONDS
                        self._carry_out(self._inbound.tick(now))
                        self._carry_out(self._outbound.tick(now))
                        self._contacts.tick(now)
                except Exception:
                    logger.exception("a bug in neuron_pushkv: please report it; the transfers concerned will time out")
                    self._telemetry.event("internal_error")
                self._quiet.notify_all()

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
        transfer = self._releases.pop(request, None)
        if transfer is None:
            self._carry_out(self._inbound.connected(request, shares, time.monotonic()))
            return
        for share in shares:
            self._contacts.send(share.connection, Release(transfer, share.asked))

    def unreachable(self, request: str, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        if self._releases.pop(request, None) is None:
            self._carry_out(self._inbound.unreachable(request, reason, detail))

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
                    size = self._sizes.pop(effect.request)
                    self._ended.append(self._transfer("in", effect, size if effect.reason is None else 0))
                    self._quiet.notify_all()
                case fx.Write():
                    self._write(effect)
                case fx.CancelTicket(ticket):
                    self._transport.cancel(ticket)
                case fx.Sent():
                    self._telemetry.ended(self._transfer("out", effect, effect.bytes))
                case fx.Freed(request, asked):
                    self._contacts.freed(request, asked)
                case fx.Count(event):
                    self._telemetry.event(event)

    def _transfer(self, way: Way, ended: fx.Ended, size: int) -> Transfer:
        return Transfer(
            way,
            ended.request,
            ended.transfer,
            ended.traceparent,
            self._contacts.name(ended.connection),
            ended.reason,
            ended.detail,
            ended.tokens,
            ended.writes,
            size,
            ended.started,
            ended.moments,
        )

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
            posted = self._posting.post(link.peer, plan, effect, immediate(slot, epoch), self._ready, may_pack)
        except PushKVError as error:
            self._carry_out(self._outbound.post_failed(effect.key, Reason.WRITE_FAILED, str(error), now))
            return
        if posted is None:
            self._transport.wake()  # Our own thread takes it up.
        elif posted.ticket is None:
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
