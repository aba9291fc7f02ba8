"""A network inside one process: real copies between real addresses, with the contract of the real thing.

For tests, and for trying the engine without libfabric. It is as strict as the strictest network: as on EFA, nothing
lands at an endpoint before that endpoint has named the other side, and writes may be asked to land in any order.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import re
import secrets
import threading
import time

from neuron_pushkv.device.base import Memory, ReadyWord
from neuron_pushkv.device.steps import is_reached
from neuron_pushkv.errors import RegistrationError, TransportError
from neuron_pushkv.transport.base import (
    Batch,
    Failed,
    Peer,
    Registration,
    Ticket,
    TransportCounters,
    Written,
)
from neuron_pushkv.transport.counting import CountingTransport
from neuron_pushkv.transport.hub import Endpoint, Task, expand

_READY_PERIOD = 0.0005


class LoopbackNetwork:
    """What transports of one process are connected to. ``unordered``: the writes of a batch land in random order."""

    def __init__(self, *, unordered: bool = False, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.endpoints: dict[bytes, Endpoint] = {}
        self.random = random.Random(seed) if unordered else None
        self._names = itertools.count(1)

    def transport(self) -> LoopbackTransport:
        """A new transport on this network."""
        return LoopbackTransport(self)

    def new_address(self) -> bytes:
        """Never the same twice."""
        return b"loopback:%d" % next(self._names)


class LoopbackTransport(CountingTransport):
    """See the module's text. Everything is guarded by the network's one lock; one thread per transport delivers."""

    provider = "loopback"
    library = "none"
    fence_is_final = True

    def __init__(self, network: LoopbackNetwork) -> None:
        super().__init__(network.lock)
        self._network = network
        self._memories: dict[int, Registration] = {}
        self._peers: dict[Peer, Endpoint] = {}
        self._ids = itertools.count(1)
        self._thread = threading.Thread(target=self._deliver_all, name="loopback", daemon=True)
        self._thread.start()

    def register(self, memory: Memory) -> Registration:
        """Any memory of this process. Addressed by offset, so that nobody gets to rely on virtual addresses."""
        if memory.length <= 0:
            raise RegistrationError("memory of no bytes can't be registered")
        with self._network.lock:
            self._open()
            key = secrets.randbits(63)
            registration = Registration(next(self._ids), memory, b"memory:%d:%d" % (memory.length, key))
            self._memories[registration.handle] = registration
            self._port.memories[key] = memory
            return registration

    def deregister(self, registration: Registration) -> None:
        """Raises :class:`TransportError` while a ticket reads from it."""
        with self._network.lock:
            if self._closed:
                return
            if any(registration.handle in task.handles for peer in self._peers.values() for task in peer.tasks):
                raise TransportError("writes from that memory are under way")
            if self._memories.pop(registration.handle, None) is None:
                raise TransportError("that memory is not registered")
            del self._port.memories[_read(registration.description)[1]]

    def open_peer(self) -> Peer:
        """An endpoint with a name of its own."""
        with self._network.lock:
            self._open()
            peer = next(self._ids)
            endpoint = Endpoint(self._port, self._network.new_address())
            self._peers[peer] = endpoint
            self._network.endpoints[endpoint.address] = endpoint
            return peer

    def address(self, peer: Peer) -> bytes:
        """Raises :class:`TransportError` if the peer is fenced or was never opened."""
        with self._network.lock:
            return self._peer(peer).address

    def connect(self, peer: Peer, address: bytes) -> None:
        """Raises :class:`TransportError` for what can't be the name of an endpoint."""
        if not address.startswith(b"loopback:") or not address[9:].isdigit():
            raise TransportError("that is not an address of a loopback endpoint")
        with self._network.lock:
            endpoint = self._peer(peer)
            if endpoint.other is not None:
                raise TransportError("that peer is connected already")
            endpoint.other = address
            target = self._network.endpoints.get(address)
            for port in {self._port, target.port if target else self._port}:
                port.work.notify_all()

    def attach(self, peer: Peer, description: bytes) -> int:
        """Raises :class:`TransportError` for what can't be the description of such memory."""
        length, key = _read(description)
        with self._network.lock:
            endpoint = self._peer(peer)
            target = next(self._ids)
            endpoint.attached[target] = (length, key)
            return target

    def fence(self, peer: Peer) -> None:
        """Fencing a peer again does nothing. No copy is under way while the network's lock is held."""
        with self._network.lock:
            endpoint = self._peers.pop(peer, None)
            if endpoint is None:
                return
            del self._network.endpoints[endpoint.address]
            while endpoint.tasks:
                self._end(endpoint, endpoint.tasks[0], "the peer was fenced")

    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        """Raises :class:`TransportError` for a peer that isn't connected, or a run outside its registered memory."""
        with self._network.lock:
            endpoint = self._peer(peer)
            if endpoint.other is None:
                raise TransportError("that peer is not connected yet")
            self._check(batch, endpoint)
            writes = sum(product.writes for product in batch)
            pieces = expand(batch, endpoint.attached)
            if self._network.random is not None:
                shuffled = list(pieces)
                self._network.random.shuffle(shuffled)
                pieces = iter(shuffled)
            handles = frozenset(span.registration.handle for product in batch for span in product.spans)
            task = Task(next(self._ids), immediate, ready, writes, pieces, next(pieces, None), handles)
            endpoint.tasks.append(task)
            if task.next is None:
                self._end(endpoint, task, "")
            self._port.work.notify_all()
            return Ticket(task.id, peer, writes, sum(product.bytes for product in batch))

    def _check(self, batch: Batch, endpoint: Endpoint) -> None:
        for product in batch:
            if not product.writes:
                raise TransportError("a product without spans or runs")
            if not product.runs[:, 2].all():
                raise TransportError("a run of no bytes")
            end = max(local + length for local, _, length in product.runs.tolist())
            remote_end = max(remote + length for _, remote, length in product.runs.tolist())
            for span in product.spans:
                if span.registration.handle not in self._memories:
                    raise TransportError("a span names memory that is not registered")
                if span.target not in endpoint.attached:
                    raise TransportError("a span names memory of the peer that is not attached")
                memory = span.registration.memory
                if span.local < memory.address or span.local + end > memory.address + memory.length:
                    raise TransportError("a run leaves the registered memory of its span")
                if span.offset + remote_end > endpoint.attached[span.target][0]:
                    raise TransportError("a run leaves the peer's memory that its span names")

    def _deliver_all(self) -> None:
        while True:
            with self._network.lock:
                if self._closed:
                    return
                found, waiting = False, False
                for endpoint in list(self._peers.values()):
                    for task in list(endpoint.tasks):
                        if not is_reached(task.ready):
                            waiting = True
                        elif self._deliver(endpoint, task):
                            found = True
                            break
                if not found:
                    self._port.work.wait(_READY_PERIOD if waiting else None)
                    continue
            time.sleep(0)  # between any two writes others may fence, cancel, or look

    def _deliver(self, endpoint: Endpoint, task: Task) -> bool:
        """One write. False if the other side has not named us yet."""
        piece, other = task.next, endpoint.other
        assert piece is not None
        assert other is not None
        target = self._network.endpoints.get(other)
        if target is None or target.other not in (None, endpoint.address):
            self._port.counters.errors += 1
            self._end(endpoint, task, "the peer can't be reached")
            return True
        if target.other is None:
            return False
        memory = target.port.memories.get(piece.key)
        if memory is None or piece.remote < 0 or piece.remote + piece.length > memory.length:
            self._port.counters.errors += 1
            self._end(endpoint, task, "the peer has no such memory: wrong key, or outside its bounds")
            return True
        ctypes.memmove(memory.address + piece.remote, piece.source, piece.length)
        task.written += 1
        task.next = next(task.pieces, None)
        self._port.counters.writes += 1
        self._port.counters.bytes += piece.length
        target.port.arrive(task.immediate)
        if task.next is None:
            self._end(endpoint, task, "")
        else:
            endpoint.tasks.rotate(-1)
        return True

    def _end(self, endpoint: Endpoint, task: Task, detail: str) -> None:
        endpoint.tasks.remove(task)
        self._port.tell(Written(task.id) if task.next is None else Failed(task.id, task.written, 0, detail))

    def cancel(self, ticket: int) -> None:
        """A ticket that has ended stays as it is."""
        with self._network.lock:
            for endpoint in self._peers.values():
                for task in endpoint.tasks:
                    if task.id == ticket:
                        self._end(endpoint, task, "cancelled")
                        return

    def counters(self) -> TransportCounters:
        """May be called after close."""
        with self._network.lock:
            return TransportCounters(
                self._port.counters.writes,
                self._port.counters.bytes,
                self._port.counters.arrivals,
                self._port.counters.stale_arrivals,
                self._port.counters.errors,
            )

    def close(self) -> None:
        """Fences everybody and waits for the thread."""
        with self._network.lock:
            for peer in list(self._peers):
                self.fence(peer)
            self._closed = True
            self._port.work.notify_all()
            self._port.happened.notify_all()
        self._thread.join()

    def _peer(self, peer: Peer) -> Endpoint:
        self._open()
        if peer not in self._peers:
            raise TransportError("that peer was never opened, or is fenced")
        return self._peers[peer]


def _read(description: bytes) -> tuple[int, int]:
    """Length and key."""
    found = re.fullmatch(rb"memory:(\d+):(\d+)", description)
    if found is None:
        raise TransportError("that is not a description of memory on a loopback network")
    return int(found[1]), int(found[2])
