"""Hands out blocks of memory: contiguous where possible, to several owners each, and not again before it is safe.

Pure numbers; :mod:`neuron_pushkv.slabs` puts memory under them.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from functools import partial
from itertools import count as counting
from itertools import pairwise
from typing import NamedTuple

from sortedcontainers import SortedList

from neuron_pushkv.errors import BlockError
from neuron_pushkv.ranges import Extent, Ranges, Run

__all__ = ["BlockPool", "Extent"]


class _State(NamedTuple):
    """What is known of a block."""

    part: int
    """Which :meth:`BlockPool.grow` added it: extents never reach over two of them."""
    owners: int = 0
    quarantines: int = 0


class BlockPool:
    """Blocks are numbered from 0. Each is free, held by one or more owners, or in quarantine: let go by its last owner,
    and not to be handed out before a time or a word (a write to it may still be under way). At any time

        ``free + held + quarantined == total``.

    A quarantine that begins while other owners hold the block counts from when the last of them lets go, if it lasts as
    long. Owners are any hashable values, and hold each block once.

    Taking is best fit: the shortest run that is long enough, of equal ones the lowest; without one, the longest runs,
    which makes the fewest extents. Everything costs O(log n) for each extent that it touches, n being the number of
    runs of blocks that are alike. Not for several threads at once. All methods raise :class:`BlockError` for what is no
    owner's to do, and then change nothing.
    """

    def __init__(self, count: int = 0) -> None:
        self._states: Ranges[_State] = Ranges()
        self._by_length: SortedList = SortedList()
        """(length, first) of the free runs."""
        self._owned: dict[Hashable, Ranges[int]] = {}
        """Each owner's blocks, with their part."""
        self._waiting: dict[Hashable, dict[int, list[Extent]]] = {}
        """Quarantines by who began them and their number."""
        self._ends: list[tuple[float, int, Hashable]] = []
        """(time, number, owner) of those that end by themselves: a heap, which may name some that are over."""
        self._numbers = counting()
        self._parts = counting()
        self.total = 0
        self.held = 0
        self.quarantined = 0
        if count:
            self.grow(count)

    @property
    def free(self) -> int:
        """How many blocks can be taken now."""
        return self.total - self.held - self.quarantined

    @property
    def largest(self) -> int:
        """How many can be taken as one extent."""
        return int(self._by_length[-1][0]) if self._by_length else 0

    @property
    def fragmentation(self) -> float:
        """From 0 (all that is free is one extent) to nearly 1."""
        return 1 - self.largest / self.free if self.free else 0.0

    def grow(self, count: int) -> Extent:
        """Add ``count`` free blocks, whose memory is not the neighbour of what is there. Returns their numbers."""
        extent, state = Extent(self.total, _positive(count)), _State(next(self._parts))
        self.total += count
        self._settle(*self._states.change(extent, lambda _: state))
        return extent

    def take(self, count: int, owner: Hashable, *, whole: bool = False) -> list[Extent] | None:
        """Take ``count`` free blocks, as one extent if there is one or if ``whole``; None if there is no room."""
        if _positive(count) > (self.largest if whole else self.free):
            return None
        taken: list[Extent] = []
        while count:
            fits = self._by_length.bisect_left((count, 0))
            length, first = self._by_length[min(fits, len(self._by_length) - 1)]
            extent = Extent(first, min(length, count))
            self._add(extent, owner)
            taken.append(extent)
            count -= extent.length
        return taken

    def share(self, extents: Iterable[Extent], owner: Hashable) -> None:
        """Make ``owner`` one more owner of blocks that others hold."""
        extents = _distinct(extents)
        for extent in extents:
            if any(not run.value.owners for run in self._within(extent)):
                raise BlockError(f"not all blocks of {_named(extent)} are held by anyone; share what is held")
            if owner in self._owned and self._owned[owner].within(extent):
                raise BlockError(f"{owner!r} holds some of {_named(extent)} already; share each block with it once")
        for extent in extents:
            self._add(extent, owner)

    def release(self, owner: Hashable, extents: Iterable[Extent] | None = None, *, until: float | None = None) -> None:
        """``owner`` lets go of ``extents``, or of all that it holds (there may be nothing).

        With ``until`` nobody gets them before :meth:`expire` is told of that time or :meth:`lift` of that owner;
        ``math.inf`` leaves only the latter. The clock is the caller's.
        """
        extents = self.owned(owner) if extents is None else _distinct(extents)
        for extent in extents:
            mine = self._owned[owner].within(extent) if owner in self._owned else []
            if sum(run.end - run.first for run in mine) != extent.length:
                raise BlockError(
                    f"{owner!r} does not hold all of {_named(extent)}; each owner releases what it holds, once"
                )
        for extent in extents:
            self._owned[owner].change(extent, lambda _: None)
            self._count(extent, owners=-1, quarantines=0 if until is None else 1)
        if owner in self._owned and not self._owned[owner]:
            del self._owned[owner]
        if until is not None and extents:
            number = next(self._numbers)
            self._waiting.setdefault(owner, {})[number] = extents
            heapq.heappush(self._ends, (until, number, owner))

    def expire(self, now: float) -> None:
        """End the quarantines that were to last until ``now`` or earlier."""
        while self._ends and self._ends[0][0] <= now:
            _, number, owner = heapq.heappop(self._ends)
            self._end(owner, number)

    def lift(self, owner: Hashable) -> None:
        """End all quarantines that began with ``owner``'s releases; there may be none."""
        for number in list(self._waiting.get(owner, ())):
            self._end(owner, number)

    def owned(self, owner: Hashable) -> list[Extent]:
        """What ``owner`` holds, in order, as the longest extents that it makes."""
        return [Extent(run.first, run.end - run.first) for run in self._owned.get(owner, ())]

    def _end(self, owner: Hashable, number: int) -> None:
        numbers = self._waiting.get(owner, {})
        for extent in numbers.pop(number, ()):
            self._count(extent, quarantines=-1)
        if not numbers:
            self._waiting.pop(owner, None)

    def _add(self, extent: Extent, owner: Hashable) -> None:
        owned = self._owned.setdefault(owner, Ranges())
        for run in self._states.within(extent):
            owned.change(Extent(run.first, run.end - run.first), partial(_always, run.value.part))
        self._count(extent, owners=1)

    def _count(self, extent: Extent, owners: int = 0, quarantines: int = 0) -> None:
        def counted(state: _State | None) -> _State | None:
            return state and _State(state.part, state.owners + owners, state.quarantines + quarantines)

        self._settle(*self._states.change(extent, counted))

    def _settle(self, gone: list[Run[_State]], there: list[Run[_State]]) -> None:
        """Bring the totals and the list of free runs up to date with runs that have changed."""
        for runs, sign in ((gone, -1), (there, 1)):
            for first, end, state in runs:
                if state.owners:
                    self.held += sign * (end - first)
                elif state.quarantines:
                    self.quarantined += sign * (end - first)
                elif sign > 0:
                    self._by_length.add((end - first, first))
                else:
                    self._by_length.remove((end - first, first))

    def _within(self, extent: Extent) -> list[Run[_State]]:
        if extent.first < 0 or extent.end > self.total:
            raise BlockError(f"{_named(extent)} is not of this pool's {self.total} blocks; use extents it has given")
        return self._states.within(extent)


def _positive(count: int) -> int:
    if count < 1:
        raise BlockError(f"{count} blocks are none to work with; name one at least")
    return count


def _always(part: int, _: int | None) -> int:
    return part


def _distinct(extents: Iterable[Extent]) -> list[Extent]:
    """In order. Raises if they overlap, for then some block would be counted twice."""
    ordered = sorted(extents)
    for before, after in pairwise(ordered):
        if before.end > after.first:
            raise BlockError(f"{_named(before)} and {_named(after)} overlap; name each block once")
    for extent in ordered:
        _positive(extent.length)
    return ordered


def _named(extent: Extent) -> str:
    return f"blocks {extent.first} to {extent.end - 1}"
