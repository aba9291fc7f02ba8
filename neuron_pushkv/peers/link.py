"""One TCP connection: frames in, a bounded queue out, and an end that happens once."""

from __future__ import annotations

import asyncio
import socket
import threading
from threading import get_ident
from typing import Protocol, cast

from neuron_pushkv.errors import Reason
from neuron_pushkv.wire import HEADER_BYTES, MAX_FRAME_BYTES, body_length

MAX_QUEUE_BYTES = 2 * MAX_FRAME_BYTES
"""What may wait for a peer that doesn't read; beyond it the connection ends."""
LINGER_SECONDS = 1.0
"""How long a peer has to read our last words before the socket is taken from it."""


class Stage(Protocol):
    """What a connection is just now (a handshake, or up), and so what its events mean."""

    def made(self, link: Link) -> None:
        """The socket is connected."""

    def frame(self, body: bytes) -> None:
        """A frame has come. What this raises goes to ``failed``."""

    def failed(self, error: Exception) -> None:
        """A frame was bad, or dealing with it was: this must end the link."""

    def ended(self, reason: Reason, detail: str) -> None:
        """The link has ended: called once."""


class Link(asyncio.Protocol):
    """Everything is for the node's thread, but for :meth:`post`. ``limit`` bounds the next frame, in bytes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stage: Stage, limit: int) -> None:
        self._loop = loop
        self.stage = stage
        self.limit = limit
        self.address = "an unknown address"
        self.heard = True
        """Whether anything has come since whoever watches set this to False."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the socket is closed."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._linger: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._thread = get_ident()
        self._ended = False
        self._outbox: list[bytes] = []
        self._queued = 0
        self._flush_due = False
        self._paused = False
        self._spoke = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        if name:
            self.address = f"{name[0]}:{name[1]}"
        _set_options(transport.get_extra_info("socket"))
        self.stage.made(self)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self.heard = True
        if self._ended:
            return
        received = self._received
        received += data
        start = 0
        try:
            while len(received) >= start + HEADER_BYTES:
                body = start + HEADER_BYTES
                end = body + body_length(bytes(received[start:body]), self.limit)
                if len(received) < end:
                    break
                start = end
                self.stage.frame(bytes(received[body:end]))
                if self.ended:
                    break
        except Exception as error:  # noqa: BLE001 - the stage counts it, says it, and ends the link
            self.stage.failed(error)
        del received[:start]

    def eof_received(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self.end(Reason.PEER_LOST, f"{self.address} closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self.end(Reason.PEER_LOST, f"the connection to {self.address} broke: {error or 'closed'}")
        if self._linger is not None:
            self._linger.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._paused = True

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._paused = False
        self._flush()

    # For stages and the node

    @property
    def ended(self) -> bool:
        """Nothing comes and goes any more."""
        return self._ended

    def post(self, frame: bytes) -> bool:
        """Queue a frame, from any thread, without waiting. False if the connection has ended or ends by this."""
        with self._lock:
            if self._ended:
                return False
            self._queued += len(frame)
            full = self._queued > MAX_QUEUE_BYTES
            if not full:
                self._outbox.append(frame)
                if self._flush_due:
                    return True
                self._flush_due = True
            # On the loop's own thread, where most answers are given, nobody needs to be woken.
            soon = self._loop.call_soon if get_ident() == self._thread else self._loop.call_soon_threadsafe
            try:
                soon(self._overflow if full else self._flush)
            except RuntimeError:  # The loop has been closed, and with it all connections.
                return False
            return not full

    def write(self, frame: bytes) -> None:
        """Send a frame of the handshake, while nothing is queued yet."""
        if self._transport is not None and not self._ended:
            self._transport.write(frame)

    def quiet(self) -> bool:
        """Whether nothing has been sent since the last call."""
        quiet, self._spoke = not self._spoke, False
        return quiet

    def end(self, reason: Reason, detail: str, last_words: bytes | None = None) -> None:
        """End it, once. ``last_words``: a frame for the peer, after all that is queued; None drops the socket."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            queued, self._outbox = self._outbox, []
        transport = self._transport
        if last_words is None:
            self.abort()
        elif transport is not None:
            # Closing with unread input would reset the connection, and the reset may overtake the last words. So only
            # our half is closed, and the rest when the peer has closed its own or had its time.
            transport.write(b"".join((*queued, last_words)))
            transport.write_eof()
            self._linger = self._loop.call_later(LINGER_SECONDS, transport.abort)
        self.stage.ended(reason, detail)

    def abort(self) -> None:
        """Close the socket of an ended link now."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        with self._lock:
            self._flush_due = False
            if self._ended or self._transport is None or self._paused:
                return
            frames, self._outbox = self._outbox, []
        if frames:
            self._spoke = True
            self._transport.write(b"".join(frames))
        with self._lock:
            waiting = sum(map(len, self._outbox))
            self._queued = self._transport.get_write_buffer_size() + waiting

    def _overflow(self) -> None:
        self.end(Reason.TABLE_FULL, f"{self.address} doesn't read: more than {MAX_QUEUE_BYTES} bytes wait for it")


def _set_options(connection: socket.socket) -> None:
    """Have the kernel notice a vanished host too, even if this process is stopped. asyncio has set TCP_NODELAY."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
