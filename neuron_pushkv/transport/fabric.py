"""The transport over libfabric. The work is done in :mod:`neuron_pushkv.fabric`; this maps the seam onto it."""

from __future__ import annotations

import array
import logging
import os
import struct
import zlib
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from neuron_pushkv.device.base import Memory, MemoryKind, ReadyWord
from neuron_pushkv.errors import FabricError, RegistrationError, TransportError
from neuron_pushkv.fabric.core import Core, EventKind
from neuron_pushkv.transport.base import (
    Arrived,
    Batch,
    Event,
    Failed,
    Peer,
    Registration,
    Ticket,
    Transport,
    TransportCounters,
    Written,
)

_ADDRESS = struct.Struct("<4sIIHH")  # magic, address format, process, bytes of provider, bytes of address
_DESCRIPTION = struct.Struct("<4sQQQ")  # magic, base, length, key
logger = logging.getLogger(__name__)

OVER_RXM = "tcp;ofi_rxm"
"""What libfabric 1.x calls its tcp. Its progress follows a null context when an endpoint is closed, or its peer dies,
while a write is half received."""
_MAGIC = b"pkf1"
_REMEMBERED = 4096
_WILDCARDS = ("", "0.0.0.0", "::")


class FabricTransport(Transport):
    """``provider`` is "efa", "efa-direct", "tcp" or "shm"; ``library`` a path to libfabric, if not the usual one.

    ``host`` is the address of this machine that tcp binds to. Raises :class:`~neuron_pushkv.errors.FabricError`.

    One thing that libfabric does not give us everywhere: over shm, a write with a wrong key or outside its bounds is
    dropped by the target, as it must be, but its sender is told that it was written (2.5), or nothing at all (1.17).
    The target does not count it, so a delivery with such a write never completes.
    """

    def __init__(self, provider: str, library: Path | None = None, host: str = "127.0.0.1") -> None:
        if provider == "tcp" and host in _WILDCARDS:
            raise FabricError(f"provider 'tcp' needs the address that peers reach this machine at, not '{host}'")
        self.core = Core(provider, library=library, host=host if provider == "tcp" else None)
        self.library = f"libfabric {self.core.facts.version}"
        self.provider = self.core.facts.fabric if provider == "efa-direct" else self.core.facts.provider
        # EFA's endpoint is gone at once, but the card may still be at work on a packet that has arrived.
        self.fence_is_final = not self.provider.startswith("efa")
        self._lock = Lock()
        self._closed = False
        self._addresses: dict[Peer, bytes] = {}
        self._attached: list[tuple[int, int, int]] = []
        self._used: OrderedDict[bytes, None] = OrderedDict()
        self._try_out(host)
        if self.provider == OVER_RXM:
            logger.warning(
                "%s can end this process when a connection ends in the middle of an incoming write (a fault of its tcp "
                "that 2.x has not got): install the Python package 'mpich', which carries 2.5, or set 'libfabric'",
                self.library,
            )

    def _try_out(self, host: str) -> None:
        """Some of what can be wrong shows only when an endpoint is opened; find it before anybody depends on it."""
        try:
            self.fence(self.open_peer())
        except TransportError as error:
            self.close()
            where = f" on host '{host}'; set 'host' to an address of this machine" if self.provider != "shm" else ""
            raise FabricError(
                f"{self.library} at {self.core.facts.library}: provider '{self.provider}' can't open an endpoint "
                f"({error}){where}"
            ) from error

    def register(self, memory: Memory) -> Registration:
        """Host memory only, so far. Raises :class:`RegistrationError`."""
        if memory.kind is not MemoryKind.HOST:
            raise RegistrationError(f"{memory.kind} memory can't be registered yet; only host memory can")
        handle, remote_base, key = self.core.register(memory.address, memory.length)
        return Registration(handle, memory, _DESCRIPTION.pack(_MAGIC, remote_base, memory.length, key))

    def deregister(self, registration: Registration) -> None:
        """Raises :class:`TransportError` while a ticket reads from it."""
        if not self._closed:
            self.core.deregister(registration.handle)

    def open_peer(self) -> Peer:
        """An endpoint whose address none has had lately, so that who was fenced can't reach another's by its port."""
        again: list[Peer] = []
        try:
            while True:
                peer, address = self.core.open_peer()
                with self._lock:
                    if address not in self._used or len(again) == _REMEMBERED:
                        self._used[address] = None
                        if len(self._used) > _REMEMBERED:
                            self._used.popitem(last=False)
                        self._addresses[peer] = self._wrap(address)
                        return peer
                again.append(peer)
        finally:
            for other in again:
                self.core.fence(other)

    def _wrap(self, address: bytes) -> bytes:
        provider = self.provider.encode()
        head = _ADDRESS.pack(_MAGIC, self.core.facts.address_format, os.getpid(), len(provider), len(address))
        body = head + provider + address
        return body + zlib.crc32(body).to_bytes(4, "little")

    def _unwrap(self, wrapped: bytes) -> bytes:
        body = wrapped[:-4]
        if len(body) < _ADDRESS.size or zlib.crc32(body).to_bytes(4, "little") != wrapped[-4:]:
            raise TransportError("that is not an address of a libfabric endpoint of neuron_pushkv")
        magic, address_format, process, provider_size, address_size = _ADDRESS.unpack_from(body)
        provider = body[_ADDRESS.size : _ADDRESS.size + provider_size].decode(errors="replace")
        address = body[_ADDRESS.size + provider_size :]
        if magic != _MAGIC or len(address) != address_size:
            raise TransportError("that is not an address of a libfabric endpoint of neuron_pushkv")
        if (provider, address_format) != (self.provider, self.core.facts.address_format):
            raise TransportError(
                f"the peer's endpoint is of provider '{provider}' (address format {address_format}), ours of "
                f"'{self.provider}' ({self.core.facts.address_format}); use the same libfabric on both sides"
            )
        if provider == "shm" and process == os.getpid():
            # Its endpoints find each other's memory by name, and keep using it when the other is closed.
            raise TransportError("shm can't connect two endpoints of one process; use tcp or the loopback transport")
        return address

    def address(self, peer: Peer) -> bytes:
        """Raises :class:`TransportError` if the peer is fenced or was never opened."""
        with self._lock:
            if peer not in self._addresses:
                raise TransportError("that peer was never opened, or is fenced")
            return self._addresses[peer]

    def connect(self, peer: Peer, address: bytes) -> None:
        """Raises :class:`TransportError` for an address of another provider, or none at all."""
        self.core.connect(peer, self._unwrap(address))

    def attach(self, peer: Peer, description: bytes) -> int:
        """Raises :class:`TransportError` for what can't be the description of such memory."""
        try:
            magic, base, length, key = _DESCRIPTION.unpack(description)
        except struct.error:
            magic, base, length, key = b"", 0, 0, 0
        if magic != _MAGIC:
            raise TransportError("that is not a description of memory from neuron_pushkv's libfabric transport")
        self._attached.append((base, length, key))
        return len(self._attached) - 1

    def fence(self, peer: Peer) -> None:
        """Fencing a peer again does nothing."""
        if self._closed:
            return
        self.core.fence(peer)
        with self._lock:
            self._addresses.pop(peer, None)

    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        """Raises :class:`TransportError` for a peer that isn't connected, or a run outside its registered memory."""
        products = []
        for product in batch:
            spans = array.array("Q")
            for span in product.spans:
                base, _, key = self._attached[span.target]
                spans.extend((span.registration.handle, span.local, base + span.offset, key))
            products.append((spans, product.runs))
        receipt = self.core.write(peer, products, immediate, None if ready is None else (ready.address, ready.value))
        return Ticket(receipt.ticket, peer, receipt.writes, receipt.bytes)

    def cancel(self, ticket: int) -> None:
        """A ticket that has ended stays as it is."""
        self.core.cancel(ticket)

    def expect(self, slot: int, epoch: int) -> None:
        """Raises :class:`TransportError` if either is out of range."""
        self.core.expect(slot, epoch)

    def goal(self, slot: int, epoch: int, count: int) -> None:
        """Raises :class:`TransportError` if another epoch, or none, is expected there."""
        self.core.goal(slot, epoch, count)

    def count(self, slot: int, epoch: int) -> int:
        """Reads memory; asks nobody."""
        return self.core.count(slot, epoch)

    def forget(self, slot: int) -> None:
        """A goal that has not been reached is forgotten with it."""
        self.core.forget(slot)

    def poll(self, timeout: float) -> list[Event]:
        """Raises :class:`TransportError` once the transport is closed."""
        events: list[Event] = []
        for event in self.core.poll(timeout):
            match event.kind:
                case EventKind.WRITTEN:
                    events.append(Written(event.ticket))
                case EventKind.FAILED:
                    events.append(Failed(event.ticket, event.written, event.in_doubt, event.detail))
                case EventKind.ARRIVED:
                    events.append(Arrived(event.slot, event.epoch, event.count))
        return events

    def wake(self) -> None:
        """May be called after close."""
        self.core.wake()

    def counters(self) -> TransportCounters:
        """May be called after close."""
        extra = self.core.counters()
        return TransportCounters(
            writes=extra.pop("writes"),
            bytes=extra.pop("bytes"),
            arrivals=extra.pop("arrivals"),
            stale_arrivals=extra.pop("stale_arrivals"),
            errors=extra.pop("errors"),
            extra=extra,
        )

    def close(self) -> None:
        """Waits for the progress thread."""
        self._closed = True
        self.core.close()
