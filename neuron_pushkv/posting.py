"""Writes on their way to the transport: straight from the cache, or packed where they would be too small."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from neuron_pushkv.blocks import BlockPool, Extent
from neuron_pushkv.device.base import Memory, ReadyWord
from neuron_pushkv.device.steps import is_reached
from neuron_pushkv.ledger.effects import Key, Write
from neuron_pushkv.plan.packing import PackedPlan
from neuron_pushkv.plan.pair import PairPlan
from neuron_pushkv.plan.staging import Staging
from neuron_pushkv.transport.base import Peer, Ticket, Transport


@dataclass(frozen=True)
class Posted:
    """``ticket`` is None if there was nothing to write for that peer. ``end``: up to which token it was taken."""

    ticket: Ticket | None
    end: int


class Posting:
    """Owned by the engine, and used under its lock. ``staging_bytes`` are taken when they are first needed."""

    def __init__(self, transport: Transport, staging_bytes: int) -> None:
        self._transport = transport
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._extents: dict[int, Extent] = {}
        """By the ticket that reads them."""
        self._waiting: dict[Key, None] = {}
        """Deliveries that wait for room, or for the thread that packs, in order."""

    def staging(self) -> Staging:
        """The memory to pack in. Raises :class:`~neuron_pushkv.errors.RegistrationError`."""
        if self._staging is None:
            buffer = mmap.mmap(-1, self._staging_bytes)
            memory = Memory(np.frombuffer(buffer, dtype=np.uint8).ctypes.data, self._staging_bytes)
            self._staging = Staging(self._transport.register(memory), buffer)
        return self._staging

    @property
    def copies(self) -> bool:
        """Whether KV is copied for any peer before it goes out, so that it has to be there."""
        return self._staging is not None

    @property
    def pool(self) -> BlockPool | None:
        """What is packed and not written yet, in bytes; None if nothing ever was."""
        return self._staging.pool if self._staging is not None else None

    def waiting(self) -> list[Key]:
        """Deliveries to be taken up again, in the order in which they began to wait; those without room come back."""
        waiting, self._waiting = list(self._waiting), {}
        return waiting

    def resumed(self, key: Key) -> None:
        """That delivery has been taken up again: it has got on, or comes back, or is over."""

    def take_back(self, keys: Iterable[Key]) -> None:
        """The blocks that these deliveries read are wanted back."""

    def ended(self, ticket: int) -> None:
        """Nothing of that ticket's memory is read any more."""
        extent = self._extents.pop(ticket, None)
        if extent is not None and self._staging is not None:
            self._staging.free(extent)

    def post(
        self,
        peer: Peer,
        plan: PairPlan | PackedPlan,
        write: Write,
        immediate: int,
        ready: ReadyWord | None,
        may_pack: bool,
    ) -> Posted | None:
        """Hand it to the transport. None if it waits, to be asked for again by :meth:`waiting`.

        Packing copies, so it is done when the KV is there, not on vLLM's thread (``may_pack``), and not for one layer
        of a step, whose others follow so soon that they can as well be packed together. Raises like ``batch`` and
        ``Transport.write``.
        """
        if isinstance(plan, PairPlan):
            layers = write.layers or (None,)
            batch = [product for layer in layers for product in plan.batch(write.moves, layer)]
            ticket = self._transport.write(peer, batch, immediate, ready) if batch else None
            return Posted(ticket, write.end)
        if write.ahead:
            return None
        end = plan.fits(write.moves) if may_pack and is_reached(ready) else write.first
        if end <= write.first:
            self._waiting[write.key] = None
            return None
        packed = plan.batch([replace(move, end=end) for move in write.moves])
        if packed.extent is None:
            return Posted(None, write.end)
        try:
            ticket = self._transport.write(peer, packed.products, immediate, ready)
        except BaseException:
            self.staging().free(packed.extent)
            raise
        self._extents[ticket.id] = packed.extent
        if end < write.end:
            self._waiting[write.key] = None
        return Posted(ticket, end)
