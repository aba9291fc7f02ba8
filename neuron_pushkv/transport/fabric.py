"""The transport over libfabric. The work is done in :mod:`neuron_pushkv.fabric`; this maps the seam onto it."""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from neuron_pushkv.device.base import Dmabuf, Memory, MemoryKind, ReadyWord
from neuron_pushkv.errors import FabricError, TransportError
from neuron_pushkv.fabric.core import Contact, Core, EventKind
from neuron_pushkv.fabric.opening import Options
from neuron_pushkv.fabric.registering import Registrar
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

_ADDRESS = struct.Struct("<4sIIHH")  # magic, address format, process, bytes of provider, rails
_RAIL = struct.Struct("<HQQ")  # bytes of that rail's address; remote address and key of its door
logger = logging.getLogger(__name__)

OVER_RXM = "tcp;ofi_rxm"
"""What libfabric 1.x calls its tcp. Its progress follows a null context when an endpoint is closed, or its peer dies,
while a write is half received."""
_MAGIC = b"pkf2"
_REMEMBERED = 4096
_WILDCARDS = ("", "0.0.0.0", "::")

_UNREADABLE = "it copies with the CPU, which can't read such memory; use 'efa', or transport 'nixl'"
_IMPOSSIBLE = {
    ("shm", MemoryKind.NEURON): "libfabric can't copy out of it, and says of such a write that it was written when "
    "nothing was (seen with 2.6); use 'efa', also between processes of one machine",
    ("shm", MemoryKind.CUDA): _UNREADABLE,
    ("tcp", MemoryKind.CUDA): _UNREADABLE,
}


class FabricTransport(Transport):
    """``provider`` is "efa", "efa-direct", "tcp" or "shm"; ``library`` a path to libfabric, if not the usual one.

    ``host`` is the address of this machine that tcp binds to. ``nics`` are the network cards to use, by libfabric's
    names of their domains (EFA's without what follows the dash); by default all of EFA's, one of others'. All of them
    must be there, unless they are only ``preferred``: then those that are there are used or, if none is, what would be
    by default. There is one rail for each, or ``rails`` in all, over the cards in turn. With ``flush`` an arrival is
    told only when memory of each device has been read from over every rail that received, which is what a device needs
    that may not see at once what a card has written. ``core`` is the CPU core for the progress thread. Registrations of
    more than ``most_registered`` bytes are refused as some drivers do, which is for tests. ``device`` is the kind of
    memory that will be registered, besides the host's; ``export`` and ``hint`` are its accelerator's. Raises
    :class:`~neuron_pushkv.errors.FabricError`.

    One thing that libfabric does not give us everywhere: over shm, a write with a wrong key or outside its bounds is
    dropped by the target, as it must be, but its sender is told that it was written (2.5), or nothing at all (1.17).
    The target does not count it, so a delivery with such a write never completes.
    """

    def __init__(
        self,
        provider: str,
        library: Path | None = None,
        host: str = "127.0.0.1",
        *,
        nics: tuple[str, ...] = (),
        preferred: bool = False,
        rails: int | None = None,
        flush: bool = False,
        core: int | None = None,
        most_registered: int | None = None,
        device: MemoryKind = MemoryKind.HOST,
        export: Callable[[Memory], Dmabuf | None] | None = None,
        hint: str = "",
    ) -> None:
        if provider == "tcp" and host in _WILDCARDS:
            raise FabricError(f"provider 'tcp' needs the address that peers reach this machine at, not '{host}'")
        if (provider, device) in _IMPOSSIBLE:
            raise FabricError(
                f"provider '{provider}' can't be used for {device} memory: {_IMPOSSIBLE[provider, device]}"
            )
        bound = host if provider == "tcp" else None
        self.core = Core(
            provider, Options(library, bound, nics, preferred, rails, flush, core, most_registered, device, hint)
        )
        self._registrar = Registrar(self.core, device, export, hint)
        self.library = f"libfabric {self.core.facts.version}"
        self.provider = self.core.facts.fabric if provider == "efa-direct" else self.core.facts.provider
        # EFA's endpoint is gone at once, but the card may still be at work on a packet that has arrived.
        self.fence_is_final = not self.provider.startswith("efa")
        self.flushes = flush
        # Between processes that may read each other's memory shm has the target copy, once, out of the source's.
        self.reads_late = self.provider == "shm"
        self._lock = Lock()
        self._closed = False
        self._addresses: dict[Peer, bytes] = {}
        self._used: OrderedDict[bytes, None] = OrderedDict()
        where = f" on host '{host}'; set 'host' to an address of this machine"
        self._try_out(where if bound else f"; {hint}" if hint else "")
        if self.provider == OVER_RXM:
            logger.warning(
                "%s can end this process when a connection ends in the middle of an incoming write (a fault of its tcp "
                "that 2.x has not got): install the Python package 'mpich', which carries 2.5, or set 'libfabric'",
                self.library,
            )

    def _try_out(self, advice: str) -> None:
        """Some of what can be wrong shows only when an endpoint is opened; find it before anybody depends on it."""
        try:
            self.fence(self.open_peer())
        except TransportError as error:
            self.close()
            raise FabricError(
                f"{self.library} at {self.core.facts.library}: provider '{self.provider}' can't open an endpoint "
                f"({error}){advice}"
            ) from error

    def register(self, memory: Memory) -> Registration:
        """Host memory, and that of the device that the transport was opened for. Raises :class:`RegistrationError`."""
        handle, description = self._registrar.register(memory)
        return Registration(handle, memory, description)

    def deregister(self, registration: Registration) -> None:
        """Raises :class:`TransportError` while a ticket reads from it."""
        if not self._closed:
            self.core.deregister(registration.handle)

    def open_peer(self) -> Peer:
        """Endpoints whose addresses none has had lately, so that who was fenced can't reach another's by its port."""
        again: list[Peer] = []
        try:
            while True:
                peer, contacts = self.core.open_peer()
                addresses = [contact.address for contact in contacts]
                with self._lock:
                    if self._used.keys().isdisjoint(addresses) or len(again) == _REMEMBERED:
                        self._used.update(dict.fromkeys(addresses))
                        while len(self._used) > _REMEMBERED:
                            self._used.popitem(last=False)
                        self._addresses[peer] = self._wrap(contacts)
                        return peer
                again.append(peer)
        finally:
            for other in again:
                self.core.fence(other)

    def _wrap(self, contacts: Sequence[Contact]) -> bytes:
        provider = self.provider.encode()
        head = _ADDRESS.pack(_MAGIC, self.core.facts.address_format, os.getpid(), len(provider), len(contacts))
        rails = (_RAIL.pack(len(one.address), one.door, one.key) + one.address for one in contacts)
        body = head + provider + b"".join(rails)
        return body + zlib.crc32(body).to_bytes(4, "little")

    def _unwrap(self, wrapped: bytes) -> list[Contact]:
        body = wrapped[:-4]
        try:
            if zlib.crc32(body).to_bytes(4, "little") != wrapped[-4:]:
                raise struct.error
            magic, address_format, process, provider_size, rails = _ADDRESS.unpack_from(body)
            place = _ADDRESS.size + provider_size
            provider = body[_ADDRESS.size : place].decode(errors="replace")
            contacts = []
            for _ in range(rails):
                size, door, key = _RAIL.unpack_from(body, place)
                place += _RAIL.size
                contacts.append(Contact(body[place : place + size], door, key))
                place += size
            if magic != _MAGIC or place != len(body):
                raise struct.error
        except struct.error as error:
            raise TransportError("that is not an address of a libfabric endpoint of neuron_pushkv") from error
        if (provider, address_format) != (self.provider, self.core.facts.address_format):
            raise TransportError(
                f"the peer's endpoint is of provider '{provider}' (address format {address_format}), ours of "
                f"'{self.provider}' ({self.core.facts.address_format}); use the same libfabric on both sides"
            )
        if provider == "shm" and process == os.getpid():
            # Its endpoints find each other's memory by name, and keep using it when the other is closed.
            raise TransportError("shm can't connect two endpoints of one process; use tcp or the loopback transport")
        return contacts

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
        """Raises :class:`TransportError` for what can't be such memory, or a peer that isn't connected."""
        return self.core.attach(peer, description)

    def fence(self, peer: Peer) -> None:
        """Fencing a peer again does nothing."""
        if self._closed:
            return
        self.core.fence(peer)
        with self._lock:
            self._addresses.pop(peer, None)

    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        """Raises :class:`TransportError` for a peer that isn't connected, or a run that leaves either side's memory."""
        products = [(product.spans.flat, product.runs) for product in batch]
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

    def rail_bytes(self) -> list[int]:
        """Bytes written so far, rail by rail: how well they share the work."""
        return self.core.rail_bytes()

    def close(self) -> None:
        """Waits for the progress thread."""
        self._closed = True
        self.core.close()
