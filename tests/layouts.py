"""KV caches in this process's memory, in any order that vLLM knows, for tests that move KV between unlike ones."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from neuron_pushkv.device.base import Memory
from neuron_pushkv.layout import ROWS, Group, Layout, Part, Region
from neuron_pushkv.shares import head_range

Kv = Literal["apart", "together", "rows", "latent", "packed"]
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")


@dataclass(eq=False)
class Cache:
    """A layout over memory of its own, which ``row`` reads and writes."""

    layout: Layout
    memory: Memory
    """All of it, in one piece."""
    buffers: list[ctypes.Array[ctypes.c_char]] = field(repr=False)
    """What ``memory`` lies in."""

    def region(self, layer: str, part: str) -> Region:
        """By name."""
        return next(region for region in self.layout.regions if region.layer == layer and region.part == part)

    def row(self, layer: str, part: str, block: int, token: int, head: int) -> memoryview:
        """The bytes of a block's token and a head of the model; of an opaque block, all that it has of the head."""
        region = self.region(layer, part)
        assert 0 <= block < self.layout.blocks
        assert 0 <= token < self.layout.groups[region.group].block_size
        assert region.first_head <= head < region.end_head
        start = region.address - self.memory.address + block * region.block_stride
        start += (head - region.first_head) * region.head_stride + token * region.token_stride
        return self.bytes[start : start + region.row_bytes]

    @property
    def bytes(self) -> memoryview:
        """All memory."""
        view = (ctypes.c_char * self.memory.length).from_address(self.memory.address)
        return memoryview(view).cast("B")

    def fill(self, seed: int) -> None:
        """With noise, gaps between blocks too."""
        self.bytes[:] = random.Random(seed).randbytes(self.memory.length)


def cache(
    *,
    order: str = "LBHNC",
    kv: Kv = "apart",
    layers: int | Sequence[str] = 2,
    heads: int = 2,
    tp: tuple[int, int] = (0, 1),
    block_size: int = 16,
    blocks: int = 8,
    dim_bytes: int = 4,
    window: int = 0,
    gap: int = 0,
    kernel: str = ROWS,
) -> Cache:
    """One rank's cache.

    ``order`` is one of vLLM's: L layer, B block, H head, N token, C the bytes of one row. ``kv``: K and V in halves of
    the memory ("apart"), next to each other in each layer's block ("together") or in each row ("rows"), a latent, or
    per head in an order of the kernel's own ("packed", with ``kernel``). ``heads`` is the model's number, of which rank
    ``tp`` has its share; ``layers`` their number or names; ``gap`` bytes follow each block's part of a layer.
    """
    assert order in ORDERS
    names = [f"layers.{number}" for number in range(layers)] if isinstance(layers, int) else list(layers)
    first, end = (0, 1) if kv == "latent" else head_range(heads, tp[1], tp[0])
    held = end - first
    parts: tuple[Part, ...] = {"latent": ("latent",), "packed": ("kv",)}.get(kv, ("k", "v"))  # type: ignore[assignment]
    row = dim_bytes * (2 * block_size if kv == "packed" else 1)
    tokens = 1 if kv == "packed" else block_size
    rows = 2 if kv == "rows" else 1
    step = row * rows
    head_stride, token_stride = (tokens * step, step) if order.endswith("HNC") else (step, held * step)
    part_bytes = held * tokens * step
    layer_bytes = part_bytes * (2 if kv == "together" else 1) + gap
    copies = 2 if kv == "apart" else 1
    block_stride = layer_bytes if order.startswith("LB") else layer_bytes * len(names)
    layer_stride = layer_bytes * blocks if order.startswith("LB") else layer_bytes
    total = copies * layer_bytes * blocks * len(names)
    part_offset = {"apart": total // 2, "together": part_bytes, "rows": row}.get(kv, 0)
    buffer = ctypes.create_string_buffer(max(total, 1))
    base = ctypes.addressof(buffer)
    regions = tuple(
        Region(
            layer=name,
            part=part,
            group=0,
            address=base + number * layer_stride + index * part_offset,
            block_stride=block_stride,
            head_stride=head_stride if held > 1 else 0,
            token_stride=0 if kv == "packed" else token_stride,
            row_bytes=row,
            first_head=first,
            heads=held,
        )
        for number, name in enumerate(names)
        for index, part in enumerate(parts)
    )
    groups = (Group(block_size, window),)
    layout = Layout(kernel, blocks, groups, regions, 1 if kv == "latent" else heads)
    return Cache(layout, Memory(base, total), [buffer])


def grouped(*caches: Cache) -> Cache:
    """One cache of several groups, from caches of one group each with unlike layer names; copied into one buffer."""
    total = sum(one.memory.length for one in caches)
    buffer = ctypes.create_string_buffer(max(total, 1))
    base, regions = ctypes.addressof(buffer), []
    for number, one in enumerate(caches):
        moved = base - one.memory.address
        for region in one.layout.regions:
            regions.append(msgspec.structs.replace(region, group=number, address=region.address + moved))
        ctypes.memmove(base, one.memory.address, one.memory.length)
        base += one.memory.length
    layout = msgspec.structs.replace(
        caches[0].layout,
        blocks=min(one.layout.blocks for one in caches),
        groups=tuple(one.layout.groups[0] for one in caches),
        regions=tuple(regions),
    )
    return Cache(layout, Memory(ctypes.addressof(buffer), total), [buffer])
