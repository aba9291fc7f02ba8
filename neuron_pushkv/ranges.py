"""Runs of equal values over whole numbers: what an allocator knows of its blocks, without a word for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from sortedcontainers import SortedDict

Value = TypeVar("Value")


class Extent(NamedTuple):
    """``length`` blocks from ``first`` on."""

    first: int
    length: int

    @property
    def end(self) -> int:
        """The number behind its last one."""
        return self.first + self.length


class Run(NamedTuple, Generic[Value]):
    """Numbers from ``first`` up to ``end`` that have one value."""

    first: int
    end: int
    value: Value


class Ranges(Generic[Value]):
    """Maps numbers to values that are compared by equality; numbers without a value have ``None``.

    Neighbours of equal value are one run. Finding and changing a run is O(log n) in the number of runs (a sorted list
    of their beginnings); what touches several runs costs that for each.
    """

    def __init__(self) -> None:
        self._runs: SortedDict = SortedDict()
        """First number -> (end, value)."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __iter__(self) -> Iterator[Run[Value]]:
        """All runs, in order."""
        return (Run(first, end, value) for first, (end, value) in self._runs.items())

    def within(self, extent: Extent) -> list[Run[Value]]:
        """The runs that have numbers of ``extent``, cut to it."""
        return [
            Run(max(first, extent.first), min(end, extent.end), value)
            for first, end, value in self._around(extent)
            if first < extent.end and end > extent.first
        ]

    def change(
        self, extent: Extent, new: Callable[[Value | None], Value | None]
    ) -> tuple[list[Run[Value]], list[Run[Value]]]:
        """Give each number of ``extent`` the value that ``new`` makes of its old one.

        Returns the runs that are gone and the ones that are there instead: between them they cover the same numbers,
        and some neighbours of ``extent`` with them.
        """
        gone = self._around(extent)
        pieces: list[Run[Value | None]] = []
        done = extent.first
        for run in gone:
            if run.first < extent.first:
                pieces.append(Run(run.first, min(run.end, extent.first), run.value))
            first, end = max(run.first, extent.first), min(run.end, extent.end)
            if first < end:
                pieces += [Run(done, first, new(None)), Run(first, end, new(run.value))]
                done = end
            if run.end > extent.end:
                pieces += [Run(done, extent.end, new(None)), Run(max(run.first, extent.end), run.end, run.value)]
                done = extent.end
        pieces.append(Run(done, extent.end, new(None)))
        for run in gone:
            del self._runs[run.first]
        there = list(_joined(pieces))
        for first, end, value in there:
            self._runs[first] = (end, value)
        return gone, there

    def _around(self, extent: Extent) -> list[Run[Value]]:
        """The runs that share numbers with ``extent`` or end where it begins or begin where it ends, in order."""
        found = []
        for first in self._runs.irange(maximum=extent.end, reverse=True):
            end, value = self._runs[first]
            if end < extent.first:
                break
            found.append(Run(first, end, value))
        found.reverse()
        return found


def _joined(pieces: list[Run[Value | None]]) -> Iterator[Run[Value]]:
    """Without the empty ones and those without a value; neighbours of equal value as one."""
    before: Run[Value] | None = None
    for first, end, value in pieces:
        if first == end or value is None:
            continue
        if before is not None and before.end == first and before.value == value:
            before = before._replace(end=end)
            continue
        if before is not None:
            yield before
        before = Run(first, end, value)
    if before is not None:
        yield before
