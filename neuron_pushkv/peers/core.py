"""What all connections of one node share. Everything here is for the node's thread, unless it says otherwise."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from neuron_pushkv.errors import HandshakeRefused, Reason, WireError
from neuron_pushkv.peers.handler import WORKER, Connection, Handler
from neuron_pushkv.peers.handshake import Ours, PeerRefused
from neuron_pushkv.peers.link import Link, Stage
from neuron_pushkv.peers.pairs import Pairs
from neuron_pushkv.wire import (
    MAX_FRAME_BYTES,
    Bye,
    Challenge,
    Hello,
    Identity,
    Ping,
    Proof,
    Refused,
    Welcome,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
"""Connections up at once. Their openers hold the fleet key, so it takes a bug or a very large fleet to get there."""
LOG_SECONDS = 1.0
"""At most one line in this time for each reason: strangers must not be able to fill a disk."""

_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Timing:
    """In seconds; see :class:`~neuron_pushkv.peers.Node`."""

    connect: float
    unreachable: float
    silence: float
    ping: float


class Core:
    """Handler, counters and the connections that are up. ``links`` may be read from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handler: Handler, ours: Ours, timing: Timing) -> None:
        self.loop = loop
        self.handler = handler
        self.ours = ours
        self.timing = timing
        self.pairs = Pairs((ours.engine_id, ours.rank))
        self.links: dict[Connection, Link] = {}
        self.sockets: set[Link] = set()
        """Links whose socket is open, ended or not."""
        self.closing = False
        self._numbers = itertools.count(1)
        self._counts: Counter[Reason] = Counter()
        self._counts_lock = threading.Lock()
        self._logged: dict[Reason, float] = {}

    def link(self, stage: Stage, limit: int) -> Link:
        """A link that begins with ``stage``."""
        link = Link(self.loop, stage, limit)
        self.sockets.add(link)
        link.lost.add_done_callback(lambda _: self.sockets.discard(link))
        return link

    def count(self, reason: Reason, detail: str) -> None:
        """Something was refused: count it and say it."""
        with self._counts_lock:
            self._counts[reason] += 1
        now = time.monotonic()
        if reason is not Reason.DUPLICATE and now >= self._logged.get(reason, now):
            self._logged[reason] = now + LOG_SECONDS
            logger.warning("refused (%s): %s", reason, detail)

    def take_counts(self) -> dict[Reason, int]:
        """What was counted since the last call. For any thread."""
        with self._counts_lock:
            counts, self._counts = dict(self._counts), Counter()
        return counts

    def explain(self, error: Exception, address: str) -> tuple[Reason, str]:
        """Count what has gone wrong with the peer at ``address``; a bug of ours is logged with its traceback."""
        if isinstance(error, (WireError, HandshakeRefused)):
            detail = f"{address} says: {error}" if isinstance(error, PeerRefused) else str(error)
            self.count(error.reason, f"{address}: {error}")
            return error.reason, detail
        logger.error("a bug in neuron_pushkv, please report it", exc_info=error)
        self.count(Reason.INTERNAL, f"{address}: {error!r}")
        return Reason.INTERNAL, f"internal error: {error!r}"

    def call(
        self, function: Callable[_Arguments, None], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> bool:
        """Call the handler where no connection is left to end if it raises. Returns whether it didn't."""
        try:
            function(*arguments, **named)
        except Exception as error:
            logger.exception("a bug in neuron_pushkv, please report it")
            self.count(Reason.INTERNAL, repr(error))
            return False
        return True

    def check_room(self) -> None:
        """Raise :class:`HandshakeRefused` if there are too many connections already."""
        if len(self.links) >= MAX_CONNECTIONS:
            raise HandshakeRefused(Reason.TABLE_FULL, f"{MAX_CONNECTIONS} connections are up already")

    def establish(
        self, link: Link, role: str, theirs: Identity, token: int | None, opened: tuple[str, int] | None
    ) -> None:
        """The handshake is over and nothing stands against this connection."""
        connection = next(self._numbers)
        link.stage = Established(self, link, connection, role, theirs)
        link.limit = MAX_FRAME_BYTES
        self.links[connection] = link
        if role == WORKER:
            self.pairs.add(theirs, link)
        try:
            self.handler.up(connection, role, theirs, token, opened)
        except Exception as error:  # noqa: BLE001 - counted, logged, and the connection ends
            link.stage.failed(error)


class Established:
    """A connection that is up. Watched in ticks rather than by the clock: being stopped ourselves is no silence."""

    def __init__(self, core: Core, link: Link, connection: Connection, role: str, theirs: Identity) -> None:
        self._core = core
        self._link = link
        self._connection = connection
        self._role = role
        self._theirs = theirs

    def made(self, link: Link) -> None:
        """See :class:`Stage`."""

    def frame(self, body: bytes) -> None:
        """See :class:`Stage`."""
        message = decode(body)
        match message:
            case Ping():
                pass
            case Bye(reason):
                self._link.end(reason, f"engine {self._theirs.engine_id} has said goodbye")
            case Refused(reason, detail):  # Our Welcome was on its way when the opener took a look at our identity.
                raise PeerRefused(reason, detail)
            case Hello() | Challenge() | Proof() | Welcome():
                raise WireError(Reason.BAD_FRAME, f"{type(message).__name__} came after the handshake")
            case _:
                self._core.handler.received(self._connection, message)

    def failed(self, error: Exception) -> None:
        """See :class:`Stage`."""
        reason, detail = self._core.explain(error, self._link.address)
        told = isinstance(error, PeerRefused)
        self._link.end(reason, detail, None if told else encode(Bye(reason)))

    def ended(self, reason: Reason, detail: str) -> None:
        """See :class:`Stage`."""
        core = self._core
        core.links.pop(self._connection, None)
        if self._role == WORKER:
            core.pairs.remove(self._theirs, self._link)
        core.call(core.handler.down, self._connection, reason, detail)
