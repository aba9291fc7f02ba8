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
from neuron_pushkv.plan.shares import head_range

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
    value_bytes: int | None = None,
    window: int = 0,
    gap: int = 0,
    kernel: str = ROWS,
) -> Cache:
    """One rank's cache.

    ``order`` is one of vLLM's: L layer, B block, H head, N token, C the bytes of one row, ``dim_bytes`` of K and, if it
    is given, ``value_bytes`` of V. ``kv``: K and V in parts of the memory ("apart"), next to each other in each layer's
    block ("together") or in each row ("rows"), a latent, or per head in an order of the kernel's own ("packed", with
    ``kernel``). ``heads`` is the model's number, of which rank ``tp`` has its share; ``layers`` their number or names;
    ``gap`` bytes follow each block's part of a layer.
    """
    assert order in ORDERS
    names = [f"layers.{number}" for number in range(layers)] if isinstance(layers, int) else list(layers)
    first, end = (0, 1) if kv == "latent" else head_range(heads, tp[1], tp[0])
    held, tokens = end - first, 1 if kv == "packed" else block_size
    value = dim_bytes if value_bytes is None else value_bytes
    rows: dict[Part, int]
    match kv:
        case "latent":
            rows = {"latent": dim_bytes}
        case "packed":
            rows = {"kv": (dim_bytes + value) * block_size}
        case _:
            rows = {"k": dim_bytes, "v": value}
    together = kv in ("together", "rows")
    blocks_of = {part: held * tokens * row for part, row in rows.items()}
    places, regions = _places(order, blocks_of, together, len(names), blocks, gap), []
    total = sum(size + gap for size in ([sum(blocks_of.values())] if together else blocks_of.values()))
    total *= blocks * len(names)
    buffer = ctypes.create_string_buffer(max(total, 1))
    base = ctypes.addressof(buffer)
    for number, name in enumerate(names):
        for part, row in rows.items():
            step = sum(rows.values()) if kv == "rows" else row
            start, layer_stride, block_stride = places[part]
            if kv == "rows" and part == "v":
                start = rows["k"]
            by_head, by_token = (tokens * step, step) if order.endswith("HNC") else (step, held * step)
            regions.append(
                Region(
                    layer=name,
                    part=part,
                    group=0,
                    address=base + start + number * layer_stride,
                    block_stride=block_stride,
                    head_stride=by_head if held > 1 else 0,
                    token_stride=0 if kv == "packed" else by_token,
                    row_bytes=row,
                    first_head=first,
                    heads=held,
                )
            )
    groups = (Group(block_size, window),)
    layout = Layout(kernel, blocks, groups, tuple(regions), 1 if kv == "latent" else heads)
    return Cache(layout, Memory(base, total), [buffer])


def _places(
    order: str, sizes: dict[Part, int], together: bool, layers: int, blocks: int, gap: int
) -> dict[Part, tuple[int, int, int]]:
    """Part -> offset in the memory, bytes from layer to layer, bytes from block to block."""
    places: dict[Part, tuple[int, int, int]] = {}
    inside = 0
    for part, size in sizes.items():
        whole = (sum(sizes.values()) if together else size) + gap
        strides = (whole * blocks, whole) if order.startswith("LB") else (whole, whole * layers)
        places[part] = inside, *strides
        inside += size if together else whole * blocks * layers
    return places


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
