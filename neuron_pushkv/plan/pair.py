"""From any layout into any other: which writes put a sender's KV where a receiver wants it. Pure.

Source and destination are intersected by layer and part, head range and token position, and whatever is contiguous on
both sides is merged: tokens and heads inside a block, K next to V, layers next to each other, then neighbouring blocks.
A plan is made once per connection and share of the heads. Each write then costs at most O(pieces + units), and is
never expanded here: between equal layouts it is regions times runs of blocks, which the native core multiplies out.

Blocks of unlike size meet in units of as many tokens as divide both. What a kernel keeps in an order of its own has no
tokens to tell apart: it goes block by block, into a cache that the same kernel writes with the same block size, but can
still be split by heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout
from neuron_pushkv.plan.mapping import check, matching, units
from neuron_pushkv.plan.pieces import Match, Numbers, Pieces, Steps, pieces, units_apart
from neuron_pushkv.plan.shares import Heads
from neuron_pushkv.transport.base import Product, Registration, Span, SpanTable, Table
from neuron_pushkv.wire import RemoteRegion

__all__ = ["BlockTable", "Facts", "Move", "PairPlan", "Places", "check"]

BlockTable: TypeAlias = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Move:
    """Tokens ``[first, end)`` of one prompt, in one group. Arrays of 64-bit numbers are the quickest tables."""

    group: int
    source: BlockTable
    """The sender's blocks from token 0 on. Only those of tokens that move need be real."""
    target: BlockTable
    """The receiver's blocks from token ``target_start`` on."""
    target_start: int
    """On a boundary of the receiver's blocks."""
    first: int
    """A multiple of the group's unit."""
    end: int
    """If it isn't a multiple, the rest of its unit moves too: whoever has a token's block has all of it."""


@dataclass(frozen=True)
class Facts:
    """What a plan comes to, for people and for choosing."""

    writes: tuple[int, ...]
    """Per group: writes for one unit, before neighbouring units are merged."""
    bytes: tuple[int, ...]
    """Per group: bytes of one unit."""
    smallest_write: int
    """In bytes; 0 if nothing is to be written."""


class Places(NamedTuple):
    """Where units lie on either side: blocks, and numbers of units inside them. Arrays of one length."""

    local_block: Numbers
    local_unit: Numbers
    remote_block: Numbers
    remote_unit: Numbers

    def local(self, steps: Steps) -> Numbers:
        """Byte offsets of the units in our memory."""
        return self.local_block * steps.local_block + self.local_unit * steps.local_unit

    def remote(self, steps: Steps) -> Numbers:
        """Byte offsets of the units in the peer's memory."""
        return self.remote_block * steps.remote_block + self.remote_unit * steps.remote_unit

    def taken(self, order: Numbers) -> Places:
        """Those with these indices, in this order."""
        return Places(*(numbers[order] for numbers in self))


@dataclass(frozen=True, eq=False)
class _Stamp:
    """Spans that all units put their runs to: pieces of one length at the same steps."""

    steps: Steps
    length: int
    spans: SpanTable


class PairPlan:
    """How KV goes from one rank's cache into another's. Not for several threads at once.

    ``ours`` is the sender's layout, with a registration for each of its regions; ``theirs`` is the receiver's, with
    a remote region for each. ``heads`` are those that this receiver wants from this sender, by their global numbers:
    (0, 1) of a latent. Regions that one side lacks (other pipeline ranks' layers) are no part of it.

    Raises :class:`LayoutError` if the layouts can't be mapped, or either side doesn't hold those heads.
    """

    def __init__(
        self,
        ours: Layout,
        theirs: Layout,
        heads: Heads,
        registrations: Sequence[Registration],
        remote: Sequence[RemoteRegion],
    ) -> None:
        check(ours, theirs)
        self.units = units(ours, theirs)
        """Per group: tokens that are moved together."""
        self.ours, self.theirs, self.heads = ours, theirs, heads
        self.registrations = {registration.handle: registration for registration in registrations}
        """By handle."""
        self.matches: list[list[Match]] = [[] for _ in ours.groups]
        """Per group: the regions that go into one another."""
        for here, there in matching(ours, theirs, heads):
            region, other = ours.regions[here], theirs.regions[there]
            group, unit = region.group, self.units[region.group]
            steps = Steps(
                region.block_stride,
                units_apart(region, ours.groups[group].block_size, unit),
                other.block_stride,
                units_apart(other, theirs.groups[group].block_size, unit),
            )
            handle, place = registrations[here].handle, remote[there]
            if place.offset + theirs.span(other) >= 1 << 63:
                raise LayoutError(f"the receiver's {other.name} reaches beyond 63 bits of offset; describe real memory")
            match = Match(region, other, steps, handle, region.address, place.memory, place.offset)
            self.matches[group].append(match)
        self._stamps: dict[tuple[int, str | None], list[_Stamp]] = {}
        everything = [self._pieces(group, None) for group in range(len(self.units))]
        self.facts = Facts(
            tuple(sum(len(some.length) for some in group) for group in everything),
            tuple(sum(int(some.length.sum()) for some in group) for group in everything),
            min((int(some.length.min()) for group in everything for some in group), default=0),
        )

    def batch(self, moves: Sequence[Move], layer: str | None = None) -> list[Product]:
        """The writes for ``moves``, of one layer or of all; empty if this pair has nothing to do with them.

        Raises :class:`LayoutError` if a move isn't on the boundaries that :class:`Move` asks for, or its tables have no
        block, or one outside the caches, for a token that moves.
        """
        products: list[Product] = []
        for group in range(len(self.units)):
            places = self.places(group, [move for move in moves if move.group == group])
            if places is not None:
                # vLLM hands out freed blocks in descending order, which would merge with nothing.
                places = places.taken(np.lexsort((places.local_unit, places.local_block)))
                stamps = self._stamped(group, layer)
                products.extend(Product(stamp.spans, _runs(stamp, places)) for stamp in stamps)
        return products

    def places(self, group: int, moves: Sequence[Move]) -> Places | None:
        """Where the units of ``moves``, all of this group, lie, in order; None if there are none. Raises like batch."""
        unit = self.units[group]
        here, there = self.ours.groups[group].block_size // unit, self.theirs.groups[group].block_size // unit
        found = []
        for move in moves:
            if move.first % unit or move.target_start % (there * unit) or move.first < move.target_start:
                raise LayoutError(
                    f"tokens {move.first} to {move.end} into blocks from token {move.target_start} on: start on a "
                    f"multiple of {unit}, and the receiver's blocks on one of {there * unit} not behind it"
                )
            first, end = move.first // unit, -(-move.end // unit)
            start = move.target_start // unit
            if first < end:
                local = _looked_up(move.source, first, end, here, self.ours.blocks, "sender")
                remote = _looked_up(move.target, first - start, end - start, there, self.theirs.blocks, "receiver")
                found.append((*local, *remote))
        if not found:
            return None
        return Places(*(found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))))

    def _pieces(self, group: int, layer: str | None) -> list[Pieces]:
        matches = [match for match in self.matches[group] if layer is None or match.ours.layer == layer]
        return list(pieces(matches, self.units[group], self.heads))

    def _stamped(self, group: int, layer: str | None) -> list[_Stamp]:
        stamps = self._stamps.get((group, layer))
        if stamps is None:
            stamps = [stamp for some in self._pieces(group, layer) for stamp in self._by_length(some)]
            self._stamps[group, layer] = stamps
        return stamps

    def _by_length(self, some: Pieces) -> list[_Stamp]:
        stamps = []
        for length in np.unique(some.length).tolist():
            rows = np.stack((some.handle, some.local, some.target, some.remote), axis=1)[some.length == length]
            spans = [Span(self.registrations[handle], *rest) for handle, *rest in rows.tolist()]
            stamps.append(_Stamp(some.steps, length, SpanTable(spans)))
        return stamps


def _looked_up(
    table: BlockTable, first: int, end: int, units_per_block: int, blocks: int, who: str
) -> tuple[Numbers, Numbers]:
    """The block of each unit ``[first, end)`` and the unit's number inside it."""
    skipped, last = first // units_per_block, -(-end // units_per_block)
    if last > len(table):
        raise LayoutError(f"the {who}'s table of {len(table)} blocks ends before the tokens that move; give all of it")
    found = np.array(table[skipped:last], dtype=np.int64)
    if found.min() < 0 or found.max() >= blocks:
        raise LayoutError(f"a block in the {who}'s table is none of its {blocks}; give those that hold the tokens")
    if units_per_block == 1:
        return found, np.zeros_like(found)
    index: Numbers = np.arange(first, end, dtype=np.int64)
    block: Numbers = index // units_per_block
    return found[block - skipped], index - block * units_per_block


def _runs(stamp: _Stamp, places: Places) -> Table:
    """The units' offsets, with those merged whose pieces touch on both sides."""
    local, remote = places.local(stamp.steps), places.remote(stamp.steps)
    apart: NDArray[np.bool_] = np.empty(len(local), dtype=np.bool_)
    apart[0] = True
    np.not_equal(local[1:] - local[:-1], stamp.length, out=apart[1:])
    apart[1:] |= remote[1:] - remote[:-1] != stamp.length
    starts = np.flatnonzero(apart)
    runs: Table = np.empty((len(starts), 3), dtype=np.uint64)
    runs[:, 0] = local[starts]
    runs[:, 1] = remote[starts]
    runs[:-1, 2] = starts[1:] - starts[:-1]
    runs[-1, 2] = len(local) - starts[-1]
    runs[:, 2] *= np.uint64(stamp.length)
    return runs
