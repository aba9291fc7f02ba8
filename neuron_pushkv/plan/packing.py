"""Small pieces are put together on the sender, in the receiver's order, and go as writes as large as that allows.

Where the two sides keep heads and tokens in unlike orders, nothing but single rows may be contiguous on both. Then a
copy into registered memory, which takes a fraction of the time of as many small writes, makes one write of all that is
contiguous at the receiver: a head's tokens, a block, or all layers of it. The receiver's blocks that move whole come in
writes as large as that; of a block that moves in part each unit comes by itself, merged with its neighbours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.blocks import Extent
from neuron_pushkv.device.base import MemoryKind
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout
from neuron_pushkv.plan.cells import Cell, Source, cells
from neuron_pushkv.plan.mapping import described
from neuron_pushkv.plan.pair import Facts, Move, PairPlan, Places
from neuron_pushkv.plan.pieces import Match, Numbers
from neuron_pushkv.plan.shares import Heads
from neuron_pushkv.plan.staging import Staging
from neuron_pushkv.transport.base import Product, Registration, Span, SpanTable, Table
from neuron_pushkv.wire import RemoteRegion

PARTS = 4
"""Into which the staging memory is divided: one is packed while others are written."""
AT_ONCE_BYTES = 1 << 18
"""How much is copied by one call: twice as quick as all in one, since what lies between stays in the cache."""


@dataclass(frozen=True)
class Packed:
    """What of some moves has been packed. ``extent`` is to be freed when the writes have ended."""

    products: list[Product]
    extent: Extent | None
    """None if nothing was packed: there was nothing to move, or no room."""
    rest: list[Move]
    """What there was no room for, from the end of a receiver's block on: to be packed when some is freed."""


class PackedPlan:
    """A plan whose writes go through ``staging``. Units and moves are as in :class:`PairPlan`.

    Its facts are those of units that move by themselves, but for the smallest write, which is that of receiver's blocks
    that move whole. Raises :class:`LayoutError` for a cache that isn't in host memory, or a staging memory that is too
    small for one of the receiver's blocks.
    """

    def __init__(self, plan: PairPlan, staging: Staging) -> None:
        self._plan, self._staging = plan, staging
        self.units, self.theirs, self.heads = plan.units, plan.theirs, plan.heads
        self._cells: dict[tuple[int, int, str | None], list[Cell]] = {}
        groups = range(len(self.units))
        needed = max((plan.facts.bytes[group] * self._per_block(group) for group in groups), default=0)
        if needed > staging.size:
            raise LayoutError(
                f"a receiver's block takes {needed} bytes of {staging.size} in the staging memory; raise staging_bytes"
            )
        self._sources = [[self._source(match, group) for match in plan.matches[group]] for group in groups]
        alone = [self._cells_of(group, 1, None) for group in groups]
        whole = [self._cells_of(group, self._per_block(group), None) for group in groups]
        self.facts = Facts(
            tuple(sum(len(cell.length) for cell in group_cells) for group_cells in alone),
            plan.facts.bytes,
            min((int(cell.length.min()) for group_cells in whole for cell in group_cells), default=0),
        )

    def fits(self, moves: Sequence[Move]) -> int:
        """Up to which token there is room now for all of ``moves``, which begin and end at the same tokens.

        A part of the memory at most, so that what is packed next need not wait for what is being written. It is their
        end, or a boundary of the receiver's blocks, or where they begin if there is room for nothing.
        """
        first, end = moves[0].first, moves[0].end
        step, size = self._step([move.group for move in moves])
        room = min(self._staging.largest, max(size, self._staging.size // PARTS))
        return max(first, min(end, (first // step + room // max(size, 1)) * step))

    @property
    def least_room(self) -> int:
        """Bytes without which :meth:`fits` never has room for anything."""
        return self._step(range(len(self.units)))[1]

    def _step(self, groups: Iterable[int]) -> tuple[int, int]:
        """Tokens that fill blocks of the receiver's in all of these groups, and their bytes."""
        step = lcm(*(self.units[group] * self._per_block(group) for group in groups))
        return step, sum(self._plan.facts.bytes[group] * (step // self.units[group]) for group in groups)

    def batch(self, moves: Sequence[Move], layer: str | None = None) -> Packed:
        """Copy as much of ``moves`` as there is room for, in their order, and say which writes bring it over.

        The copy is made here and now: call it only when the KV is there, for no ready word can hold it back. Afterwards
        the sender's blocks may change. Raises like :meth:`PairPlan.batch`, with nothing taken.
        """
        parts, rest, size = self._fitting(moves, layer)
        if not size:
            return Packed([], None, rest)
        extent = self._staging.take(size)
        assert extent is not None
        products, start = [], extent.first
        for some, units, places in parts:
            for cell in some:
                products += self._pack(cell, units, places, start)
                start += cell.bytes * (len(places.local_block) // units)
        return Packed(products, extent, rest)

    def _fitting(
        self, moves: Sequence[Move], layer: str | None
    ) -> tuple[list[tuple[list[Cell], int, Places]], list[Move], int]:
        """What to pack (cells, units of each, places of these), what is left, and how many bytes that takes."""
        room = self._staging.largest
        fitting: list[Move] = []
        rest: list[Move] = []
        for move in moves:
            unit = self.units[move.group]
            bytes_of_unit = sum(cell.bytes for cell in self._cells_of(move.group, 1, layer))
            if not bytes_of_unit or move.first >= move.end:
                continue
            end = move.first + (room // bytes_of_unit if not rest else 0) * unit
            if end < move.end:  # whole blocks of the receiver's, so that writes stay large
                block = unit * self._per_block(move.group)
                end = max(move.first, end // block * block)
                rest.append(replace(move, first=end))
            if end > move.first:
                fitting.append(replace(move, end=min(end, move.end)))
                room -= -(-(fitting[-1].end - move.first) // unit) * bytes_of_unit
        parts, size = [], 0
        for group in range(len(self.units)):
            chosen = [move for move in fitting if move.group == group]
            for units, some in self._split(group, chosen):
                places = self._plan.places(group, some)
                if places is not None:
                    some_cells = self._cells_of(group, units, layer)
                    parts.append((some_cells, units, places))
                    size += sum(cell.bytes for cell in some_cells) * (len(places.local_block) // units)
        return parts, rest, size

    def _split(self, group: int, moves: Iterable[Move]) -> Iterator[tuple[int, list[Move]]]:
        """The moves' receiver's blocks that move whole, and the units beside them."""
        per_block = self._per_block(group)
        if per_block == 1:
            yield 1, list(moves)
            return
        block, unit = self.units[group] * per_block, self.units[group]
        whole, alone = [], []
        for move in moves:
            end = -(-move.end // unit) * unit
            first, last = -(-move.first // block) * block, end // block * block
            if first < last:
                whole.append(replace(move, first=first, end=last))
                alone += [replace(move, end=first), replace(move, first=last)]
            else:
                alone.append(move)
        yield per_block, whole
        yield 1, alone

    def _per_block(self, group: int) -> int:
        return self._plan.theirs.groups[group].block_size // self.units[group]

    def _pack(self, cell: Cell, units: int, places: Places, start: int) -> list[Product]:
        """Copy all cells to ``start`` in the staging memory; their writes."""
        block, unit = (numbers.reshape(-1, units) for numbers in (places.local_block, places.local_unit))
        remote = places.remote_block[::units] * cell.block
        if units == 1:
            remote = remote + places.remote_unit * cell.unit
        order = np.argsort(remote)
        block, unit, remote = block[order], unit[order], remote[order]
        count = len(order)
        for copy in cell.copies:
            length = int(cell.length[copy.chunk])
            heads, tokens, row = copy.rows.shape[2:]
            place = np.ndarray(
                (count, heads, tokens, row),
                np.uint8,
                self._staging.bytes,
                start + count * int(cell.before[copy.chunk]) + copy.offset,
                (length, *copy.steps, 1),
            )
            step = max(1, AT_ONCE_BYTES // (heads * tokens * row))
            for first in range(0, count, step):
                chosen = slice(first, first + step)
                place[chosen] = copy.rows[block[chosen, copy.unit], unit[chosen, copy.unit]]
        return list(self._products(cell, remote, start))

    def _products(self, cell: Cell, remote: Numbers, start: int) -> Iterator[Product]:
        registration = self._staging.registration
        local = registration.memory.address + start + cell.before * len(remote)
        for length in np.unique(cell.length).tolist():
            rows = np.stack((local, cell.target, cell.remote), axis=1)[cell.length == length].tolist()
            starts = np.flatnonzero(np.concatenate(([True], np.diff(remote) != length)))
            runs: Table = np.empty((len(starts), 3), dtype=np.uint64)
            runs[:, 0] = starts * length
            runs[:, 1] = remote[starts]
            runs[:, 2] = np.diff(starts, append=len(remote)) * length
            yield Product(SpanTable(Span(registration, *row) for row in rows), runs)

    def _cells_of(self, group: int, units: int, layer: str | None) -> list[Cell]:
        """Of all units of a receiver's block, or of one by itself, as ``units`` is."""
        found = self._cells.get((group, units, layer))
        if found is None:
            sources = [source for source in self._sources[group] if layer is None or source.match.ours.layer == layer]
            found = list(cells(sources, units))
            self._cells[group, units, layer] = found
        return found

    def _source(self, match: Match, group: int) -> Source:
        (first, end), plan = self._plan.heads, self._plan
        region, memory = match.ours, plan.registrations[match.handle].memory
        if memory.kind is not MemoryKind.HOST:
            raise LayoutError(
                f"small pieces of KV can't be packed from {memory.kind} memory; give both engines the same layout, or "
                f"set smallest_write_bytes to 0"
            )
        unit = self.units[group]
        rows: NDArray[np.uint8] = np.ndarray(
            (
                plan.ours.blocks,
                plan.ours.groups[group].block_size // unit,
                end - first,
                unit if region.token_stride else 1,
                region.row_bytes,
            ),
            np.uint8,
            (ctypes.c_char * memory.length).from_address(memory.address),
            region.address + (first - region.first_head) * region.head_stride - memory.address,
            (region.block_stride, match.steps.local_unit, region.head_stride, region.token_stride, 1),
        )
        return Source(match, rows, first - match.theirs.first_head)


def choose(
    ours: Layout,
    theirs: Layout,
    heads: Heads,
    registrations: Sequence[Registration],
    remote: Sequence[RemoteRegion],
    *,
    smallest_write_bytes: int,
    staging: Callable[[], Staging],
) -> PairPlan | PackedPlan:
    """Writes straight from the cache, unless some would be under ``smallest_write_bytes``: then packed in ``staging``.

    What is as large as our own cache keeps it together is never too small: no other layout would make it larger.

    Raises :class:`LayoutError` like both plans, and, naming both layouts, if even packed writes would be too small, or
    the cache isn't in host memory.
    """
    plan = PairPlan(ours, theirs, heads, registrations, remote)
    smallest = plan.facts.smallest_write
    if not smallest or smallest >= smallest_write_bytes or smallest >= _together(ours, registrations):
        return plan
    elsewhere = {registration.memory.kind for registration in registrations} - {MemoryKind.HOST}
    if elsewhere:
        why = f"KV in {'+'.join(sorted(elsewhere))} memory can't be packed unless bounce is set to always"
    else:
        memory = staging()
        packed = PackedPlan(plan, memory)
        smallest = packed.facts.smallest_write
        if packed.least_room > memory.size:
            raise LayoutError(
                f"blocks of all groups together take {packed.least_room} bytes of {memory.size} in the staging memory; "
                f"raise staging_bytes"
            )
        if smallest >= smallest_write_bytes:
            return packed
        why = "the receiver keeps no more together"
    raise LayoutError(
        f"KV of {described(ours)} here into {described(theirs)} there takes writes of {smallest} bytes, under "
        f"smallest_write_bytes ({smallest_write_bytes}): {why}; use layouts that are more alike, or lower that setting"
    )


def _together(layout: Layout, registrations: Sequence[Registration]) -> int:
    """Bytes of the smallest write into a cache of the very same layout."""
    heads = min(region.first_head for region in layout.regions), max(region.end_head for region in layout.regions)
    same = [RemoteRegion(0, region.address) for region in layout.regions]
    return PairPlan(layout, layout, heads, registrations, same).facts.smallest_write
