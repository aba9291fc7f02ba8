"""Blocks of one size over slabs of memory, which are asked for as they are needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from neuron_pushkv.blocks import BlockPool, Extent
from neuron_pushkv.device.base import SLAB_ALIGNMENT, Memory
from neuron_pushkv.errors import BlockError


class SlabSource(Protocol):
    """Where slabs come from: any accelerator, or whoever has something to do with each new slab."""

    @property
    def slab_bytes(self) -> int:
        """What a slab should have at least, where there is need for as much."""

    def allocate(self, length: int) -> Memory:
        """New memory, aligned to :data:`SLAB_ALIGNMENT`. Raises :class:`~neuron_pushkv.errors.DeviceError`."""

    def free(self, memory: Memory) -> None:
        """Give it back."""


class Slab(NamedTuple):
    """``memory`` holds the blocks from ``first`` on, side by side."""

    first: int
    memory: Memory


class SlabPool:
    """A :class:`BlockPool` of ``block_bytes`` each, up to ``limit_bytes`` in all.

    It has no memory at first, and asks ``source`` for a slab when too few blocks are free: as large as the source likes
    them or as what is taken needs, whichever is more, and no larger than the limit leaves. Slabs are kept until
    :meth:`close`.
    """

    def __init__(self, source: SlabSource, *, block_bytes: int, limit_bytes: int) -> None:
        if not 0 < block_bytes <= limit_bytes:
            raise BlockError(f"{limit_bytes} bytes hold no block of {block_bytes}; raise the limit")
        self._source = source
        self.block_bytes = block_bytes
        self.limit = limit_bytes // block_bytes
        """How many blocks there may be."""
        self.blocks = BlockPool()
        """For sharing and releasing. Blocks are taken through :meth:`take`."""
        self.slabs: list[Slab] = []

    def take(self, count: int, owner: Hashable, *, whole: bool = False) -> list[Extent] | None:
        """See :meth:`BlockPool.take`; None if the limit leaves no room. Raises what the source raises."""
        taken = self.blocks.take(count, owner, whole=whole)
        if taken is None and self._grow(count if whole else count - self.blocks.free):
            taken = self.blocks.take(count, owner, whole=whole)
        return taken

    def slab(self, extent: Extent) -> Slab:
        """The one that ``extent`` lies in."""
        return self.slabs[bisect_right(self.slabs, extent.first, key=lambda slab: slab.first) - 1]

    def address(self, extent: Extent) -> int:
        """Where its bytes begin."""
        slab = self.slab(extent)
        return slab.memory.address + (extent.first - slab.first) * self.block_bytes

    def close(self) -> None:
        """Free all slabs: nothing may be using them any more, nor this pool. Idempotent."""
        while self.slabs:
            self._source.free(self.slabs.pop().memory)

    def _grow(self, count: int) -> bool:
        """Room for ``count`` more blocks in one slab. False if the limit is in the way."""
        left = self.limit - self.blocks.total
        if count > left:
            return False
        wanted = max(count * self.block_bytes, min(self._source.slab_bytes, left * self.block_bytes))
        length = -(-wanted // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
        memory = self._source.allocate(length)
        self.slabs.append(Slab(self.blocks.grow(min(left, length // self.block_bytes)).first, memory))
        return True
