"""How one rank's KV cache lies in memory.

A cache is a list of regions, one per layer (or per layer and K/V where these lie apart). In a region, block ``b``
is the ``block_bytes`` bytes at ``address + b * block_bytes``. What lies inside a block is the kernel's business,
so a layout is named by the kernel that wrote it: two caches can be copied block by block only if their names,
block sizes and region geometry agree.
"""

from __future__ import annotations

import msgspec

from neuron_pushkv.errors import LayoutError


class Region(msgspec.Struct, frozen=True):
    """One run of equally sized blocks. ``address`` is a virtual address in bytes, ``blocks`` a count."""

    name: str
    address: int
    block_bytes: int
    blocks: int

    @property
    def length(self) -> int:
        """Bytes from the first block's start to the last one's end."""
        return self.block_bytes * self.blocks


class Layout(msgspec.Struct, frozen=True):
    """One rank's cache: ``kernel`` names the inner order of a block, ``block_size`` is in tokens."""

    kernel: str
    block_size: int
    blocks: int
    regions: tuple[Region, ...]

    def block_index(self, token: int) -> int:
        """Index, in a request's block table, of the block that holds ``token``."""
        return token // self.block_size

    def blocks_for(self, start: int, end: int) -> int:
        """How many blocks hold the tokens ``[start, end)``; ``start`` lies on a block boundary."""
        return -(-end // self.block_size) - start // self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all regions."""
        return sum(region.block_bytes for region in self.regions)


def check_equal(ours: Layout, theirs: Layout) -> None:
    """Raise :class:`LayoutError`, naming both values, unless blocks of one may be copied into the other as they are."""
    for what, here, there in (
        ("KV kernel", ours.kernel, theirs.kernel),
        ("block size", ours.block_size, theirs.block_size),
        ("number of regions", len(ours.regions), len(theirs.regions)),
    ):
        if here != there:
            raise LayoutError(f"{what} differs: {here} here, {there} there; start both engines with the same")
    for mine, other in zip(ours.regions, theirs.regions, strict=True):
        if (mine.name, mine.block_bytes) != (other.name, other.block_bytes):
            raise LayoutError(
                f"region differs: {mine.name} with {mine.block_bytes} bytes a block here, "
                f"{other.name} with {other.block_bytes} there; start both engines with the same model and KV dtype"
            )
