"""How one rank's KV cache lies in memory: regions with named byte strides.

A region is one part (K, V, a latent, or whatever a kernel keeps in an order of its own) of one layer. The bytes of
token ``t`` in block ``b`` for head ``h`` are the ``row_bytes`` bytes at

    address + b * block_stride + h * head_stride + t * token_stride

with ``h`` counted from the region's first head and ``t`` from the block's first token. All orders of vLLM's caches
(LBHNC, LBNHC, BLHNC, BLNHC, K and V together or apart, one head or many) are such strides. Where a kernel transposes or
packs inside a block, there are no rows: ``token_stride`` is 0, and ``row_bytes`` is all that a block has of one head.
Such a region can be copied into another only if the same kernel wrote both, block by block, so a layout is named by its
kernel and never guessed from a tensor's strides.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=512)]
Part = Literal["k", "v", "kv", "latent"]

ROWS = "rows"
"""The kernel name of caches that keep each head's tokens as plain rows, whoever wrote them."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One part of one layer. Strides and sizes are in bytes; ``address`` is virtual, and means nothing to a peer."""

    layer: Text
    part: Part
    group: Count
    """Index into the layout's groups."""
    address: Count
    block_stride: Size
    head_stride: Count
    """0 where there is one head."""
    token_stride: Count
    """0 where the kernel keeps a block's tokens in an order of its own."""
    row_bytes: Size
    first_head: Count = 0
    """Global number of its first head. A latent has one head, 0, on every rank."""
    heads: Size = 1

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.layer}.{self.part}"

    @property
    def end_head(self) -> int:
        """One beyond its last head."""
        return self.first_head + self.heads

    def block_bytes(self, block_size: int) -> int:
        """Bytes from a block's first to beyond its last."""
        tokens = (block_size - 1) * self.token_stride if self.token_stride else 0
        return (self.heads - 1) * self.head_stride + tokens + self.row_bytes

    def content_bytes(self, block_size: int) -> int:
        """Bytes of KV in a block: no gaps."""
        return self.heads * self.row_bytes * (block_size if self.token_stride else 1)


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share block tables. ``block_size`` is in tokens; ``window`` too: older ones are not kept (0: all)."""

    block_size: Size
    window: Count = 0

    def first_token(self, start: int, end: int) -> int:
        """The first token that a block table for ``[start, end)`` has a block for; a block boundary if ``start`` is.

        Of a sliding window of w tokens, the token after ``end`` sees the last w - 1 before it, so these are kept.
        """
        if not self.window:
            return start
        oldest = max(start, end - self.window + 1)
        return max(start, oldest // self.block_size * self.block_size)

    def blocks_for(self, start: int, end: int) -> int:
        """How many blocks hold the tokens ``[start, end)``; ``start`` lies on a block boundary."""
        return -(-end // self.block_size) - start // self.block_size


class Layout(msgspec.Struct, frozen=True):
    """One rank's cache. ``blocks``: ids below this exist; ``heads``: KV heads of the whole model, over all ranks."""

    kernel: Text
    blocks: Count
    groups: Annotated[tuple[Group, ...], Meta(max_length=64)]
    regions: Annotated[tuple[Region, ...], Meta(max_length=1 << 14)]
    heads: Size = 1

    def span(self, region: Region) -> int:
        """Bytes from a region's first block's start to its last one's end."""
        size = self.groups[region.group].block_size
        return (self.blocks - 1) * region.block_stride + region.block_bytes(size)

    def bytes_of(self, group: int) -> int:
        """Bytes of KV in one of that group's blocks, over all its regions."""
        size = self.groups[group].block_size
        return sum(region.content_bytes(size) for region in self.regions if region.group == group)
