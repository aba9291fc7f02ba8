"""An engine's directory: where its workers listen, and which kept requests all of them have let go.

It lives in the scheduler's process. The engine's own workers report to it, other engines' workers ask it for addresses,
and routers for the engine's state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from neuron_pushkv import __version__, versions
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import HandshakeRefused, Reason, WireError
from neuron_pushkv.peers import Connection, Node
from neuron_pushkv.peers.handler import LOOKUP, RANK, ROUTER
from neuron_pushkv.peers.handshake import Opener, Ours
from neuron_pushkv.wire import (
    HEADER_BYTES,
    MAX_HANDSHAKE_BYTES,
    AnyMessage,
    Bye,
    EngineStatus,
    Freed,
    Hello,
    Identity,
    LetGo,
    Listening,
    Rank,
    Status,
    body_length,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

GONE_SECONDS = 10.0
"""How long a rank's connection may be away before the rank counts as dead. A live one is back within a second, and
must be given ample time: its writes still read the blocks that its death sets free."""


@dataclass
class _Worker:
    """What is known of one rank."""

    connection: Connection
    incarnation: int
    listening: Listening | None = None
    lost_at: float | None = None


@dataclass
class _Kept:
    """A request whose blocks are held. ``freed`` by these ranks, ``got`` from these by all that were to get it."""

    freed: set[Rank] = field(default_factory=set)
    got: set[Rank] = field(default_factory=set)


class Directory:
    """Listens at once, on the settings' host; raises :class:`~neuron_pushkv.errors.ConfigError` if it can't.

    ``ranks`` is how many workers the engine has. Methods may be called from any thread and don't wait for a peer.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        engine_id: str,
        incarnation: int,
        port: int,
        ranks: int,
        gone_seconds: float = GONE_SECONDS,
    ) -> None:
        self._identity = Identity(engine_id, incarnation, Rank())
        self._ranks = ranks
        self._gone_seconds = gone_seconds
        self._vllm = versions.vllm()[1]
        self._lock = threading.Lock()
        self._workers: dict[Rank, _Worker] = {}
        self._roles: dict[Connection, tuple[str, Rank]] = {}
        self._kept: dict[str, _Kept] = {}
        self._freed: list[str] = []
        self._node = Node(
            handler=self,
            engine_id=engine_id,
            incarnation=incarnation,
            rank=Rank(),
            key=settings.key(),
            connect_seconds=settings.connect_seconds,
            unreachable_seconds=settings.unreachable_seconds,
        )
        try:
            self.address = self._node.listen(settings.host, port)
        except BaseException:
            self._node.close()
            raise

    def keep(self, request: str) -> None:
        """This request's blocks are held from now on, until every rank has reported it freed."""
        with self._lock:
            self._kept.setdefault(request, _Kept())

    def kept(self) -> int:
        """How many requests are held."""
        with self._lock:
            return len(self._kept)

    def take_freed(self) -> list[str]:
        """The held requests that no rank reads any more, each once."""
        with self._lock:
            now = time.monotonic()
            for rank, worker in self._workers.items():
                if worker.lost_at is not None and now - worker.lost_at >= self._gone_seconds:
                    self._let_go(rank, [(request, 0) for request in self._kept])
            freed, self._freed = self._freed, []
            return freed

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        self._node.close()

    # peers.Handler

    def check(self, role: str, theirs: Identity) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        ours = self._identity.engine_id
        if role not in (RANK, LOOKUP, ROUTER):
            raise HandshakeRefused(
                Reason.REFUSED, f"this is the directory of engine {ours}, which no '{role}' talks to"
            )
        if role != RANK:
            return
        if theirs.engine_id != ours:
            raise HandshakeRefused(
                Reason.REFUSED,
                f"a worker of engine {theirs.engine_id} has come to the directory of engine {ours}; "
                "give each engine a port of its own",
            )
        with self._lock:
            if theirs.rank not in self._workers and len(self._workers) >= self._ranks:
                raise HandshakeRefused(
                    Reason.TABLE_FULL, f"{theirs.rank} has come, but engine {ours} has its {self._ranks} ranks already"
                )

    def identity(self, role: str, hello: Hello) -> tuple[Identity, None]:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        ours = self._identity
        with self._lock:
            there = [said for _, said in self._there()]
        ranks = tuple((said.rank, said.host, said.port) for said in there)
        ready = len(ranks) == self._ranks
        return Identity(ours.engine_id, ours.incarnation, ours.rank, ranks=ranks, ready=ready), None

    def discard(self, token: int) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`. There are no tokens here."""

    def up(
        self, connection: Connection, role: str, theirs: Identity, token: int | None, opened: tuple[str, int] | None
    ) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            self._roles[connection] = (role, theirs.rank)
            if role != RANK:
                return
            before = self._workers.get(theirs.rank)
            if before is not None and before.incarnation != theirs.incarnation:
                self._let_go(theirs.rank, [(request, 0) for request in self._kept])
            self._workers[theirs.rank] = _Worker(connection, theirs.incarnation)

    def down(self, connection: Connection, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            role, rank = self._roles.pop(connection)
            worker = self._workers.get(rank)
            if role == RANK and worker is not None and worker.connection == connection:
                worker.lost_at = time.monotonic()
                logger.info("worker %s of this engine has left: %s (%s)", rank, detail, reason)

    def unreachable(self, role: str, host: str, port: int, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`. A directory opens nothing."""

    def received(self, connection: Connection, message: AnyMessage) -> None:
        """See :class:`~neuron_pushkv.peers.Handler`."""
        with self._lock:
            role, rank = self._roles[connection]
            match message:
                case Listening() if role == RANK and message.rank == rank:
                    self._workers[rank].listening = message
                    return
                case Freed() if role == RANK and message.rank == rank:
                    self._let_go(rank, message.requests)
                    return
                case Status() if role == ROUTER:
                    answer = self._status()
                case _:
                    raise WireError(Reason.BAD_FRAME, f"a {role} has no business with {type(message).__name__}")
        self._node.send(connection, answer)

    # Under the lock.

    def _let_go(self, rank: Rank, requests: Iterable[tuple[str, int]]) -> None:
        """Where fewer ranks than all were asked, as for heads that several hold, the rest is told by us."""
        unasked: dict[Rank, list[str]] = {}
        for request, asked in requests:
            kept = self._kept.get(request)
            if kept is None:
                continue
            kept.freed.add(rank)
            if len(kept.freed) >= self._ranks:
                del self._kept[request]
                self._freed.append(request)
            elif asked:
                kept.got.add(rank)
                if len(kept.got) >= asked:
                    for other in self._workers.keys() - kept.freed:
                        unasked.setdefault(other, []).append(request)
        for other, names in unasked.items():
            self._node.send(self._workers[other].connection, LetGo(tuple(names)))

    def _there(self) -> list[tuple[Rank, Listening]]:
        """The ranks that are connected and have said where they listen, in order."""
        workers = sorted(self._workers.items())
        return [(rank, each.listening) for rank, each in workers if each.listening is not None and each.lost_at is None]

    def _status(self) -> EngineStatus:
        there = self._there()
        return EngineStatus(
            engine_id=self._identity.engine_id,
            incarnation=self._identity.incarnation,
            ready=len(there) == self._ranks,
            ranks=self._ranks,
            provider=", ".join(sorted({said.provider for _, said in there})),
            library=", ".join(sorted({said.library for _, said in there})),
            kept_requests=len(self._kept),
            release=__version__,
            vllm=self._vllm,
        )


async def query_status(host: str, port: int, key: bytes | None, seconds: float) -> EngineStatus:
    """Ask the directory at ``host``:``port`` as a router does; all of it takes ``seconds`` at most.

    Raises :class:`HandshakeRefused`, with the reason and one sentence, if there is no answer.
    """
    place = f"{host}:{port}"
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await _ask(reader, writer, key or b"")
            finally:
                writer.close()
    except TimeoutError as error:
        raise HandshakeRefused(Reason.TIMEOUT, f"{place} did not answer within {seconds:g} s") from error
    except asyncio.IncompleteReadError as error:
        raise HandshakeRefused(Reason.UNREACHABLE, f"{place} closed the connection without an answer") from error
    except (OSError, ValueError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number and number > 0 else error
        raise HandshakeRefused(Reason.UNREACHABLE, f"{place} can't be reached: {why}") from error
    except (HandshakeRefused, WireError) as error:
        raise HandshakeRefused(error.reason, f"{place}: {error}") from error


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> EngineStatus:
    async def body() -> bytes:
        return await reader.readexactly(body_length(await reader.readexactly(HEADER_BYTES), MAX_HANDSHAKE_BYTES))

    ours = Ours("router", secrets.randbits(63), Rank(), key)
    opener = Opener(ours, ROUTER)
    writer.write(opener.hello())
    opener.challenge(await body())
    writer.write(opener.proof(Identity(ours.engine_id, ours.incarnation, ours.rank)))
    opener.welcome(await body())
    writer.write(encode(Status()))
    answer = decode(await body())
    if not isinstance(answer, EngineStatus):
        raise WireError(Reason.BAD_FRAME, f"{type(answer).__name__} came where EngineStatus was due")
    writer.write(encode(Bye(Reason.SHUTDOWN)))
    return answer
