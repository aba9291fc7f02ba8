"""The native core as Python objects and exceptions. No policy here: see ``api.h`` for what each call does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.device.base import Dmabuf, Memory, MemoryKind
from neuron_pushkv.errors import RegistrationError, TransportError
from neuron_pushkv.fabric.opening import INTERFACES, Options, native, open_core, text_of, version_text

POLL_ROOM = 64
WHOLE = 63
"""As a shift: memory that is registered in one part."""


@dataclass(frozen=True)
class Facts:
    """What was opened."""

    version: str
    library: str
    provider: str
    fabric: str
    nics: tuple[str, ...]
    """Rail by rail."""
    address_format: int
    memory_mode: int
    max_message: int
    key_size: int
    tx_depth: int
    takes_dmabufs: bool
    """Whether memory of a device can be registered by descriptors."""
    waits: bool


class EventKind(IntEnum):
    """As in ``api.h``."""

    WRITTEN = 1
    FAILED = 2
    ARRIVED = 3


@dataclass(frozen=True, slots=True)
class RawEvent:
    """What :meth:`Core.poll` returns; which of it means something depends on ``kind``."""

    kind: EventKind
    slot: int
    epoch: int
    count: int
    ticket: int
    written: int
    in_doubt: int
    detail: str


@dataclass(frozen=True)
class Contact:
    """Where a peer finds an endpoint: its address, and remote address and key of its door (see ``warm.c``)."""

    address: bytes
    door: int
    key: int


@dataclass(frozen=True)
class Receipt:
    """What :meth:`Core.write` started."""

    ticket: int
    writes: int
    bytes: int


class Core:
    """One opened library, provider and progress thread. Methods may be called from any thread and release the GIL."""

    def __init__(self, provider: str, options: Options) -> None:
        module = native()
        self._process = os.getpid()
        self.ffi: Any = module.ffi
        self.lib: Any = module.lib
        # efa must not take shm for peers on the same machine: device memory would not be written, and said to be. Read
        # once, by the first use of libfabric in a process, whichever provider that is for.
        os.environ["FI_EFA_ENABLE_SHM_TRANSFER"] = "0"
        self._handle: Any = self.ffi.gc(open_core(module, provider, options), self._free)
        facts = self.ffi.new("pk_facts *")
        self.lib.pk_get_facts(self._handle, facts)
        self.facts = Facts(
            version=version_text(facts.version),
            library=self._text(facts.library),
            provider=self._text(facts.provider),
            fabric=self._text(facts.fabric),
            nics=tuple(self._text(facts.domains).split(", ")),
            address_format=facts.address_format,
            memory_mode=facts.memory_mode,
            max_message=facts.max_message,
            key_size=facts.key_size,
            tx_depth=facts.tx_depth,
            takes_dmabufs=bool(facts.takes_dmabufs),
            waits=bool(facts.waits),
        )

    def _text(self, characters: Any) -> str:
        return text_of(self.ffi, characters)

    def _free(self, handle: Any) -> None:
        # A forked child has the core's memory, but not its thread; what there is to close is the parent's.
        if os.getpid() == self._process:
            self.lib.pk_close(handle)
            self.lib.pk_free(handle)

    def _check(self, code: int, failure: Any) -> None:
        if code != self.lib.PK_OK:
            raise TransportError(self._text(failure.text))

    def register(
        self,
        memory: Memory,
        interface: int = INTERFACES[MemoryKind.HOST],
        shift: int = WHOLE,
        dmabufs: Sequence[Dmabuf] = (),
    ) -> tuple[int, bytes]:
        """Returns a handle, and what a peer passes to :meth:`attach`. Raises :class:`RegistrationError`.

        In parts of ``1 << shift`` bytes; by one of ``dmabufs`` for each of them on each rail, rail by rail, or else by
        their addresses.
        """
        ffi, lib = self.ffi, self.lib
        handle, size = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        failure = ffi.new("pk_failure *")
        descriptors = (
            ffi.new("pk_dmabuf[]", [(dmabuf.fd, dmabuf.offset) for dmabuf in dmabufs]) if dmabufs else ffi.NULL
        )
        address, length, device = memory.address, memory.length, memory.ordinal
        code = lib.pk_register(
            self._handle, address, length, interface, device, shift, descriptors, handle, size, failure
        )
        if code == lib.PK_CLOSED:
            raise TransportError(self._text(failure.text))
        if code != lib.PK_OK:
            raise RegistrationError(
                f"{length} bytes at {address:#x} can't be registered with provider '{self.facts.provider}': "
                f"{self._text(failure.text)}",
                failure.error,
            )
        description = ffi.new("uint8_t[]", size[0])
        self._check(lib.pk_describe(self._handle, handle[0], description, failure), failure)
        return handle[0], bytes(ffi.buffer(description))

    def deregister(self, memory: int) -> None:
        """Raises :class:`TransportError`, also while a ticket reads it."""
        failure = self.ffi.new("pk_failure *")
        self._check(self.lib.pk_deregister(self._handle, memory, failure), failure)

    def open_peer(self) -> tuple[int, list[Contact]]:
        """Returns the peer, and its endpoints rail by rail. Raises :class:`TransportError`."""
        ffi = self.ffi
        peer = ffi.new("uint64_t *")
        contacts = ffi.new("pk_contact[]", len(self.facts.nics))
        failure = ffi.new("pk_failure *")
        self._check(self.lib.pk_open_peer(self._handle, peer, contacts, failure), failure)
        return peer[0], [
            Contact(bytes(ffi.buffer(contact.address, contact.size)), contact.door, contact.key) for contact in contacts
        ]

    def connect(self, peer: int, contacts: Sequence[Contact]) -> None:
        """Raises :class:`TransportError`."""
        table = self.ffi.new("pk_contact[]", len(contacts))
        for entry, contact in zip(table, contacts, strict=True):
            entry.size, entry.door, entry.key = len(contact.address), contact.door, contact.key
            self.ffi.memmove(entry.address, contact.address, min(len(contact.address), self.lib.PK_ADDRESS_ROOM))
        failure = self.ffi.new("pk_failure *")
        self._check(self.lib.pk_connect(self._handle, peer, table, len(contacts), failure), failure)

    def attach(self, peer: int, description: bytes) -> int:
        """Returns the target. Raises :class:`TransportError`."""
        target = self.ffi.new("uint64_t *")
        failure = self.ffi.new("pk_failure *")
        code = self.lib.pk_attach(self._handle, peer, description, len(description), target, failure)
        self._check(code, failure)
        number: int = target[0]
        return number

    def fence(self, peer: int) -> None:
        """Raises :class:`TransportError` if the endpoint can't be closed."""
        failure = self.ffi.new("pk_failure *")
        self._check(self.lib.pk_fence(self._handle, peer, failure), failure)

    def write(
        self,
        peer: int,
        products: Sequence[tuple[NDArray[np.uint64], NDArray[np.uint64]]],
        immediate: int,
        ready: tuple[int, int] | None,
    ) -> Receipt:
        """``products``: pairs of tables, spans (memory, local, target, offset) and runs (local, remote, length).

        The time for which this holds the GIL does not depend on their lengths. Raises :class:`TransportError`.
        """
        ffi = self.ffi
        table = ffi.new("pk_product[]", len(products))
        for entry, (spans, runs) in zip(table, products, strict=True):
            entry.spans = ffi.cast("pk_span *", ffi.from_buffer(spans))
            entry.span_count = len(spans)
            entry.runs = ffi.cast("pk_run *", ffi.from_buffer(runs))
            entry.run_count = len(runs)
        receipt = ffi.new("pk_receipt *")
        failure = ffi.new("pk_failure *")
        address, value = ready if ready is not None else (0, 0)
        code = self.lib.pk_write(
            self._handle, peer, table, len(products), immediate, address, value & 0xFFFFFFFF, receipt, failure
        )
        self._check(code, failure)
        return Receipt(receipt.ticket, receipt.writes, receipt.bytes)

    def cancel(self, ticket: int) -> None:
        """Does nothing to a ticket that has ended."""
        failure = self.ffi.new("pk_failure *")
        self._check(self.lib.pk_cancel(self._handle, ticket, failure), failure)

    def expect(self, slot: int, epoch: int) -> None:
        """Raises :class:`TransportError` if either is out of range."""
        failure = self.ffi.new("pk_failure *")
        self._check(self.lib.pk_expect(self._handle, slot, epoch, failure), failure)

    def goal(self, slot: int, epoch: int, count: int) -> None:
        """Raises :class:`TransportError` if that is not what is expected there."""
        failure = self.ffi.new("pk_failure *")
        self._check(self.lib.pk_goal(self._handle, slot, epoch, count, failure), failure)

    def count(self, slot: int, epoch: int) -> int:
        """0 where something else is expected."""
        count: int = self.lib.pk_count(self._handle, slot, epoch)
        return count

    def forget(self, slot: int) -> None:
        """Idempotent."""
        self.lib.pk_forget(self._handle, slot)

    def poll(self, timeout: float) -> list[RawEvent]:
        """Waits up to ``timeout`` seconds. Raises :class:`TransportError` once closed."""
        room = self.ffi.new(f"pk_event[{POLL_ROOM}]")
        count = self.lib.pk_poll(self._handle, room, POLL_ROOM, int(max(0.0, timeout) * 1e9))
        if count < 0:
            raise TransportError("the transport is closed")
        return [self._event(room[index]) for index in range(count)]

    def _event(self, event: Any) -> RawEvent:
        # Copied, because an element does not keep its array alive.
        return RawEvent(
            EventKind(event.kind),
            event.slot,
            event.epoch,
            event.count,
            event.ticket,
            event.written,
            event.in_doubt,
            self._text(event.detail),
        )

    def wake(self) -> None:
        """Makes a running or the next :meth:`poll` return."""
        self.lib.pk_wake(self._handle)

    def counters(self) -> dict[str, int]:
        """A snapshot, by the names in ``api.h``."""
        counters = self.ffi.new("pk_counters *")
        self.lib.pk_get_counters(self._handle, counters)
        return {name: getattr(counters, name) for name, _ in self.ffi.typeof("pk_counters").fields}

    def rail_bytes(self) -> list[int]:
        """Bytes of completed writes, rail by rail."""
        room = self.ffi.new("uint64_t[]", len(self.facts.nics))
        self.lib.pk_get_rail_bytes(self._handle, room)
        return list(room)

    def close(self) -> None:
        """Ends the progress thread. Idempotent, and nothing in a forked child."""
        if os.getpid() == self._process:
            self.lib.pk_close(self._handle)
