"""Which connection leads to the sender that a request names. Pure: says what to open, opens nothing.

A request names the directory of the sender's engine (host and port). The directory is asked once where that engine's
worker of our own rank listens; from then on every request for it goes over the one connection to that worker, until the
connection ends, after which the directory is asked anew: the engine may have come back with other addresses. An engine
that is just starting answers before its workers are there, so it is asked again for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from neuron_pushkv.errors import Reason
from neuron_pushkv.wire import Identity, Rank

Address: TypeAlias = tuple[str, int]


RETRY_SECONDS = 0.1
"""Between two look-ups at a directory whose workers aren't there yet."""


@dataclass
class Found:
    """What came of a look-up or a connection: requests that can go on, that can't, and an address to open next."""

    connection: int = -1
    connected: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    reason: Reason = Reason.UNREACHABLE
    detail: str = ""
    open_worker: Address | None = None


class Routes:
    """Routes from the worker of ``rank`` to its like in other engines. ``patience``: seconds for those to start."""

    def __init__(self, rank: Rank, patience: float) -> None:
        self._rank = rank
        self._patience = patience
        self._since: dict[Address, float] = {}
        self._again: dict[Address, float] = {}
        self._connections: dict[str, int] = {}
        self._engines: dict[Address, str] = {}
        self._waiting: dict[Address, list[str]] = {}
        self._opening: dict[Address, set[Address]] = {}

    def want(self, directory: Address, request: str, now: float) -> int | None:
        """The connection to use now, or None: then the request waits for one of the other methods to name it."""
        engine = self._engines.get(directory)
        if engine is not None and engine in self._connections:
            return self._connections[engine]
        self._waiting.setdefault(directory, []).append(request)
        self._since.setdefault(directory, now)
        return None

    def must_look_up(self, directory: Address) -> bool:
        """Whether the request that has just begun to wait is the first one, so that the directory is to be asked."""
        return len(self._waiting.get(directory, ())) == 1

    def looked_up(self, directory: Address, theirs: Identity, now: float) -> Found:
        """The directory has answered."""
        address = next(((host, port) for rank, host, port in theirs.ranks if rank.shard == self._rank.shard), None)
        if not theirs.ready and now < self._since.get(directory, now) + self._patience:
            self._again[directory] = now + RETRY_SECONDS
            return Found()
        if not theirs.ready or address is None:
            text = f"engine {theirs.engine_id} has no ready worker of {self._rank}; start it with the same sizes"
            return self._give_up(directory, Reason.UNREACHABLE, text)
        self._engines[directory] = theirs.engine_id
        if theirs.engine_id in self._connections:
            return Found(self._connections[theirs.engine_id], self._served(directory))
        opening = self._opening.setdefault(address, set())
        opening.add(directory)
        return Found(open_worker=address if len(opening) == 1 else None)

    def due(self, now: float) -> list[Address]:
        """Directories to ask again now."""
        due = [directory for directory, when in self._again.items() if when <= now]
        for directory in due:
            del self._again[directory]
        return due

    def unreachable(self, role: str, address: Address, reason: Reason, detail: str) -> Found:
        """A look-up, or a connection to a worker, has failed."""
        if role == "lookup":
            return self._give_up(address, reason, detail)
        directories = self._opening.pop(address, ())
        failed = [request for directory in directories for request in self._served(directory)]
        return Found(failed=failed, reason=reason, detail=detail)

    def up(self, connection: int, theirs: Identity, opened: Address | None) -> Found:
        """A worker's connection is up, whoever opened it."""
        self._connections[theirs.engine_id] = connection
        if opened is not None:
            self._opening.pop(opened, None)
        directories = [directory for directory, engine in self._engines.items() if engine == theirs.engine_id]
        return Found(connection, [request for directory in directories for request in self._served(directory)])

    def down(self, connection: int) -> None:
        """It has ended; the next request asks the directory again."""
        for engine in [engine for engine, known in self._connections.items() if known == connection]:
            del self._connections[engine]
            for directory in [d for d, named in self._engines.items() if named == engine]:
                del self._engines[directory]

    def _give_up(self, directory: Address, reason: Reason, detail: str) -> Found:
        return Found(failed=self._served(directory), reason=reason, detail=detail)

    def _served(self, directory: Address) -> list[str]:
        """Those that waited for it; they wait no more."""
        self._since.pop(directory, None)
        self._again.pop(directory, None)
        return self._waiting.pop(directory, [])
