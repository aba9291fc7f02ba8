"""What is put together before it is written: rows of our cache in the order of the receiver's. Pure.

A cell is what moves as one, a receiver's block or one unit of it; a chunk is what of a cell is contiguous there. In the
staging memory a chunk's copies for all cells lie side by side, in the order of the receiver's memory, so that chunks
which fill their step there merge into longer writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.plan.pieces import Match, Numbers


class Source(NamedTuple):
    """What is wanted of one of our regions."""

    match: Match
    rows: NDArray[np.uint8]
    """(blocks, units of a block, heads, tokens of a unit, bytes), where they are."""
    first_head: int
    """Counted from the first head of the receiver's region."""


@dataclass(frozen=True, eq=False)
class Copy:
    """Rows of one region and unit that land in one chunk."""

    unit: int
    """Which of the cell's."""
    rows: NDArray[np.uint8]
    """As in :class:`Source`, but only these heads and tokens."""
    chunk: int
    offset: int
    """Bytes from the chunk's start to the first row."""
    steps: tuple[int, int]
    """Bytes from head to head and from token to token in the chunk."""


@dataclass(frozen=True, eq=False)
class Cell:
    """What moves as one. Arrays have one entry for each chunk, in order of (target, remote)."""

    block: int
    """Bytes from block to block at the receiver."""
    unit: int
    """Bytes from unit to unit, if the cell is only one of several in a block."""
    target: Numbers
    remote: Numbers
    length: Numbers
    before: Numbers
    """Bytes of all chunks before this one."""
    copies: list[Copy]

    @property
    def bytes(self) -> int:
        """Of all chunks."""
        return int(self.length.sum())


def cells(sources: Iterable[Source], units: int) -> Iterator[Cell]:
    """Cells of ``units`` units, one for each kind of steps at the receiver."""
    kinds: dict[tuple[int, int], list[Source]] = {}
    for source in sources:
        steps = source.match.steps
        kinds.setdefault((steps.remote_block, steps.remote_unit if units == 1 else 0), []).append(source)
    for (block, unit), alike in kinds.items():
        yield _cell(block, unit, alike, units)


def _cell(block: int, unit: int, sources: list[Source], units: int) -> Cell:
    places = [_places(source, units) for source in sources]
    target = np.concatenate(
        [np.full(place.size, source.match.target) for source, place in zip(sources, places, strict=True)]
    )
    remote = np.concatenate([place.ravel() for place in places])
    length = np.concatenate(
        [np.full(place.size, source.match.ours.row_bytes) for source, place in zip(sources, places, strict=True)]
    )
    order = np.lexsort((remote, target))
    sorted_target, sorted_remote, sorted_length = target[order], remote[order], length[order]
    opens: NDArray[np.bool_] = np.empty(len(order), dtype=np.bool_)
    opens[0] = True
    opens[1:] = sorted_target[1:] != sorted_target[:-1]
    opens[1:] |= sorted_remote[1:] != sorted_remote[:-1] + sorted_length[:-1]
    starts = np.flatnonzero(opens)
    chunk: Numbers = np.empty(len(order), dtype=np.int64)
    chunk[order] = np.cumsum(opens) - 1
    offset = remote - sorted_remote[starts][chunk]
    copies: list[Copy] = []
    done = 0
    for source, place in zip(sources, places, strict=True):
        mine = slice(done, done + place.size)
        copies += _copies(source, chunk[mine].reshape(place.shape), offset[mine].reshape(place.shape))
        done += place.size
    lengths = np.add.reduceat(sorted_length, starts)
    return Cell(
        block, unit, sorted_target[starts], sorted_remote[starts], lengths, np.cumsum(lengths) - lengths, copies
    )


def _places(source: Source, units: int) -> Numbers:
    """(units, heads, tokens): where the rows of a cell in block 0 go in the receiver's memory."""
    match, heads, tokens = source.match, source.rows.shape[2], source.rows.shape[3]
    places: Numbers = np.add.outer(
        np.add.outer(
            np.arange(units, dtype=np.int64) * match.steps.remote_unit,
            np.arange(source.first_head, source.first_head + heads, dtype=np.int64) * match.theirs.head_stride,
        ),
        np.arange(tokens, dtype=np.int64) * match.theirs.token_stride + match.remote,
    )
    return places


def _copies(source: Source, chunk: Numbers, offset: Numbers) -> Iterator[Copy]:
    """One for each unit whose rows all lie in one chunk; otherwise by head, by token or both. (unit, head, token)."""
    units, heads, tokens = chunk.shape
    steps = source.match.theirs.head_stride, source.match.theirs.token_stride
    some_heads = 1 if (chunk != chunk[:, :1, :]).any() else heads
    some_tokens = 1 if (chunk != chunk[:, :, :1]).any() else tokens
    for unit in range(units):
        for head in range(0, heads, some_heads):
            for token in range(0, tokens, some_tokens):
                rows = source.rows[:, :, head : head + some_heads, token : token + some_tokens]
                where = unit, head, token
                yield Copy(unit, rows, int(chunk[where]), int(offset[where]), steps)
