"""A process's control connections: one thread that listens, opens, watches and ends them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from neuron_pushkv.config import FLEET_KEY_VARIABLE
from neuron_pushkv.errors import ConfigError, Reason
from neuron_pushkv.peers.accepting import Strangers
from neuron_pushkv.peers.core import Core, Timing
from neuron_pushkv.peers.handler import Connection, Handler
from neuron_pushkv.peers.handshake import Ours
from neuron_pushkv.peers.link import Link
from neuron_pushkv.peers.opening import Openings
from neuron_pushkv.wire import MAX_NAME, Bye, Message, Ping, Rank, encode

logger = logging.getLogger(__name__)

BACKLOG = 1024
CLOSE_SECONDS = 0.5
"""How long the peers' sockets have to take our Bye when the node closes."""
JOIN_SECONDS = 10.0
RESOLVERS = 32
"""Host names that may be looked up at once: a name server that doesn't answer holds each of these threads for long."""


class Node:
    """All times are in seconds. Every method may be called from any thread, and none of them waits for a peer.

    ``key``: the fleet key; without it the node listens on loopback only. ``connect_seconds`` bounds an ``open()`` and
    a stranger's handshake; one that failed is answered from memory for ``unreachable_seconds``. A connection is pinged
    when nothing was sent for ``ping_seconds``, and ends after ``silence_seconds`` in which nothing came.
    """

    def __init__(
        self,
        *,
        handler: Handler,
        engine_id: str,
        incarnation: int,
        rank: Rank,
        key: bytes | None,
        connect_seconds: float = 2.0,
        unreachable_seconds: float = 1.0,
        silence_seconds: float = 10.0,
        ping_seconds: float = 1.0,
    ) -> None:
        if len(engine_id) > MAX_NAME:
            raise ConfigError(f"engine_id has {len(engine_id)} characters; the limit is {MAX_NAME}")
        self._key = key or b""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._loop_failed)
        self._loop.set_default_executor(ThreadPoolExecutor(RESOLVERS, "pushkv-resolve"))
        timing = Timing(connect_seconds, unreachable_seconds, silence_seconds, ping_seconds)
        self._core = Core(self._loop, handler, Ours(engine_id, incarnation, rank, self._key), timing)
        self._openings = Openings(self._core)
        self._strangers = Strangers(self._core, self._openings)
        self._servers: list[asyncio.Server] = []
        self._silent: dict[Link, int] = {}
        self._tick_seconds = min(ping_seconds, silence_seconds / 4)
        self._patience = math.ceil(silence_seconds / self._tick_seconds)
        self._ping = encode(Ping())
        self._lock = threading.Lock()
        self._closed = False
        self._stop = asyncio.Event()
        self._stop_reason = Reason.SHUTDOWN
        self._thread = threading.Thread(target=self._run, name=f"pushkv-peers-{engine_id}", daemon=True)
        self._thread.start()

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept connections at ``host``; port 0 takes a free one. Returns the host as given, and the port.

        Raises :class:`ConfigError` if the port is taken, the host isn't ours, or can be reached by others while there
        is no key. Not for the node's own thread.
        """
        if self._closed:
            raise ConfigError(f"can't listen on {host}:{port}: this node is closed")
        listener = _bind(host, port, loopback_only=not self._key)
        bound = int(listener.getsockname()[1])
        asyncio.run_coroutine_threadsafe(self._serve(listener), self._loop).result()
        return host, bound

    def open(self, role: str, host: str, port: int) -> None:
        """Connect, in the background. The handler hears ``up`` or ``unreachable``, once, unless the node is closed."""
        self._soon(self._openings.open, role, host, port)

    def send(self, connection: Connection, message: Message) -> bool:
        """Queue a message; False if the connection has ended. The order of one thread's messages is kept.

        A full queue ends the connection. Raises :class:`~neuron_pushkv.errors.WireError` for one that is too long.
        """
        link = self._core.links.get(connection)
        return link is not None and link.post(encode(message))

    def drop(self, connection: Connection, reason: Reason, detail: str) -> None:
        """End a connection once all that is queued has been sent, telling the peer why; ``down`` follows."""
        self._soon(self._drop, connection, reason, detail)

    def refusals(self) -> dict[Reason, int]:
        """Handshakes and frames that were refused since the last call, by either side."""
        return self._core.take_counts()

    def close(self, reason: Reason = Reason.SHUTDOWN) -> None:
        """Say Bye to all peers and end the thread. Everything that is up or being opened is ended first.

        Idempotent. Don't hold a lock that the handler takes.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._stop_reason = reason
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                logger.error("a handler has blocked %s for %g s; it is left behind", self._thread.name, JOIN_SECONDS)

    def _soon(self, function: Any, *arguments: Any) -> None:
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function, *arguments)

    # The node's thread.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        watching = self._loop.create_task(self._watch())
        await self._stop.wait()
        watching.cancel()
        core = self._core
        core.closing = True
        for server in self._servers:
            server.close()
        self._openings.close()
        self._strangers.close()
        for link in list(core.links.values()):
            link.end(self._stop_reason, "this node is closing", encode(Bye(self._stop_reason)))
        # Openings that were cancelled, and sockets that the listener had accepted but no stage has seen.
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        for seconds in (CLOSE_SECONDS, CLOSE_SECONDS):
            open_sockets = list(core.sockets)
            if open_sockets:
                await asyncio.wait([link.lost for link in open_sockets], timeout=seconds)
            for link in list(core.sockets):
                link.abort()

    async def _serve(self, listener: socket.socket) -> None:
        self._servers.append(await self._loop.create_server(self._strangers.link, sock=listener, backlog=BACKLOG))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            silent: dict[Link, int] = {}
            for link in list(self._core.links.values()):
                silent[link] = 0 if link.heard else self._silent.get(link, 0) + 1
                link.heard = False
                if silent[link] > self._patience:
                    seconds = self._core.timing.silence
                    link.end(Reason.PEER_LOST, f"nothing has come from {link.address} for {seconds:g} s")
                elif link.quiet():
                    link.post(self._ping)
            self._silent = silent

    def _drop(self, connection: Connection, reason: Reason, detail: str) -> None:
        link = self._core.links.get(connection)
        if link is not None:
            link.end(reason, detail, encode(Bye(reason)))

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio met something that no stage did, such as no descriptor being left for a new connection."""
        self._core.count(Reason.INTERNAL, f"{context.get('message')}: {context.get('exception')!r}")


def _bind(host: str, port: int, *, loopback_only: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host} can't be listened on: {error.strerror}") from error
    if loopback_only and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"host {host} can be reached from other machines, so a fleet key is needed: set fleet_key_file "
            f"or {FLEET_KEY_VARIABLE}"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken by another process; configure a free one") from error
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from error
    return listener
