"""The work that is measured: one rank of Qwen3-32B at TP 8, a prompt of 16,384 tokens, in order or scattered.

64 layers, K and V apart: 128 regions. One KV head of 128 in bfloat16 makes 4 KiB of a block of 16 tokens in each.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
REGIONS = 128
SPARE_BLOCKS = 256
"""Blocks of each cache beyond those of the prompt, so that a scattered table has gaps too."""
TOKENS = 16384
ORDERS = ("in order", "random")
MAP_NORESERVE = 0x4000
"""From Linux' ``mman.h``: Python's mmap has no name for it."""


@dataclass(frozen=True)
class Work:
    """How long the prompt is and how large the cache around it; the rest follows."""

    tokens: int = TOKENS
    block_bytes: int = BLOCK_BYTES
    spare_blocks: int = SPARE_BLOCKS

    @property
    def blocks(self) -> int:
        """Of the prompt."""
        return self.tokens // BLOCK_TOKENS

    @property
    def cache_blocks(self) -> int:
        """Of each region."""
        return self.blocks + self.spare_blocks

    @property
    def region_bytes(self) -> int:
        """Of each region."""
        return self.cache_blocks * self.block_bytes

    @property
    def bytes(self) -> int:
        """That one transfer moves."""
        return self.blocks * self.block_bytes * REGIONS

    def table(self, order: str, side: str) -> list[int]:
        """The prompt's block ids on one side, in token order. Unlike on the two sides, but the same in every run."""
        if order == "in order":
            first = self.spare_blocks // 2 if side == "receiver" else 0
            return list(range(first, first + self.blocks))
        return random.Random(side).sample(range(self.cache_blocks), self.blocks)


class Cache:
    """One rank's KV cache: one allocation, region after region. Pages are there when something touches them."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.bytes = REGIONS * work.region_bytes
        self._memory = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self._view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def blank(self) -> None:
        """Forget everything; also makes sure that every page is there."""
        ctypes.memset(self.address, 0xEE, self.bytes)

    def region(self, index: int) -> int:
        """Where it starts."""
        return self.address + index * self.work.region_bytes

    def fill(self, table: list[int], salt: int) -> None:
        """Let every 16 bytes say which region and which block of which prompt they belong to."""
        for where, what in self._blocks(table, salt):
            self._view[where : where + len(what)] = what

    def holds(self, table: list[int], salt: int) -> bool:
        """Whether every byte is as :meth:`fill` would have it."""
        return all(self._view[where : where + len(what)] == what for where, what in self._blocks(table, salt))

    def _blocks(self, table: list[int], salt: int) -> Iterator[tuple[int, bytes]]:
        size = self.work.block_bytes
        for region, (index, block) in product(range(REGIONS), enumerate(table)):
            pattern = struct.pack("<IIQ", region, index, salt) * (size // 16)
            yield region * self.work.region_bytes + block * size, pattern
