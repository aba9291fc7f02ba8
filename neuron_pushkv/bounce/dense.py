"""A cache of the same shape as another, with fewer blocks and nothing between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from neuron_pushkv.layout import Layout, Region

ALIGNMENT = 64
"""Bytes: a cache line, so that no two frames share one."""


@dataclass
class _Frame:
    """Regions whose parts of a block lie among each other: ``size`` bytes from ``start`` on, of block 0."""

    start: int
    stride: int
    size: int
    regions: dict[int, Region]
    """By their number in the layout."""


class Dense:
    """How ``layout`` looks without what lies between its blocks.

    What lies next to each other inside a block still does, so that as much as before is contiguous with any third
    layout. Blocks that lie among each other are pulled apart. Layers of different groups that share memory do so here:
    a block belongs to one group at a time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._frames: list[_Frame] = []
        for index in sorted(range(len(layout.regions)), key=lambda index: layout.regions[index].address):
            self._add(index, layout.regions[index])
        self.block_bytes = sum(frame.size for frame in self._frames)
        """Of one block: those of all groups take the same room."""

    def bytes(self, blocks: int) -> int:
        """What that many blocks take."""
        return sum(_rounded(blocks * frame.size) for frame in self._frames)

    def at(self, address: int, blocks: int) -> Layout:
        """A cache of that many blocks in the memory at ``address``."""
        regions = list(self._layout.regions)
        for frame in self._frames:
            for index, region in frame.regions.items():
                place = address + region.address - frame.start
                regions[index] = msgspec.structs.replace(region, address=place, block_stride=frame.size)
            address += _rounded(blocks * frame.size)
        return msgspec.structs.replace(self._layout, blocks=blocks, regions=tuple(regions))

    def _add(self, index: int, region: Region) -> None:
        size = self._layout.groups[region.group].block_size
        if region.block_bytes(size) > region.block_stride:
            region = _alone(region, size)
            self._frames.append(_Frame(region.address, 0, region.block_stride, {index: region}))
            return
        end = region.address + region.block_bytes(size)
        for frame in reversed(self._frames):
            if frame.stride == region.block_stride and end <= frame.start + frame.stride:
                frame.size = max(frame.size, end - frame.start)
                frame.regions[index] = region
                return
        self._frames.append(_Frame(region.address, region.block_stride, end - region.address, {index: region}))


def _alone(region: Region, block_size: int) -> Region:
    """A region whose blocks lie among each other, with heads and tokens in the same order and next to each other."""
    tokens, row = block_size if region.token_stride else 1, region.row_bytes
    by_head, by_token = (tokens * row, row) if region.head_stride >= region.token_stride else (row, region.heads * row)
    return msgspec.structs.replace(
        region,
        block_stride=region.content_bytes(block_size),
        head_stride=by_head if region.heads > 1 else 0,
        token_stride=by_token if region.token_stride else 0,
    )


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
