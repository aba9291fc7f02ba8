"""PushEngine: one worker's transfers. Ledgers decide; this carries out, over peers and a transport.

Three threads meet here under one lock: vLLM's (the public methods), the node's (connections and messages) and our own
(transport events and deadlines). Nothing under the lock waits for the network; the native core does the data path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Accelerator, Memory, ReadyWord
from neuron_pushkv.errors import DeviceError, PushKVError, Reason, RegistrationError, TransportError
from neuron_pushkv.home import Home
from neuron_pushkv.layout import Layout, Region
from neuron_pushkv.ledger import effects as fx
from neuron_pushkv.ledger.inbound import Inbound
from neuron_pushkv.ledger.outbound import Outbound
from neuron_pushkv.links import Links
from neuron_pushkv.orders import Ready, StepOrders
from neuron_pushkv.peers import Node
from neuron_pushkv.plan import plan
from neuron_pushkv.routes import Found, Routes
from neuron_pushkv.stats import Tally
from neuron_pushkv.transport.base import Arrived, Event, Failed, Registration, Transport, Written, immediate
from neuron_pushkv.wire import (
    Accepted,
    AnyMessage,
    Cancel,
    Cancelled,
    Commit,
    Done,
    Fail,
    Hello,
    Identity,
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
    """See the module's text. ``memory`` covers all of ``layout``'s regions; ``directory`` is our own engine's."""

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
        library: str = "",
    ) -> None:
        if accelerator.needs_flush:
            raise DeviceError(f"{accelerator.name} needs a flush after each receipt, which this version can't do")
        self._transport = transport
        self._accelerator = accelerator
        self._layout = layout
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        registered = [transport.register(part) for part in memory]
        self._registrations = [_registration(registered, region) for region in layout.regions]
        quarantine = settings.quarantine_seconds
        if quarantine is None:
            quarantine = 0.0 if transport.fence_is_final else FENCE_QUARANTINE_SECONDS
        self._inbound = Inbound(settings, layout.block_size, quarantine)
        self._outbound = Outbound(settings, layout)
        self._routes = Routes(rank, settings.connect_seconds)
        self._sizes: dict[str, int] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._tally = Tally(transport.provider, library)
        self._ready: ReadyWord | None = None
        self._closed = threading.Event()
        self._links = Links(
            transport=transport,
            identity=Identity(engine_id, incarnation, rank, model, transport.provider, layout),
            regions=self._registrations,
        )
        self._node = Node(
            handler=self,
            engine_id=engine_id,
            incarnation=incarnation,
            rank=rank,
            key=settings.key(),
            connect_seconds=settings.connect_seconds,
            unreachable_seconds=settings.unreachable_seconds,
        )
        host, port = self._node.listen(settings.host, 0)
        self._home = Home(self._node, directory, rank, (host, port), transport.provider, library)
        self._home.open()
        self._thread = threading.Thread(target=self._run, name="pushkv-engine", daemon=True)
        self._thread.start()

    # vLLM's thread.

    def begin_step(self, orders: StepOrders) -> None:
        """Carry out what the scheduler side wants before the forward pass. Posts nothing new."""
        now = time.monotonic()
        with self._lock:
            self._outbound.begin_step()
            for event, count in orders.counters.items():
                self._tally.event(event, count)
            for request in orders.preempted:
                self._take_back(request)
            for finish in orders.finished:
                if not finish.kept:
                    self._take_back(finish.request)
                self._carry_out(self._outbound.finish(finish, now))
            for offer in orders.offers:
                self._carry_out(self._outbound.offer(offer, now))
            for receive in orders.receives:
                self._sizes[receive.request] = len(receive.blocks[0]) * self._layout.bytes_per_block
                self._carry_out(self._inbound.receive(receive, now))
                self._route((receive.host, receive.port), receive.request)
            for request in orders.withdrawn:
                self._carry_out(self._inbound.withdraw(request, now))

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

    def take_results(self) -> Results:
        """What has ended since the last call; each request exactly once."""
        with self._lock:
            results = Results(frozenset(self._finished), frozenset(self._failed))
            self._finished.clear()
            self._failed.clear()
            return results

    def take_stats(self) -> dict[str, Any]:
        """What has been done since the last call, or {}; see :class:`~neuron_pushkv.stats.Tally`."""
        with self._lock:
            for reason, count in self._node.refusals().items():
                self._tally.refused(reason, count)
            return self._tally.take()

    def close(self) -> None:
        """End all transfers and threads. Idempotent. Nothing touches the registered memory afterwards."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._node.close()
        self._transport.wake()
        self._thread.join()
        self._transport.close()

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
        while not self._closed.is_set():
            events = self._transport.poll(TICK_SECONDS)
            now = time.monotonic()
            with self._lock:
                try:
                    for event in events:
                        self._carry_out(self._happened(event, now))
                    self._carry_out(self._inbound.tick(now))
                    self._carry_out(self._outbound.tick(now))
                    self._home.tick(now)
                    for address in self._routes.due(now):
                        self._node.open("lookup", *address)
                except Exception:
                    logger.exception("a bug in neuron_pushkv: please report it; the transfers concerned will time out")
                    self._tally.event("internal_error")
                self._quiet.notify_all()

    def _happened(self, event: Event, now: float) -> list[fx.Effect]:
        match event:
            case Arrived(slot, epoch, count):
                return self._inbound.arrived(slot, epoch, count, now)
            case Written(ticket):
                return self._outbound.ticket_written(ticket, now)
            case Failed(ticket, written, in_doubt, detail):
                return self._outbound.ticket_failed(ticket, written, in_doubt, detail, now)

    # The node's thread (peers.Handler).

    def identity(self, role: str, hello: Hello) -> tuple[Identity, int | None]:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        return self._links.identity(role)

    def check(self, role: str, theirs: Identity) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        self._links.check(role, theirs)

    def discard(self, token: int) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        self._transport.fence(token)

    def up(
        self, connection: int, role: str, theirs: Identity, token: int | None, opened: tuple[str, int] | None
    ) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            try:
                match role:
                    case "rank":
                        self._home.up(connection)
                    case "lookup" if opened is not None:
                        self._found(self._routes.looked_up(opened, theirs, time.monotonic()))
                        self._node.drop(connection, Reason.SHUTDOWN, "looked up")
                    case "worker" if token is not None:
                        self._peer_up(connection, theirs, token, opened)
            except Exception as error:
                if opened is not None:  # The node logs it and ends the connection; those that wait for it must not.
                    self._found(self._routes.unreachable(role, opened, Reason.INTERNAL, repr(error)))
                raise

    def _peer_up(self, connection: int, theirs: Identity, token: int, opened: tuple[str, int] | None) -> None:
        try:
            self._links.add(connection, theirs, token)
        except TransportError as error:
            self._node.drop(connection, Reason.TRANSPORT_MISMATCH, str(error))
            if opened is not None:
                self._found(self._routes.unreachable("worker", opened, Reason.TRANSPORT_MISMATCH, str(error)))
        else:
            self._found(self._routes.up(connection, theirs, opened))

    def down(self, connection: int, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        now = time.monotonic()
        with self._lock:
            self._home.down(connection)
            link = self._links.get(connection)
            if link is None:
                return
            logger.info("connection to %s ended: %s %s", link.identity.engine_id, reason, detail)
            self._routes.down(connection)
            self._links.fence(connection)
            self._links.remove(connection)
            self._carry_out(self._inbound.peer_down(connection, reason, detail, now))
            self._carry_out(self._outbound.peer_down(connection, reason, detail, now))

    def unreachable(self, role: str, host: str, port: int, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            if role == "rank":
                self._home.unreachable(detail)
            else:
                self._found(self._routes.unreachable(role, (host, port), reason, detail))

    def received(self, connection: int, message: AnyMessage) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        now = time.monotonic()
        with self._lock:
            link = self._links.get(connection)
            if link is None:
                return
            match message:
                case Register():
                    self._carry_out(self._outbound.register(connection, message, link.blocks, now))
                case Cancel():
                    self._carry_out(self._outbound.cancel(connection, message, now))
                case Done():
                    self._carry_out(self._outbound.done(connection, message, now))
                case Release(transfer):
                    self._carry_out(self._outbound.release(transfer, now))
                case Accepted() | Progress() | Rejected() | Commit() | Fail() | Cancelled():
                    self._carry_out(self._inbound.heard(connection, message, now))
                case _:
                    text = f"unexpected {type(message).__name__}"
                    self._carry_out([fx.Drop(connection, Reason.BAD_FRAME, text)])

    # Under the lock, from any of the three.

    def _route(self, directory: tuple[str, int], request: str) -> None:
        now = time.monotonic()
        connection = self._routes.want(directory, request, now)
        if connection is not None:
            self._carry_out(self._inbound.connected(request, connection, now))
        elif self._routes.must_look_up(directory):
            self._node.open("lookup", *directory)

    def _found(self, found: Found) -> None:
        now = time.monotonic()
        for request in found.connected:
            self._carry_out(self._inbound.connected(request, found.connection, now))
        for request in found.failed:
            self._carry_out(self._inbound.unreachable(request, found.reason, found.detail, now))
        if found.open_worker is not None:
            self._node.open("worker", *found.open_worker)

    def _carry_out(self, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send(connection, message):
                    self._node.send(connection, message)
                case fx.Drop(connection, reason, detail):
                    self._links.fence(connection)
                    self._node.drop(connection, reason, detail)
                case fx.Expect(slot, epoch):
                    self._transport.expect(slot, epoch)
                case fx.Goal(slot, epoch, count):
                    self._transport.goal(slot, epoch, count)
                case fx.Forget(slot):
                    self._transport.forget(slot)
                case fx.Received():
                    self._report(effect)
                case fx.Write():
                    self._write(effect)
                case fx.CancelTicket(ticket):
                    self._transport.cancel(ticket)
                case fx.Sent():
                    self._tally.sent(effect)
                case fx.Freed(request):
                    self._home.freed(request)
                case fx.Count(event):
                    self._tally.event(event)

    def _report(self, effect: fx.Received) -> None:
        size = self._sizes.pop(effect.request)
        self._tally.received(effect, size if effect.reason is None else 0)
        self._finished.add(effect.request)
        if effect.reason is not None:
            self._failed.add(effect.request)
            logger.warning("KV of request %s did not come: %s %s", effect.request, effect.reason, effect.detail)

    def _write(self, effect: fx.Write) -> None:
        now = time.monotonic()
        link = self._links.get(effect.key[0])
        try:
            if link is None:
                raise PushKVError("the receiver's connection has ended")
            batch = plan(self._layout, self._registrations, link.regions, effect.source, effect.target)
            ticket = self._transport.write(link.peer, batch, immediate(effect.key[1], effect.key[2]), self._ready)
        except PushKVError as error:
            self._carry_out(self._outbound.post_failed(effect.key, Reason.WRITE_FAILED, str(error), now))
            return
        self._carry_out(self._outbound.posted(effect, ticket.id, ticket.writes, ticket.bytes, now))


def _registration(registered: Sequence[Registration], region: Region) -> Registration:
    """The registration whose memory holds all of ``region``."""
    for registration in registered:
        memory = registration.memory
        if memory.address <= region.address and region.address + region.length <= memory.address + memory.length:
            return registration
    raise RegistrationError(f"region {region.name} lies outside the registered memory")
