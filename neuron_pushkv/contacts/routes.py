"""How a worker finds its peers: another engine's directory is asked once, then each rank that holds a share is called.

Connections are kept and shared by all requests; a request waits until all that it needs are there. When one ends, the
directory is asked anew: the engine may have come back with other addresses. An engine that is just starting answers
before its workers are there, so it is asked again for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from neuron_pushkv.errors import LayoutError, Reason
from neuron_pushkv.wire import Identity, Rank

Address: TypeAlias = tuple[str, int]
Worker: TypeAlias = tuple[str, Rank]
"""Engine and rank."""

RETRY_SECONDS = 0.1
"""Between two look-ups at a directory whose workers aren't there yet."""


@dataclass
class Found:
    """What came of a look-up or a connection: requests that can go on, or can't, and addresses to open next.

    ``connections`` are to those of an engine's ``ranks`` that are wanted.
    """

    connections: Mapping[Rank, int] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = ()
    connected: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    reason: Reason = Reason.UNREACHABLE
    detail: str = ""
    open_workers: list[Address] = field(default_factory=list)


@dataclass
class _Place:
    """One directory's address. ``wanted``: those of its engine's ``ranks`` that hold something for us."""

    engine: str = ""
    ranks: tuple[Rank, ...] = ()
    wanted: tuple[Rank, ...] = ()
    waiting: list[str] = field(default_factory=list)
    since: float = 0.0
    again: float | None = None


class Routes:
    """``choose`` says which of an engine's ranks hold a share of what we need; it may raise :class:`LayoutError`.

    ``patience``: seconds for an engine's workers to start.
    """

    def __init__(self, choose: Callable[[tuple[Rank, ...]], tuple[Rank, ...]], patience: float) -> None:
        self._choose = choose
        self._patience = patience
        self._places: dict[Address, _Place] = {}
        self._connections: dict[Worker, int] = {}
        self._opening: dict[Address, set[Address]] = {}
        """Workers that are being called, and the directories that named them."""

    def want(self, directory: Address, request: str, now: float) -> Found | None:
        """How the request can go on now, or None: then it waits for one of the other methods to name it."""
        place = self._places.setdefault(directory, _Place())
        if not place.waiting:
            place.since = now
        place.waiting.append(request)
        return self._complete(place)

    def must_look_up(self, directory: Address) -> bool:
        """Whether the request that has just begun to wait is the first one, so that the directory is to be asked."""
        return len(self._places[directory].waiting) == 1

    def looked_up(self, directory: Address, theirs: Identity, now: float) -> Found:
        """The directory has answered."""
        place = self._places.setdefault(directory, _Place(since=now))
        if not theirs.ready:
            if now < place.since + self._patience:
                place.again = now + RETRY_SECONDS
                return Found()
            text = f"engine {theirs.engine_id} has not all of its workers ready; look at its log"
            return self._give_up(directory, Reason.UNREACHABLE, text)
        addresses = {rank: (host, port) for rank, host, port in theirs.ranks}
        try:
            wanted = self._choose(tuple(addresses))
        except LayoutError as error:
            return self._give_up(directory, Reason.LAYOUT_MISMATCH, str(error))
        if not wanted or any(rank not in addresses for rank in wanted):
            text = f"engine {theirs.engine_id} announces no worker that holds this rank's KV; look at its sizes"
            return self._give_up(directory, Reason.LAYOUT_MISMATCH, text)
        place.engine, place.ranks, place.wanted = theirs.engine_id, tuple(addresses), wanted
        complete = self._complete(place)
        if complete is not None:
            return complete
        found = Found()
        for rank in wanted:
            if (theirs.engine_id, rank) not in self._connections:
                if addresses[rank] not in self._opening:
                    found.open_workers.append(addresses[rank])
                self._opening.setdefault(addresses[rank], set()).add(directory)
        return found

    def due(self, now: float) -> list[Address]:
        """Directories to ask again now."""
        due = [directory for directory, place in self._places.items() if place.again is not None and place.again <= now]
        for directory in due:
            self._places[directory].again = None
        return due

    def unreachable(self, role: str, address: Address, reason: Reason, detail: str) -> Found:
        """A look-up, or a connection to a worker, has failed; unless another one serves that pair."""
        directories = {address} if role == "lookup" else self._opening.pop(address, set())
        if reason is Reason.DUPLICATE:
            return Found()
        failed = [request for directory in sorted(directories) for request in self._lost(directory)]
        return Found(failed=failed, reason=reason, detail=detail)

    def up(self, connection: int, theirs: Identity, opened: Address | None) -> list[Found]:
        """A worker's connection is up, whoever opened it. Answers what can go on now, for each directory."""
        self._connections[theirs.engine_id, theirs.rank] = connection
        if opened is not None:
            self._opening.pop(opened, None)
        places = [place for place in self._places.values() if place.engine == theirs.engine_id and place.waiting]
        return [found for found in map(self._complete, places) if found is not None]

    def down(self, connection: int) -> None:
        """It has ended; the directory is asked again, by the next request or for those that wait already."""
        for worker in [worker for worker, known in self._connections.items() if known == connection]:
            del self._connections[worker]
            for directory in [d for d, place in self._places.items() if place.engine == worker[0]]:
                if self._places[directory].waiting:
                    self._places[directory].again = 0.0
                else:
                    del self._places[directory]

    def _complete(self, place: _Place) -> Found | None:
        """Those that wait there go on if the connections to all that are wanted are known and up."""
        connections = {rank: self._connections.get((place.engine, rank), -1) for rank in place.wanted}
        if not connections or -1 in connections.values():
            return None
        waited, place.waiting, place.again = place.waiting, [], None
        return Found(connections, place.ranks, waited)

    def _give_up(self, directory: Address, reason: Reason, detail: str) -> Found:
        return Found(failed=self._lost(directory), reason=reason, detail=detail)

    def _lost(self, directory: Address) -> list[str]:
        """Those that waited there. What is known of the place may be what is wrong, so it is forgotten."""
        place = self._places.pop(directory, None)
        return place.waiting if place is not None else []
