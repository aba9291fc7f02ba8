"""Everybody a worker talks to: its own engine's directory, other engines' directories, and other engines' workers.

Finds who holds a prompt's KV, keeps the connections, and carries messages. What they mean is the engine's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.contacts.home import Home
from neuron_pushkv.contacts.links import Links
from neuron_pushkv.contacts.routes import Address, Found, Routes
from neuron_pushkv.errors import LayoutError, Reason, TransportError
from neuron_pushkv.ledger.inbound import Share
from neuron_pushkv.peers import Node
from neuron_pushkv.plan.staging import Staging
from neuron_pushkv.transport.base import Registration, Transport
from neuron_pushkv.wire import AnyMessage, Hello, Identity, LetGo, Message

logger = logging.getLogger(__name__)

Sizes: TypeAlias = tuple[int, int]
"""Pipeline and tensor parallel size."""


class Owner(Protocol):
    """The engine. Called under its lock."""

    def reached(self, request: str, shares: Sequence[Share]) -> None:
        """All ranks that hold a share of what ``request`` needs are connected."""

    def unreachable(self, request: str, reason: Reason, detail: str) -> None:
        """They can't be."""

    def told(self, connection: int, message: AnyMessage) -> None:
        """A worker says something."""

    def unasked(self, requests: Sequence[str]) -> None:
        """Our directory says that nobody will ask this rank for these requests' KV."""

    def lost(self, connection: int, reason: Reason, detail: str) -> None:
        """A worker's connection has ended, and it has been fenced."""


class Contacts:
    """See the module's text. ``lock`` is the engine's; methods but those of ``peers.Handler`` are called under it.

    ``identity`` is ours without endpoint and regions, ``regions`` our registrations in the layout's order.
    """

    def __init__(
        self,
        owner: Owner,
        lock: threading.RLock,
        *,
        settings: ConnectorSettings,
        identity: Identity,
        sizes: Sizes,
        transport: Transport,
        regions: Sequence[Registration],
        directory: Address,
        staging: Callable[[], Staging],
    ) -> None:
        self._owner = owner
        self._lock = lock
        self._transport = transport
        self.links = Links(
            transport=transport,
            identity=identity,
            sizes=sizes,
            regions=regions,
            smallest_write_bytes=settings.smallest_write_bytes,
            staging=staging,
        )
        self._routes = Routes(self.links.choose, settings.connect_seconds)
        self._node = Node(
            handler=self,
            engine_id=identity.engine_id,
            incarnation=identity.incarnation,
            rank=identity.rank,
            key=settings.key(),
            connect_seconds=settings.connect_seconds,
            unreachable_seconds=settings.unreachable_seconds,
        )
        listening = self._node.listen(settings.host, 0)
        self._home = Home(self._node, directory, identity.rank, listening, transport.provider, transport.library)
        self._home.open()

    def close(self) -> None:
        """End all connections. Not under the lock."""
        self._node.close()

    def reach(self, directory: Address, request: str, now: float) -> None:
        """Find whoever holds what ``request`` needs; the owner is told, now or later, once."""
        found = self._routes.want(directory, request, now)
        if found is not None:
            self._found(found)
        elif self._routes.must_look_up(directory):
            self._node.open("lookup", *directory)

    def send(self, connection: int, message: Message) -> None:
        """A connection that is gone is told by its end, not by this."""
        self._node.send(connection, message)

    def drop(self, connection: int, reason: Reason, detail: str) -> None:
        """Fence a peer and end its connection."""
        self.links.fence(connection)
        self._node.drop(connection, reason, detail)

    def freed(self, request: str, asked: int) -> None:
        """Tell our directory; see :class:`~neuron_pushkv.wire.Freed`."""
        self._home.freed(request, asked)

    def refusals(self) -> dict[Reason, int]:
        """Connections and frames refused since the last call."""
        return self._node.refusals()

    def tick(self, now: float) -> None:
        """Try again what is due."""
        self._home.tick(now)
        for address in self._routes.due(now):
            self._node.open("lookup", *address)

    def name(self, connection: int) -> str:
        """The engine behind a connection, "" if it is gone."""
        link = self.links.get(connection)
        return link.identity.engine_id if link is not None else ""

    # The node's thread (peers.Handler).

    def identity(self, role: str, hello: Hello) -> tuple[Identity, int | None]:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        return self.links.identity(role)

    def check(self, role: str, theirs: Identity) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        self.links.check(role, theirs)

    def discard(self, token: int) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        self._transport.fence(token)

    def up(self, connection: int, role: str, theirs: Identity, token: int | None, opened: Address | None) -> None:
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

    def _peer_up(self, connection: int, theirs: Identity, token: int, opened: Address | None) -> None:
        try:
            self.links.add(connection, theirs, token)
        except TransportError as error:
            self._node.drop(connection, Reason.TRANSPORT_MISMATCH, str(error))
            if opened is not None:
                self._found(self._routes.unreachable("worker", opened, Reason.TRANSPORT_MISMATCH, str(error)))
        else:
            for found in self._routes.up(connection, theirs, opened):
                self._found(found)

    def down(self, connection: int, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            self._home.down(connection)
            link = self.links.get(connection)
            if link is None:
                return
            logger.info("connection to %s ended: %s %s", link.identity.engine_id, reason, detail)
            self._routes.down(connection)
            self.links.fence(connection)
            self._owner.lost(connection, reason, detail)
            self.links.remove(connection)

    def unreachable(self, role: str, host: str, port: int, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            if role == "rank":
                self._home.unreachable(detail)
            else:
                self._found(self._routes.unreachable(role, (host, port), reason, detail))

    def received(self, connection: int, message: AnyMessage) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            if self.links.get(connection) is not None:
                self._owner.told(connection, message)
            elif isinstance(message, LetGo) and self._home.is_line(connection):
                self._owner.unasked(message.requests)

    def _found(self, found: Found) -> None:
        reason, detail, shares = found.reason, found.detail, None
        if found.connected:
            try:
                shares = self.links.shares(found.connections, found.ranks)
            except LayoutError as error:
                reason, detail = Reason.LAYOUT_MISMATCH, str(error)
        for request in found.connected:
            if shares is not None:
                self._owner.reached(request, shares)
            else:
                self._owner.unreachable(request, reason, detail)
        for request in found.failed:
            self._owner.unreachable(request, reason, detail)
        for address in found.open_workers:
            self._node.open("worker", *address)
