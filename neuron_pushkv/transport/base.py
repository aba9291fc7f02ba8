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

import array
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from neuron_pushkv.device.base import Memory, ReadyWord

SLOT_BITS = 20
EPOCH_BITS = 12
SLOTS = 1 << SLOT_BITS
EPOCHS = 1 << EPOCH_BITS

Peer: TypeAlias = int


def immediate(slot: int, epoch: int) -> int:
    """The 32 bits that every write of a delivery carries: slot (20 bits) and epoch (12 bits)."""
    return slot << EPOCH_BITS | epoch


@dataclass(frozen=True)
class Registration:
    """Memory known to the network. ``remote_base`` and ``key`` are what a peer needs to write at its start.

    ``remote_base`` is the virtual address where the provider addresses by it, and 0 where it addresses by offset.
    """

    handle: int
    memory: Memory
    remote_base: int
    key: int

    def remote_address(self, address: int) -> int:
        """What a peer must use to write at the local virtual ``address``."""
        return self.remote_base + (address - self.memory.address)


@dataclass(frozen=True)
class Span:
    """One pair of regions: where a product's offsets start on either side."""

    registration: Registration
    local: int
    """Local virtual address."""
    remote: int
    """Remote address as the peer's :meth:`Registration.remote_address` gave it."""
    key: int


@dataclass(frozen=True)
class Product:
    """Every span times every run; the native core expands it. ``runs`` is flat: local offset, remote offset, bytes."""

    spans: Sequence[Span]
    runs: array.array[int]

    def __post_init__(self) -> None:
        if self.runs.typecode != "Q" or len(self.runs) % 3:
            raise ValueError("runs is an array('Q') of (local offset, remote offset, length) triples")

    @property
    def writes(self) -> int:
        """How many writes it stands for, before a transport splits any of them."""
        return len(self.spans) * (len(self.runs) // 3)

    @property
    def bytes(self) -> int:
        """How many bytes it moves."""
        return len(self.spans) * sum(self.runs[2::3])


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
    def fence(self, peer: Peer) -> None:
        """Close the endpoint: its tickets end as failed, and nothing of that peer's lands after this returns."""

    @abstractmethod
    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        """Start writing. Never blocks on queue depth. Source memory must stay as it is until the ticket has ended."""

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
