"""A node with a handler that writes down what it is told, and a stranger that speaks the protocol by hand."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from neuron_pushkv.errors import HandshakeRefused, Reason
from neuron_pushkv.peers import Node
from neuron_pushkv.peers.handshake import Acceptor, Opener, Ours
from neuron_pushkv.wire import (
    HEADER_BYTES,
    AnyMessage,
    Hello,
    Identity,
    Message,
    Ping,
    Rank,
    body_length,
    decode,
    encode,
)

HOST = "127.0.0.1"
KEY = b"the fleet's key"
PATIENCE = 10.0
"""Seconds until a wait fails: far more than anything here takes."""


class Up(NamedTuple):
    connection: int
    role: str
    theirs: Identity
    token: int | None
    opened: tuple[str, int] | None


class Down(NamedTuple):
    connection: int
    reason: Reason
    detail: str


class Unreachable(NamedTuple):
    role: str
    host: str
    port: int
    reason: Reason
    detail: str


class Received(NamedTuple):
    connection: int
    message: AnyMessage


class Discarded(NamedTuple):
    token: int


class Party:
    """One side. ``raising`` names handler methods that fail, ``refuse`` is what ``check`` raises."""

    def __init__(
        self,
        engine_id: str,
        *,
        incarnation: int = 1,
        rank: Rank = Rank(),
        key: bytes | None = KEY,
        refuse: HandshakeRefused | None = None,
        raising: set[str] | None = None,
        **seconds: float,
    ) -> None:
        self.identity_sent = Identity(engine_id, incarnation, rank)
        self.refuse = refuse
        self.raising = raising or set()
        self.events: list[Any] = []
        self._changed = threading.Condition()
        self._tokens = itertools.count(100)
        self.node = Node(handler=self, engine_id=engine_id, incarnation=incarnation, rank=rank, key=key, **seconds)

    def __enter__(self) -> Party:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.close()
        self.check_once_each()

    def identity(self, role: str, hello: Hello) -> tuple[Identity, int | None]:
        self._maybe_raise("identity")
        return self.identity_sent, next(self._tokens)

    def check(self, role: str, theirs: Identity) -> None:
        self._maybe_raise("check")
        if self.refuse is not None:
            raise self.refuse

    def discard(self, token: int) -> None:
        self._note(Discarded(token))

    def up(self, *arguments: Any) -> None:
        self._note(Up(*arguments))
        self._maybe_raise("up")

    def down(self, *arguments: Any) -> None:
        self._note(Down(*arguments))
        self._maybe_raise("down")

    def unreachable(self, *arguments: Any) -> None:
        self._note(Unreachable(*arguments))
        self._maybe_raise("unreachable")

    def received(self, *arguments: Any) -> None:
        self._note(Received(*arguments))
        self._maybe_raise("received")

    def _note(self, event: object) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def _maybe_raise(self, method: str) -> None:
        if method in self.raising:
            raise RuntimeError(f"a bug in {method}")

    def of(self, kind: type[Any]) -> list[Any]:
        """All events of that kind so far."""
        with self._changed:
            return [event for event in self.events if type(event) is kind]

    def wait(self, kind: type[Any], count: int = 1, seconds: float = PATIENCE) -> Any:
        """The ``count``-th event of that kind, once it is there."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._has(kind, count), seconds)
            assert there, f"no {kind.__name__} number {count} within {seconds} s; there were {self.events}"
        return self.of(kind)[count - 1]

    def _has(self, kind: type[Any], count: int) -> bool:
        return sum(type(event) is kind for event in self.events) >= count

    def listen(self) -> tuple[str, int]:
        return self.node.listen(HOST, 0)

    def check_once_each(self) -> None:
        """After close: one down per up, and every token either went up or was given back, once."""
        ups = [up.connection for up in self.of(Up)]
        assert len(set(ups)) == len(ups)
        assert sorted(ups) == sorted(down.connection for down in self.of(Down)), self.events
        tokens = [up.token for up in self.of(Up)] + [gone.token for gone in self.of(Discarded)]
        if not {"identity", "check"} & self.raising and self.refuse is None:
            assert sorted(tokens) == list(range(100, next(self._tokens))), self.events


def connect(here: Party, there: Party) -> tuple[Up, Up]:
    """Open a worker connection; returns both sides' ``up``."""
    seen = len(here.of(Up)), len(there.of(Up))
    here.node.open("worker", *there.listen())
    return here.wait(Up, seen[0] + 1), there.wait(Up, seen[1] + 1)


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until it holds; for what no event tells."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)


class Stranger:
    """A bare socket that speaks frames."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(PATIENCE)

    @classmethod
    def connect(cls, address: tuple[str, int]) -> Stranger:
        return cls(socket.create_connection(address, PATIENCE))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes | Message) -> None:
        with contextlib.suppress(ConnectionError):  # It may have hung up on us already.
            self.socket.sendall(encode(data) if isinstance(data, Message) else data)

    def body(self) -> bytes:
        """The next frame that isn't a Ping; raises EOFError at the end."""
        while True:
            body = self._exactly(body_length(self._exactly(HEADER_BYTES)))
            if not isinstance(decode(body), Ping):
                return body

    def message(self) -> AnyMessage:
        return decode(self.body())

    def ended(self) -> bool:
        """Reads on until the other side has closed, which must happen in time."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            try:
                more = self.socket.recv(length - len(data))
            except ConnectionError as error:
                raise EOFError from error
            if not more:
                raise EOFError
            data += more
        return data

    def prove(self, name: Ours, role: str = "worker") -> None:
        """The opener's part, up to the proof; the answer is left to be read."""
        opener = Opener(name, role)
        self.send(opener.hello())
        opener.challenge(self.body())
        self.send(opener.proof(Identity(name.engine_id, name.incarnation, name.rank)))

    def challenge(self, name: Ours) -> Acceptor:
        """The acceptor's part, up to its challenge."""
        acceptor = Acceptor(name)
        _, frame = acceptor.hello(self.body())
        self.send(frame)
        return acceptor


@contextlib.contextmanager
def listener(backlog: int = 16) -> Iterator[socket.socket]:
    """A socket that listens and does nothing else."""
    with socket.create_server((HOST, 0), backlog=backlog) as listening:
        listening.settimeout(PATIENCE)
        yield listening
