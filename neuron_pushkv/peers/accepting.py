"""Connections that others open to us, until they are up."""

from __future__ import annotations

import asyncio

from neuron_pushkv.errors import HandshakeRefused, Reason
from neuron_pushkv.peers.core import Core
from neuron_pushkv.peers.handler import WORKER
from neuron_pushkv.peers.handshake import Acceptor, PeerRefused
from neuron_pushkv.peers.link import Link
from neuron_pushkv.peers.opening import Openings
from neuron_pushkv.peers.pairs import Pair, pair_of
from neuron_pushkv.wire import MAX_HANDSHAKE_BYTES, MAX_HELLO_BYTES, Hello, Refused, encode

MAX_STRANGERS = 128
"""Sockets of those who have not proved the key. One more costs the oldest its place: honest ones take milliseconds."""


class Strangers:
    """All sockets that were accepted by the listener and are not (yet) a connection's."""

    def __init__(self, core: Core, openings: Openings) -> None:
        self.core = core
        self.openings = openings
        self._accepting: dict[Accepting, Link] = {}

    def link(self) -> Link:
        """For the listener: the protocol of one new connection."""
        return self.core.link(Accepting(self), MAX_HELLO_BYTES)

    def add(self, accepting: Accepting, link: Link) -> None:
        """One more; the oldest goes if it is one too many."""
        if len(self._accepting) >= MAX_STRANGERS:
            oldest, its_link = next(iter(self._accepting.items()))
            self.core.count(Reason.TABLE_FULL, f"{its_link.address}: more than {MAX_STRANGERS} handshakes at once")
            its_link.end(Reason.TABLE_FULL, "")
            its_link.abort()
            self.remove(oldest)
        self._accepting[accepting] = link
        link.lost.add_done_callback(lambda _: self.remove(accepting))

    def remove(self, accepting: Accepting) -> None:
        """It is up, or its socket is closed."""
        self._accepting.pop(accepting, None)

    def close(self) -> None:
        """End them all."""
        for link in list(self._accepting.values()):
            link.end(Reason.SHUTDOWN, "this node is closing")


class Accepting:
    """The stage of a link from the listener until it is up."""

    def __init__(self, strangers: Strangers) -> None:
        self._strangers = strangers
        self._core = strangers.core
        self._acceptor = Acceptor(strangers.core.ours)
        self._hello: Hello | None = None
        self._link: Link | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def made(self, link: Link) -> None:
        """See :class:`Stage`."""
        self._link = link
        if self._core.closing:
            link.end(Reason.SHUTDOWN, "this node is closing")
            return
        self._strangers.add(self, link)
        self._deadline = self._core.loop.call_later(self._core.timing.connect, self._too_slow)

    def frame(self, body: bytes) -> None:
        """See :class:`Stage`."""
        assert self._link is not None
        if self._hello is None:
            self._hello, challenge = self._acceptor.hello(body)
            self._link.limit = MAX_HANDSHAKE_BYTES
            self._link.write(challenge)
        else:
            self._admit(self._hello, self._link, body)

    def _admit(self, hello: Hello, link: Link, body: bytes) -> None:
        core, openings = self._core, self._strangers.openings
        theirs = self._acceptor.proof(body)
        core.check_room()
        pair = pair_of(theirs)
        if hello.role == WORKER:
            core.pairs.check(pair, theirs.incarnation)
            self._refuse_second(pair, theirs.incarnation)
        core.handler.check(hello.role, theirs)
        if hello.role == WORKER:
            core.pairs.make_room(pair, theirs.incarnation)
        identity, token = core.handler.identity(hello.role, hello)
        link.write(self._acceptor.welcome(identity))
        self._stop_clock()
        self._strangers.remove(self)
        claimed = openings.claim(pair) if hello.role == WORKER else []
        core.establish(link, hello.role, theirs, token, claimed[0].address if claimed else None)
        openings.answer(claimed, answered=1)

    def _refuse_second(self, pair: Pair, incarnation: int) -> None:
        core = self._core
        up = core.pairs.current(pair, incarnation) is not None
        ours_goes_on = core.pairs.ours < pair and self._strangers.openings.proving(pair, incarnation)
        if up or ours_goes_on:
            raise HandshakeRefused(
                Reason.DUPLICATE, f"another connection between engines {core.pairs.ours[0]} and {pair[0]} stays"
            )

    def failed(self, error: Exception) -> None:
        """See :class:`Stage`."""
        assert self._link is not None
        reason, detail = self._core.explain(error, self._link.address)
        told = isinstance(error, PeerRefused)
        self._link.end(reason, detail, None if told else encode(Refused(reason, detail)))

    def ended(self, reason: Reason, detail: str) -> None:
        """See :class:`Stage`. One that leaves without a word (a port check) is not worth counting."""
        self._stop_clock()

    def _too_slow(self) -> None:
        assert self._link is not None
        detail = f"no handshake within {self._core.timing.connect:g} s"
        self._core.count(Reason.TIMEOUT, f"{self._link.address}: {detail}")
        self._link.end(Reason.TIMEOUT, detail, encode(Refused(Reason.TIMEOUT, detail)))

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
