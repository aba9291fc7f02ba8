"""One authenticated connection by blocking calls, each bounded: a doctor has nothing else to do meanwhile."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import Self

from neuron_pushkv import __version__, versions
from neuron_pushkv.errors import HandshakeRefused, Reason, WireError
from neuron_pushkv.peers.handshake import Acceptor, Opener, Ours
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.wire import (
    HEADER_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_HELLO_BYTES,
    EngineStatus,
    Hello,
    Identity,
    Rank,
    Refused,
    body_length,
    encode,
)


def ours(key: bytes | None) -> Ours:
    """Who a doctor is: somebody else every time."""
    return Ours(f"doctor-{socket.gethostname()[:64]}", secrets.randbits(63), Rank(), key or b"")


def status(us: Ours, transport: Transport | None) -> EngineStatus:
    """What a doctor is, as an engine would say it; that it has no ranks tells that it is none."""
    return EngineStatus(
        us.engine_id,
        us.incarnation,
        ready=True,
        ranks=0,
        provider=transport.provider if transport is not None else "",
        library=transport.library if transport is not None else "",
        kept_requests=0,
        release=__version__,
        vllm=versions.vllm()[1],
    )


class Line:
    """A connected socket that carries frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Whatever has not been sent by then isn't."""
        self._socket.close()

    def write(self, frame: bytes) -> None:
        """Send a whole frame."""
        self._socket.sendall(frame)

    def read(self, seconds: float, limit: int = MAX_HANDSHAKE_BYTES) -> bytes:
        """The next frame's body. Raises :class:`WireError` for what is none, ``TimeoutError``, ``EOFError``."""
        deadline = time.monotonic() + seconds
        return self._exactly(body_length(self._exactly(HEADER_BYTES, deadline), limit), deadline)

    def _exactly(self, size: int, deadline: float) -> bytes:
        got = bytearray()
        while len(got) < size:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(size - len(got))
            if not part:
                raise EOFError("the connection was closed")
            got += part
        self._socket.settimeout(max(1.0, deadline - time.monotonic()))
        return bytes(got)


def call(host: str, port: int, role: str, us: Ours, seconds: float) -> tuple[Line, Identity]:
    """Connect, and shake hands as somebody of that role; all of it takes ``seconds``.

    Raises :class:`HandshakeRefused`, :class:`WireError`, ``OSError`` or ``EOFError``.
    """
    deadline = time.monotonic() + seconds
    line = Line(socket.create_connection((host, port), seconds))
    try:
        opener = Opener(us, role)
        line.write(opener.hello())
        opener.challenge(line.read(deadline - time.monotonic()))
        line.write(opener.proof(Identity(us.engine_id, us.incarnation, us.rank)))
        return line, opener.welcome(line.read(deadline - time.monotonic()))
    except BaseException:
        line.close()
        raise


def answer(line: Line, us: Ours, check: Callable[[str], None], seconds: float) -> Hello:
    """The other side of it: returns the hello of whoever has proved itself and passed ``check`` of its role.

    Raises the same.
    """
    deadline = time.monotonic() + seconds
    acceptor = Acceptor(us)
    try:
        hello, challenge = acceptor.hello(line.read(seconds, MAX_HELLO_BYTES))
        line.write(challenge)
        acceptor.proof(line.read(deadline - time.monotonic()))
        check(hello.role)
        line.write(acceptor.welcome(Identity(us.engine_id, us.incarnation, us.rank)))
    except (HandshakeRefused, WireError) as refusal:
        line.write(encode(Refused(refusal.reason, str(refusal))))
        raise
    return hello


def refused(role: str) -> HandshakeRefused:
    """For who has no business with a doctor."""
    return HandshakeRefused(Reason.REFUSED, f"this is `pushkv doctor --serve`, which no '{role}' talks to")
