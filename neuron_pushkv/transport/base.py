"""The transport seam: one-sided writes with counted immediates, and nothing else.

The contract, which ``tests/transport`` runs against every implementation:

* Writes are unordered. Every write of a batch carries the same 32-bit immediate, and the receiver counts them.
* A ticket ends exactly once, as written or as failed. As written only when all its bytes are in place at the
  target (delivery completion, not local completion). Either way only when the transport will touch neither side's
  memory for it again.
* :meth:`Transport.fence` closes what the peer can write through: all its tickets end as failed, and after it has
  returned nothing of that peer's can land any more. There is one endpoint per peer, so nobody else is disturbed.
* All methods may be called from any thread. None blocks on the network but :meth:`Transport.poll`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.device.base import Memory, ReadyWord

SLOT_BITS = 20
EPOCH_BITS = 12
SLOTS = 1 << SLOT_BITS
EPOCHS = 1 << EPOCH_BITS

Peer: TypeAlias = int
Table: TypeAlias = NDArray[np.uint64]
"""Rows of numbers, contiguous in C's order."""


def immediate(slot: int, epoch: int) -> int:
    """The 32 bits that every write of a delivery carries: slot (20 bits) and epoch (12 bits)."""
    return slot << EPOCH_BITS | epoch


@dataclass(frozen=True)
class Registration:
    """Memory known to the network. ``description`` is what a peer passes to :meth:`Transport.attach` to write there.

    It is opaque, and as long as the transport needs: keys for each rail and each part that was registered by itself.
    """

    handle: int
    memory: Memory
    description: bytes


@dataclass(frozen=True)
class Span:
    """One pair of places: where a product's offsets start on either side."""

    registration: Registration
    local: int
    """Local virtual address."""
    target: int
    """The peer's memory, as :meth:`Transport.attach` named it."""
    offset: int
    """Bytes from the start of that memory."""


class SpanTable(Sequence[Span]):
    """Spans that are used again and again, so that a transport may keep its own form of them."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = tuple(spans)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    @cached_property
    def flat(self) -> Table:
        """(n, 4): registration's handle, local address, target, offset."""
        rows = [(span.registration.handle, span.local, span.target, span.offset) for span in self._spans]
        return np.array(rows, dtype=np.uint64).reshape(-1, 4)


@dataclass(frozen=True, eq=False)
class Product:
    """Every span times every run; the native core expands it. ``runs``: (n, 3) local offset, remote offset, bytes."""

    spans: SpanTable
    runs: Table

    def __post_init__(self) -> None:
        runs = self.runs
        if runs.dtype != np.uint64 or runs.ndim != 2 or runs.shape[1] != 3 or not runs.flags.c_contiguous:
            raise ValueError("runs is a contiguous array of 64-bit (local offset, remote offset, length) rows")

    @property
    def writes(self) -> int:
        """How many writes it stands for, before a transport splits any of them."""
        return len(self.spans) * len(self.runs)

    @property
    def bytes(self) -> int:
        """How many bytes it moves."""
        return len(self.spans) * int(self.runs[:, 2].sum())


Batch: TypeAlias = Sequence[Product]


@dataclass(frozen=True)
class Ticket:
    """One batch under way. ``writes`` is how many immediates the receiver will count for it."""

    id: int
    peer: Peer
    writes: int
    bytes: int


@dataclass(frozen=True)
class Written:
    """The ticket's bytes are all in place."""

    ticket: int


@dataclass(frozen=True)
class Failed:
    """The ticket has ended otherwise. ``written`` writes are in place, ``in_doubt`` may or may not be, none will be."""

    ticket: int
    written: int
    in_doubt: int
    detail: str


@dataclass(frozen=True)
class Arrived:
    """The count for (slot, epoch) has reached the goal set for it."""

    slot: int
    epoch: int
    count: int


Event: TypeAlias = Written | Failed | Arrived


@dataclass
class TransportCounters:
    """What the transport has done since it was opened."""

    writes: int = 0
    bytes: int = 0
    arrivals: int = 0
    stale_arrivals: int = 0
    """Immediates with an epoch that nobody expects (any more)."""
    errors: int = 0
    extra: dict[str, int] = field(default_factory=dict)


class Transport(ABC):
    """See the module's text for the contract."""

    provider: str
    """The effective provider, as the library reports it ("efa", "tcp", "shm", "loopback")."""
    library: str
    """What does the work, for people: "libfabric 2.5"; "none" where it is this package alone."""
    fence_is_final: bool
    """Whether nothing can be under way in the network after a fence; otherwise a quarantine follows."""
    reads_late: bool = False
    """Whether the target copies out of the source's memory itself, so that it may still do so after a fence here.

    What it counts proves something only once the tickets have ended as written.
    """
    flushes: bool = False
    """Whether an arrival is told only when the device is sure to see what has arrived."""

    @abstractmethod
    def register(self, memory: Memory) -> Registration:
        """Make ``memory`` readable and writable for the network. Raises :class:`RegistrationError`."""

    @abstractmethod
    def deregister(self, registration: Registration) -> None:
        """Undo :meth:`register`."""

    @abstractmethod
    def open_peer(self) -> Peer:
        """A new endpoint for one peer, not yet connected. Raises :class:`TransportError`."""

    @abstractmethod
    def address(self, peer: Peer) -> bytes:
        """What the peer must :meth:`connect` to in order to write to us through this endpoint."""

    @abstractmethod
    def connect(self, peer: Peer, address: bytes) -> None:
        """Name the other side's endpoint. Raises :class:`TransportError` if the address can't be used."""

    @abstractmethod
    def attach(self, peer: Peer, description: bytes) -> int:
        """Name memory of a connected peer by its registration's description, for :class:`Span`, until the fence.

        Raises :class:`TransportError` for what can't be such a description.
        """

    @abstractmethod
    def fence(self, peer: Peer) -> None:
        """Close the endpoint: its tickets end as failed, and nothing of that peer's lands after this returns."""

    @abstractmethod
    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        """Start writing. Never blocks on queue depth. Source memory must stay as it is until the ticket has ended.

        Raises :class:`TransportError`, and writes nothing, for a peer that isn't connected and for runs that leave the
        registered memory here or the attached memory there.
        """

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """Post no more of it; it ends as failed (or written, if that was first) when what is under way has ended."""

    @abstractmethod
    def expect(self, slot: int, epoch: int) -> None:
        """Count immediates of (slot, epoch) from zero; those of any other epoch of that slot are stale."""

    @abstractmethod
    def goal(self, slot: int, epoch: int, count: int) -> None:
        """Ask for one :class:`Arrived` as soon as the count has reached ``count`` (at once if it has already)."""

    @abstractmethod
    def count(self, slot: int, epoch: int) -> int:
        """Immediates counted so far for (slot, epoch); 0 if another epoch is expected there."""

    @abstractmethod
    def forget(self, slot: int) -> None:
        """Expect nothing at that slot any more."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Wait up to ``timeout`` seconds, without the GIL, for events; returns what there is, possibly nothing."""

    @abstractmethod
    def wake(self) -> None:
        """Make a running or the next :meth:`poll` return."""

    @abstractmethod
    def counters(self) -> TransportCounters:
        """A snapshot."""

    @abstractmethod
    def close(self) -> None:
        """End everything. Idempotent. Events of tickets that were under way are not delivered."""
