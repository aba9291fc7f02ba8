"""Carrying out plans in this process's memory, and the slow way to do the same, for comparison."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from neuron_pushkv.device.base import Memory
from neuron_pushkv.plan.pair import Move
from neuron_pushkv.plan.staging import Staging
from neuron_pushkv.transport.base import Product, Registration
from neuron_pushkv.wire import RemoteRegion
from tests.layouts import Cache

TARGET = 70
"""What the receiver's first memory is called; the others follow."""


def registered(cache: Cache, *, apart: bool = False) -> list[Registration]:
    """A registration for each region: of all memory, or of each region by itself."""
    if not apart:
        return [Registration(1, cache.memory, b"all")] * len(cache.layout.regions)
    return [
        Registration(2 + index, Memory(region.address, cache.layout.span(region)), b"part")
        for index, region in enumerate(cache.layout.regions)
    ]


@dataclass
class Receiver:
    """The receiving end of writes into ``cache``: refuses what no network would let through, or what comes twice."""

    cache: Cache
    apart: bool = False
    writes: int = 0
    written: set[int] = field(default_factory=set)

    @property
    def remote(self) -> list[RemoteRegion]:
        """Where the regions are: in one memory, or each in one of its own, in which it is as far in."""
        regions, start = self.cache.layout.regions, self.cache.memory.address
        return [
            RemoteRegion(TARGET + index * self.apart, region.address - start) for index, region in enumerate(regions)
        ]

    def _bounds(self, target: int) -> tuple[int, int]:
        """Offsets that may be written in that memory."""
        if not self.apart:
            assert target == TARGET
            return 0, self.cache.memory.length
        region = self.cache.layout.regions[target - TARGET]
        start = region.address - self.cache.memory.address
        return start, start + self.cache.layout.span(region)

    def receive(self, products: Sequence[Product]) -> None:
        """Carry out all writes."""
        for product in products:
            assert product.writes
            for span in product.spans:
                memory = span.registration.memory
                base, (low, high) = self.cache.memory.address, self._bounds(span.target)
                for local, remote, length in product.runs.tolist():
                    source, place = span.local + local, span.offset + remote
                    assert length > 0
                    assert memory.address <= source
                    assert source + length <= memory.address + memory.length
                    assert low <= place <= place + length <= high
                    touched = range(base + place, base + place + length)
                    assert self.written.isdisjoint(touched)
                    self.written.update(touched)
                    ctypes.memmove(base + place, source, length)
                    self.writes += 1


def copy_slowly(
    source: Cache, target: Cache, heads: tuple[int, int], units: Sequence[int], moves: Sequence[Move]
) -> None:
    """What a plan has to do, row by row; the last unit of a move whole."""
    held = {(region.layer, region.part) for region in source.layout.regions}
    for move in moves:
        here, there = source.layout.groups[move.group], target.layout.groups[move.group]
        end = -(-move.end // units[move.group]) * units[move.group]
        for region in target.layout.regions:
            if region.group != move.group or (region.layer, region.part) not in held:
                continue
            for token in range(move.first, end):
                block, inside = divmod(token, here.block_size)
                place, within = divmod(token - move.target_start, there.block_size)
                for head in range(*heads):
                    if region.token_stride or inside == 0:
                        row = source.row(region.layer, region.part, int(move.source[block]), inside, head)
                        written = target.row(region.layer, region.part, int(move.target[place]), within, head)
                        written[:] = row


def staging(size: int) -> Staging:
    """Of that many bytes, full of noise."""
    buffer = ctypes.create_string_buffer(b"\xa5" * size, size)
    return Staging(Registration(999, Memory(ctypes.addressof(buffer), size), b"staging"), buffer)
