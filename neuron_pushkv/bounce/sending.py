"""Writes whose KV is first read from the device into the staging cache.

A delivery's blocks are read in batches. One that has been read is posted, and the next ones are read while it goes over
the network. What is read from blocks that vLLM takes back meanwhile is dropped. So nobody has to wait for that, nor for
writes, which read from the staging cache alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm
from typing import TypeAlias

import numpy as np

from neuron_pushkv.bounce.cache import StagingCache
from neuron_pushkv.bounce.copier import BATCH_BYTES, Copier
from neuron_pushkv.bounce.copies import Table
from neuron_pushkv.device.base import ReadyWord
from neuron_pushkv.device.steps import is_reached
from neuron_pushkv.errors import DeviceError
from neuron_pushkv.ledger.effects import Key, Write
from neuron_pushkv.plan.packing import PackedPlan
from neuron_pushkv.plan.pair import PairPlan
from neuron_pushkv.posting import Posted, Posting
from neuron_pushkv.transport.base import Peer, Transport

BATCHES = 4
"""How many fill the room for sending at least, so that some are read while others are written."""

Place: TypeAlias = tuple[Key, int, int]
"""A delivery, its track, and the first token."""


@dataclass(eq=False)
class _Copy:
    """Tokens up to ``end``, on their way into blocks of the staging cache or there. It owns those blocks."""

    end: int
    tables: dict[int, Table]
    """By group."""
    done: bool = False
    dropped: bool = False
    error: DeviceError | None = None


class BouncedPosting(Posting):
    """Posts from the staging cache. A write is taken in parts, each of which waits until it has been copied."""

    def __init__(self, transport: Transport, staging_bytes: int, cache: StagingCache, copier: Copier) -> None:
        super().__init__(transport, staging_bytes)
        self._cache, self._copier, self._room = cache, copier, cache.sending
        self._sizes = tuple(group.block_size for group in cache.layout.groups)
        self._copies: dict[Place, _Copy] = {}
        self._reading: dict[int, _Copy] = {}
        """By the ticket that reads what was copied."""

    @property
    def copies(self) -> bool:
        """All of it."""
        return True

    def resumed(self, key: Key) -> None:
        """Unless it comes back, what has been copied for it and not been asked for never will be."""
        if key not in self._waiting:
            self._drop(place for place, copy in self._copies.items() if place[0] == key and copy.done)

    def take_back(self, keys: Iterable[Key]) -> None:
        """What is being copied from these blocks is worth nothing."""
        wanted = set(keys)
        self._drop(place for place in self._copies if place[0] in wanted)

    def ended(self, ticket: int) -> None:
        """Its blocks in the staging cache are free."""
        super().ended(ticket)
        copy = self._reading.pop(ticket, None)
        if copy is not None:
            self._room.give_back(copy)

    def post(
        self,
        peer: Peer,
        plan: PairPlan | PackedPlan,
        write: Write,
        immediate: int,
        ready: ReadyWord | None,
        may_pack: bool,
    ) -> Posted | None:
        """Post what has been copied, or have it copied. Layers don't go ahead of their step."""
        if write.ahead:
            return None
        place = write.key, write.track, write.first
        copy = self._copies.get(place)
        if copy is None:
            return self._begin(plan, write, ready)
        if copy.end < write.end and (write.key, write.track, copy.end) not in self._copies:
            self._begin(plan, _from(write, copy.end), ready)
        if not (copy.done and may_pack):
            return None  # Our own thread posts it, when the copy has ended.
        del self._copies[place]
        posted = None
        try:
            if copy.error is not None:
                raise copy.error
            posted = super().post(peer, plan, self._staged(write, copy), immediate, None, may_pack)
        finally:
            if posted is None or posted.ticket is None or isinstance(plan, PackedPlan):
                self._room.give_back(copy)
            else:
                self._reading[posted.ticket.id] = copy
        if posted is not None and posted.end < write.end:
            self._waiting[write.key] = None
        return posted

    def _begin(self, plan: PairPlan | PackedPlan, write: Write, ready: ReadyWord | None) -> Posted | None:
        copy = _Copy(self._fits(plan, write) if is_reached(ready) else write.first, {})
        if copy.end <= write.first:
            self._waiting[write.key] = None
            return None
        sources = []
        for move in write.moves:
            size = self._sizes[move.group]
            table = move.source[write.first // size : -(-copy.end // size)]
            sources.append((move.group, np.array(table, dtype=np.int64)))
        taken = self._room.take(sum(len(table) for _, table in sources), copy)
        assert taken is not None
        parts = np.split(taken, np.cumsum([len(table) for _, table in sources[:-1]]))
        copy.tables = {group: part for (group, _), part in zip(sources, parts, strict=True)}
        try:
            layers = frozenset(region.layer for region in plan.theirs.regions)
            copies = self._cache.plan(plan.heads, layers).copies(
                [(group, table, copy.tables[group]) for group, table in sources]
            )
        except BaseException:
            self._room.give_back(copy)
            raise
        if not len(copies):
            self._room.give_back(copy)
            return Posted(None, write.end)
        self._copies[write.key, write.track, write.first] = copy
        self._copier.to_host(copies, lambda error: self._copied(write.key, copy, error))
        return None

    def _copied(self, key: Key, copy: _Copy, error: DeviceError | None) -> None:
        copy.done, copy.error = True, error
        if copy.dropped:
            self._room.give_back(copy)
        else:
            self._waiting[key] = None
        self._transport.wake()

    def _fits(self, plan: PairPlan | PackedPlan, write: Write) -> int:
        """Up to which token there is room for a batch: the write's end, or a boundary of blocks of all its groups."""
        sizes = [self._sizes[move.group] for move in write.moves]
        step = lcm(*sizes)
        blocks = sum(step // size for size in sizes)
        batch = min(BATCH_BYTES // self._cache.block_bytes, self._room.blocks // BATCHES)
        room = min(self._room.free, max(blocks, batch))
        end = min(write.end, (write.first // step + room // blocks) * step)
        return min(end, plan.fits(write.moves)) if isinstance(plan, PackedPlan) else end

    def _staged(self, write: Write, copy: _Copy) -> Write:
        """The same, from the staging cache."""
        moves = []
        for move in write.moves:
            before: Table = np.full(write.first // self._sizes[move.group], -1, dtype=np.int64)
            moves.append(replace(move, source=np.concatenate([before, copy.tables[move.group]]), end=copy.end))
        return replace(write, moves=tuple(moves))

    def _drop(self, places: Iterable[Place]) -> None:
        for place in list(places):
            copy = self._copies.pop(place)
            copy.dropped = True
            if copy.done:
                self._room.give_back(copy)


def _from(write: Write, first: int) -> Write:
    """What is left of it from that token on."""
    return replace(write, moves=tuple(replace(move, first=first) for move in write.moves))
