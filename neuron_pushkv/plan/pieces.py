"""What one unit of tokens falls into: pieces that are contiguous on both sides. Pure.

A unit is the tokens that always move together, and lies inside one block on either side. A piece is found once per pair
of layouts and then repeats with every unit, at fixed steps on either side; so a plan's size is pieces plus units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.layout import Region
from neuron_pushkv.plan.shares import Heads

Numbers: TypeAlias = NDArray[np.int64]


class Steps(NamedTuple):
    """Bytes from block to block, and from unit to unit inside a block (0 where a unit is a whole block)."""

    local_block: int
    local_unit: int
    remote_block: int
    remote_unit: int


@dataclass(frozen=True)
class Match:
    """A region of ours and the one that it goes into. Bases are what the first byte of block 0 counts as."""

    ours: Region
    theirs: Region
    steps: Steps
    handle: int
    """Of the registration that our region lies in."""
    local: int
    target: int
    remote: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces that repeat at the same steps; arrays of one length, in order of (handle, target, local)."""

    steps: Steps
    handle: Numbers
    local: Numbers
    target: Numbers
    remote: Numbers
    length: Numbers


def units_apart(region: Region, block_size: int, unit: int) -> int:
    """Bytes from unit to unit inside a block: 0 where a unit is a whole block."""
    return unit * region.token_stride if unit < block_size else 0


def pieces(matches: Iterable[Match], unit: int, heads: Heads) -> Iterator[Pieces]:
    """The pieces of one unit of ``unit`` tokens, merged over tokens, heads, parts and layers; by steps."""
    ordered = sorted(matches, key=lambda match: match.steps)
    for steps, alike in groupby(ordered, key=lambda match: match.steps):
        yield _merged(steps, [_rows(match, unit, heads) for match in alike])


def cut(ours: Region, theirs: Region, unit: int, heads: Heads) -> tuple[Numbers, Numbers, int]:
    """What both regions have of one unit: offsets on either side from their blocks' starts, and the length of each.

    Heads and tokens that are as close to each other on both sides as they can be come as one.
    """
    first, end = heads
    tokens = unit if ours.token_stride else 1
    loops = [
        (end - first, ours.head_stride, theirs.head_stride),
        (tokens, ours.token_stride, theirs.token_stride),
    ]
    loops = [loop for loop in loops if loop[0] > 1]
    length = ours.row_bytes
    while (close := next((loop for loop in loops if loop[1] == loop[2] == length), None)) is not None:
        loops.remove(close)
        length *= close[0]
    local = np.array([(first - ours.first_head) * ours.head_stride], dtype=np.int64)
    remote = np.array([(first - theirs.first_head) * theirs.head_stride], dtype=np.int64)
    for count, here, there in loops:
        index: Numbers = np.arange(count, dtype=np.int64)
        local = np.add.outer(local, index * here).ravel()
        remote = np.add.outer(remote, index * there).ravel()
    return local, remote, length


def _rows(match: Match, unit: int, heads: Heads) -> Numbers:
    """(5, n): handle, target, local, remote, length."""
    local, remote, length = cut(match.ours, match.theirs, unit, heads)
    rows: Numbers = np.empty((5, len(local)), dtype=np.int64)
    rows[0], rows[1], rows[4] = match.handle, match.target, length
    np.add(local, match.local, out=rows[2])
    np.add(remote, match.remote, out=rows[3])
    return rows


def _merged(steps: Steps, rows: list[Numbers]) -> Pieces:
    table = np.concatenate(rows, axis=1)
    table = table[:, np.lexsort((table[2], table[1], table[0]))]
    handle, target, local, remote, length = table
    joins = (
        (handle[1:] == handle[:-1])
        & (target[1:] == target[:-1])
        & (local[1:] == local[:-1] + length[:-1])
        & (remote[1:] == remote[:-1] + length[:-1])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    lengths = np.add.reduceat(length, starts)
    return Pieces(steps, handle[starts], local[starts], target[starts], remote[starts], lengths)
