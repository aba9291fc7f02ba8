"""What of a batch goes to NIXL as one transfer.

All of it is arithmetic on whole tables: nothing loops over writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.device.base import MemoryKind
from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Product, Table
from neuron_pushkv.transport.nixl.wire import KINDS, Place

PART_WRITES = 256
PART_BYTES = 1 << 20
"""A part ends when it has either. Small, so that a post is short, cancelling works soon, and so does the receiver's
fence, which takes until there is a gap in what comes."""
_ROWS = 1 << 16
"""Writes that are laid out at once."""

Column: TypeAlias = NDArray[np.uint64]
Places: TypeAlias = tuple[Column, Column, Column]
"""Where each span starts: address, number of the device, kind (an index of ``KINDS``)."""


@dataclass(frozen=True)
class Part:
    """One transfer of NIXL's. ``local`` and ``remote`` are (n, 3): address, bytes, number of the device."""

    local: Table
    remote: Table
    local_kind: MemoryKind
    remote_kind: MemoryKind
    writes: int
    """How many of the batch's writes it stands for; those that touch on both sides are one row."""
    bytes: int


@dataclass(frozen=True)
class Rows:
    """A product whose places are known and checked."""

    local: Places
    remote: Places
    runs: Table


def resolve(product: Product, local: dict[int, Place], remote: dict[int, Place]) -> Rows:
    """Look up and check where a product's spans lie: ``local`` by registration's handle, ``remote`` by target.

    Raises :class:`TransportError` for memory that is not known, and for a run that leaves it.
    """
    spans, runs = product.spans.flat, product.runs
    if not len(spans) or not len(runs):
        raise TransportError("a product without spans or runs")
    if not runs[:, 2].all():
        raise TransportError("a run of no bytes")
    sources = _look_up(spans[:, 0], local, "that memory is not registered")
    targets = _look_up(spans[:, 2], remote, "that memory is not attached to this peer")
    here, there = spans[:, 1], targets[:, 0] + spans[:, 3]
    if not _inside(here - sources[:, 0], sources[:, 1], runs[:, 0], runs[:, 2]):
        raise TransportError("a run leaves the registered memory")
    if not _inside(spans[:, 3], targets[:, 1], runs[:, 1], runs[:, 2]):
        raise TransportError("a run leaves the peer's memory")
    return Rows((here, sources[:, 2], sources[:, 3]), (there, targets[:, 2], targets[:, 3]), runs)


def _look_up(keys: Column, known: dict[int, Place], otherwise: str) -> Table:
    """(n, 4): the place of each key."""
    unique, inverse = np.unique(keys, return_inverse=True)
    try:
        rows = [known[key] for key in unique.tolist()]
    except KeyError as error:
        raise TransportError(otherwise) from error
    table: Table = np.array(rows, dtype=np.uint64)[inverse]
    return table


def _inside(starts: Column, sizes: Column, offsets: Column, lengths: Column) -> bool:
    """Whether all runs stay inside, from each start in memory of that size. A sum may go round at 64 bits."""
    ends = offsets + lengths
    first, last = offsets.min(), ends.max()
    begins = starts + first
    return bool(
        (ends > offsets).all() and (begins <= sizes).all() and (last - first <= sizes - np.minimum(begins, sizes)).all()
    )


def cut(products: Sequence[Rows]) -> Iterator[Part]:
    """The parts of a batch, made as they are asked for."""
    for product in products:
        step = max(1, _ROWS // len(product.runs))
        for first in range(0, len(product.local[0]), step):
            yield from _parts(product, slice(first, first + step))


def _parts(product: Rows, spans: slice) -> Iterator[Part]:
    runs = product.runs
    local, local_device, local_kind = (column[spans] for column in product.local)
    remote, remote_device, remote_kind = (column[spans] for column in product.remote)
    from_ = (local[:, None] + runs[:, 0]).ravel()
    to = (remote[:, None] + runs[:, 1]).ravel()
    size = np.tile(runs[:, 2], len(local))
    # Of each row: what may differ only from one span to the next.
    fixed = np.repeat(np.stack((local_device, remote_device, local_kind, remote_kind), axis=1), len(runs), axis=0)

    full = np.stack(
        (np.arange(len(size), dtype=np.uint64) // PART_WRITES, (size.cumsum() - size) // PART_BYTES), axis=1
    )
    changes = (np.diff(np.concatenate((full, fixed), axis=1), axis=0) != 0).any(axis=1)
    touches = (from_[:-1] + size[:-1] == from_[1:]) & (to[:-1] + size[:-1] == to[1:])
    begins = np.flatnonzero(np.concatenate(([True], changes)))
    heads = np.flatnonzero(np.concatenate(([True], changes | ~touches)))
    sizes = np.add.reduceat(size, heads)
    here = np.stack((from_[heads], sizes, fixed[heads, 0]), axis=1)
    there = np.stack((to[heads], sizes, fixed[heads, 1]), axis=1)
    writes = np.diff(begins, append=len(size)).tolist()
    places = np.append(np.searchsorted(heads, begins), len(heads)).tolist()
    for index, (begin, end) in enumerate(itertools.pairwise(places)):
        kinds = fixed[begins[index]]
        yield Part(
            here[begin:end],
            there[begin:end],
            KINDS[int(kinds[2])],
            KINDS[int(kinds[3])],
            writes[index],
            int(sizes[begin:end].sum()),
        )
