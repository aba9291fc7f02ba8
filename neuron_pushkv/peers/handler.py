"""What a node tells whoever uses it."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from neuron_pushkv.errors import Reason
from neuron_pushkv.wire import AnyMessage, Hello, Identity

Connection: TypeAlias = int
"""Opaque, never used again in a process."""

WORKER = "worker"
"""The role between ranks that exchange KV, with one connection per pair. See :class:`~neuron_pushkv.wire.Hello`."""
RANK = "rank"
"""The role of a worker at its own engine's directory."""
LOOKUP = "lookup"
"""The role of a worker at another engine's directory."""
ROUTER = "router"
"""The role of a router at a directory."""
DOCTOR = "doctor"
"""The role of ``pushkv doctor`` at a rank, which tells it what its KV cache is like, and at another doctor."""


class Handler(Protocol):
    """All of it is called on the node's one thread and must not block.

    An exception other than :class:`~neuron_pushkv.errors.HandshakeRefused` is a bug: it is counted as ``internal``,
    logged with its traceback and ends the connection that it was about, and no other.
    """

    def identity(self, role: str, hello: Hello) -> tuple[Identity, int | None]:
        """Our identity for this connection, and a token: the transport endpoint opened for it, or None.

        As opener it is asked for before our proof is sent (``hello`` is our own), as acceptor after the opener has
        proved itself and passed ``check`` (``hello`` is theirs). May raise HandshakeRefused.
        """

    def check(self, role: str, theirs: Identity) -> None:
        """Raise HandshakeRefused, with both values named, if there is nothing to be had from that side."""

    def discard(self, token: int) -> None:
        """The handshake that ``identity`` gave this token for has failed: give the endpoint back."""

    def up(
        self, connection: Connection, role: str, theirs: Identity, token: int | None, opened: tuple[str, int] | None
    ) -> None:
        """A connection stands. ``opened``: the host and port of the ``open()`` that it answers, None if of none."""

    def down(self, connection: Connection, reason: Reason, detail: str) -> None:
        """It has ended: exactly once for each ``up``, whatever the end was."""

    def unreachable(self, role: str, host: str, port: int, reason: Reason, detail: str) -> None:
        """An ``open()`` got no connection of its own; each gets either this or ``up``, once.

        With ``Reason.DUPLICATE`` nothing has failed: the pair's connection, whose ``up`` has been called, serves.
        """

    def received(self, connection: Connection, message: AnyMessage) -> None:
        """A message, in the order of sending. Never one of the handshake, a Ping or a Bye."""
