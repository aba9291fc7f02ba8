"""A worker's line to its own engine's directory, in the scheduler process: where it listens, and what it has let go."""

from __future__ import annotations

import logging
from collections import deque

from neuron_pushkv.peers import Node
from neuron_pushkv.wire import Freed, Listening, Rank

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
REPEATED_REQUESTS = 1 << 16
"""Freed requests that are told again on a new line, because the old one may have ended before they were read."""


class Home:
    """Keeps the line open. The directory starts after its workers, so the first attempts may well fail."""

    def __init__(
        self,
        node: Node,
        directory: tuple[str, int],
        rank: Rank,
        listening: tuple[str, int],
        provider: str,
        library: str,
    ) -> None:
        self._node = node
        self._directory = directory
        self._rank = rank
        self._listening = Listening(rank, *listening, provider, library)
        self._connection: int | None = None
        self._retry_at: float | None = None
        self._freed: deque[tuple[str, int]] = deque(maxlen=REPEATED_REQUESTS)
        self._last_failure = ""

    def open(self) -> None:
        """Begin to connect."""
        self._retry_at = None
        self._node.open("rank", *self._directory)

    def up(self, connection: int) -> None:
        """The line is there: say where we listen, and all that was let go before."""
        self._connection = connection
        self._node.send(connection, self._listening)
        if self._freed:
            self._node.send(connection, Freed(self._rank, tuple(self._freed)))

    def is_line(self, connection: int) -> bool:
        """Whether that connection is it."""
        return connection == self._connection

    def down(self, connection: int) -> None:
        """Some connection has ended; if it was this one, another follows."""
        if connection == self._connection:
            self._connection = None
            self._retry_at = 0.0

    def unreachable(self, detail: str) -> None:
        """It could not be opened this time."""
        self._retry_at = 0.0
        if detail != self._last_failure:
            logger.info("waiting for this engine's directory: %s", detail)
        self._last_failure = detail

    def tick(self, now: float) -> None:
        """Try again when it is time."""
        if self._retry_at is None:
            return
        if self._retry_at == 0.0:
            self._retry_at = now + RETRY_SECONDS
        elif self._retry_at <= now:
            self.open()

    def freed(self, request: str, asked: int) -> None:
        """Nothing reads that request's kept blocks any more; ``asked`` as in :class:`~neuron_pushkv.wire.Freed`."""
        self._freed.append((request, asked))
        if self._connection is not None:
            self._node.send(self._connection, Freed(self._rank, ((request, asked),)))
