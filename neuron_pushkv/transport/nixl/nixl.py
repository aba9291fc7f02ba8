"""The transport over NIXL: data by NIXL's WRITE, its notification counted as the arrival of what was written."""

from __future__ import annotations

import itertools
import threading
import time

from neuron_pushkv.device.base import Memory, ReadyWord
from neuron_pushkv.errors import FabricError, RegistrationError, TransportError
from neuron_pushkv.transport.base import Batch, Peer, Registration, Ticket, TransportCounters
from neuron_pushkv.transport.counting import CountingTransport
from neuron_pushkv.transport.nixl import agent
from neuron_pushkv.transport.nixl.agent import Agent
from neuron_pushkv.transport.nixl.endpoint import Endpoint, Task
from neuron_pushkv.transport.nixl.parts import cut, resolve
from neuron_pushkv.transport.nixl.wire import KINDS, Place, pack_address, unpack_address, unpack_place

_SHORTEST = 0.00002
_READY_PERIOD = 0.0005
_IDLE_PERIOD = 0.003
"""Seconds between looks: after something has happened, while a ready word is awaited, and at the most."""
_REST = 100
"""An idle thread sleeps that many times as long as it computed since its last look."""


class NixlTransport(CountingTransport):
    """``backend`` is the name of a NIXL plugin. Raises :class:`~neuron_pushkv.errors.FabricError`.

    Every peer has an agent of its own, so that fencing it takes down the only worker that it can reach. That takes 5 to
    10 ms, and 100 ms or so while a lot is coming in; opening a peer takes 25 ms and registers all memory once more. A
    batch is cut into transfers of at most 256 writes, each followed by a notification that says how many writes it
    stands for: that many are counted at once.

    What NIXL does not give:

    * A fence is final over UCX between processes' host memory, because we keep UCX from copying into another process
      by itself (``UCX_TLS`` in the environment overrides that), so that all of it passes through the receiver's worker
      or card. Copies between GPUs (CUDA IPC) that have been started can't be ended by the receiver, and other backends
      promise nothing: ``fence_is_final`` is false for these.
    * The receiver's side checks nothing. Writes outside of a peer's memory are refused where they are asked for, but a
      peer that knew a memory goes on writing to it after :meth:`deregister`; fence the peers first.
    * Memory that is registered after :meth:`address` was read can't be attached by that peer.
    """

    def __init__(self, backend: str = agent.UCX) -> None:
        super().__init__(threading.RLock())
        self.provider = f"nixl/{backend}"
        self._backend = backend
        self._spare: Agent | None = Agent(backend)
        self.library = agent.library_name()
        self._confined = backend == agent.UCX and agent.is_confined()
        self._agents_lock = threading.Lock()
        """Held while memory or endpoints come and go; taken before an endpoint's lock, and that before ``_lock``."""
        self._memories: dict[int, Registration] = {}
        self._places: dict[int, Place] = {}
        self._peers: dict[Peer, Endpoint] = {}
        self._ids = itertools.count(1)
        self._poked = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    @property
    def fence_is_final(self) -> bool:  # type: ignore[override]
        """See the class's text."""
        return self._confined and all(memory.memory.kind is KINDS[0] for memory in self._memories.values())

    def register(self, memory: Memory) -> Registration:
        """Raises :class:`RegistrationError` for memory that the backend can't reach."""
        if memory.kind not in KINDS:
            raise RegistrationError(f"{memory.kind} memory can't be registered with NIXL; host and cuda memory can")
        if memory.length <= 0:
            raise RegistrationError("memory of no bytes can't be registered")
        with self._agents_lock:
            self._open()
            if self._spare is None:
                self._spare = self._new_agent()
            self._spare.register(memory)  # First, because it finds what is wrong before anybody's endpoint is touched.
            for endpoint in self._endpoints():
                with endpoint.lock:
                    if not endpoint.fenced:
                        endpoint.agent.register(memory)
            place = Place(memory.address, memory.length, max(memory.ordinal, 0), KINDS.index(memory.kind))
            with self._lock:
                registration = Registration(next(self._ids), memory, place.pack())
                self._memories[registration.handle] = registration
                self._places[registration.handle] = place
            return registration

    def deregister(self, registration: Registration) -> None:
        """Raises :class:`TransportError` while a ticket reads from it. Peers that know it can still write to it."""
        with self._agents_lock:
            with self._lock:
                if self._closed:
                    return
                if registration.handle not in self._memories:
                    raise TransportError("that memory is not registered")
                if any(registration.handle in task.handles for peer in self._peers.values() for task in peer.tasks):
                    raise TransportError("writes from that memory are under way")
                del self._memories[registration.handle], self._places[registration.handle]
            if self._spare is not None:
                self._spare.deregister(registration.memory)
            for endpoint in self._endpoints():
                with endpoint.lock:
                    if not endpoint.fenced:
                        endpoint.agent.deregister(registration.memory)

    def open_peer(self) -> Peer:
        """A new agent, which knows all memory that is registered."""
        with self._agents_lock:
            self._open()
            agent, self._spare = self._spare, None
            if agent is None:
                agent = self._new_agent()
            with self._lock:
                peer = next(self._ids)
                self._peers[peer] = Endpoint(agent, self._port, self._lock)
                return peer

    def _new_agent(self) -> Agent:
        try:
            agent = Agent(self._backend)
            for registration in self._memories.values():
                agent.register(registration.memory)
        except FabricError as error:
            raise TransportError(str(error)) from error
        return agent

    def address(self, peer: Peer) -> bytes:
        """Raises :class:`TransportError` if the peer is fenced or was never opened."""
        endpoint = self._endpoint(peer)
        with endpoint.lock:
            endpoint.check()
            return pack_address(self.provider, endpoint.agent.metadata())

    def connect(self, peer: Peer, address: bytes) -> None:
        """Raises :class:`TransportError` for an address of another provider, or none at all."""
        endpoint, metadata = self._endpoint(peer), unpack_address(self.provider, address)
        with endpoint.lock:
            endpoint.check()
            if endpoint.connected:
                raise TransportError("that peer is connected already")
            endpoint.agent.connect(metadata)
            endpoint.connected = True
        self._poke()

    def attach(self, peer: Peer, description: bytes) -> int:
        """Raises :class:`TransportError` for what is no memory of that peer's."""
        endpoint, place = self._endpoint(peer), unpack_place(description)
        with endpoint.lock:
            endpoint.check()
            if not endpoint.connected:
                raise TransportError("that peer is not connected yet")
            if not endpoint.agent.reaches(place):
                raise TransportError("that is not a description of memory that the peer had when it gave its address")
        with self._lock:
            target = next(self._ids)
            endpoint.targets[target] = place
            return target

    def fence(self, peer: Peer) -> None:
        """Fencing a peer again does nothing."""
        with self._lock:
            endpoint = self._peers.pop(peer, None)
        if endpoint is None:
            return
        with endpoint.lock:
            endpoint.fence()

    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        """Raises :class:`TransportError` for a peer that isn't connected, or a run outside its registered memory."""
        endpoint = self._endpoint(peer)
        if not endpoint.connected:
            raise TransportError("that peer is not connected yet")
        with self._lock:
            self._endpoint(peer)
            rows = [resolve(product, self._places, endpoint.targets) for product in batch]
            handles = frozenset(handle for product in batch for handle in set(product.spans.flat[:, 0].tolist()))
            writes = sum(product.writes for product in batch)
            task = Task(next(self._ids), immediate, ready, writes, handles, cut(rows))
            endpoint.tasks.append(task)
            self._poke()
        return Ticket(task.id, peer, writes, sum(product.bytes for product in batch))

    def cancel(self, ticket: int) -> None:
        """A ticket that has ended stays as it is. Parts that NIXL has are written."""
        with self._lock:
            for endpoint in self._peers.values():
                for task in endpoint.tasks:
                    if task.id == ticket:
                        task.detail = task.detail or "cancelled"
                        self._poke()
                        return

    def counters(self) -> TransportCounters:
        """May be called after close."""
        with self._lock:
            mine = self._port.counters
            tasks = [task for endpoint in self._peers.values() for task in endpoint.tasks]
            extra = {
                "peers": len(self._peers),
                "tickets": len(tasks),
                "outstanding": sum(len(task.posted) for task in tasks),
                "memories": len(self._memories),
            }
            return TransportCounters(mine.writes, mine.bytes, mine.arrivals, mine.stale_arrivals, mine.errors, extra)

    def close(self) -> None:
        """Fences everybody and waits for the thread."""
        with self._agents_lock:
            with self._lock:
                self._closed = True
                self._port.work.notify_all()
                self._port.happened.notify_all()
                peers = list(self._peers)
            for peer in peers:
                self.fence(peer)
            if self._spare is not None:
                self._spare.close()
                self._spare = None
        self._thread.join()

    def _endpoints(self) -> list[Endpoint]:
        with self._lock:
            return list(self._peers.values())

    def _endpoint(self, peer: Peer) -> Endpoint:
        with self._lock:
            self._open()
            if peer not in self._peers:
                raise TransportError("that peer was never opened, or is fenced")
            return self._peers[peer]

    def _poke(self) -> None:
        with self._lock:
            self._poked = True
            self._port.work.notify_all()

    def _run(self) -> None:
        pause, computed = _SHORTEST, time.thread_time()
        while True:
            moved = False
            for endpoint in self._endpoints():
                with endpoint.lock:
                    moved |= endpoint.look()
            before, computed = computed, time.thread_time()
            with self._lock:
                if self._closed:
                    return
                tasks = [task for endpoint in self._peers.values() for task in endpoint.tasks]
                limit = _READY_PERIOD if tasks else max(_IDLE_PERIOD, _REST * (computed - before))
                pause = _SHORTEST if moved else min(2 * pause, limit)
                nobody = not any(endpoint.connected for endpoint in self._peers.values())
                self._port.work.wait_for(lambda: self._poked or self._closed, None if nobody else pause)
                self._poked = False
