"""The staging cache: host memory with the layout of a device's cache, which is what peers are told of instead."""

from __future__ import annotations

from collections.abc import Hashable
from math import lcm

import numpy as np

from neuron_pushkv.blocks import BlockPool
from neuron_pushkv.bounce.copies import CopyPlan, Table
from neuron_pushkv.bounce.dense import Dense
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout
from neuron_pushkv.plan.shares import Heads
from neuron_pushkv.transport.base import Transport

PARTS = 4
"""One of them is for what is sent, so that two engines which send to each other never wait in a circle: what is
received holds its blocks until its sender has computed the prompt, what is sent only until it is written."""
PLANS = 64
"""There is one for each share of heads and layers that a peer may ask for, so a few."""


class Room:
    """Blocks of the staging cache, ``first`` and those after it. Each owner takes once, and gives all back."""

    def __init__(self, first: int, blocks: int) -> None:
        self._first = first
        self._pool = BlockPool(blocks)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self._pool.total

    @property
    def free(self) -> int:
        """How many can be taken now."""
        return self._pool.free

    @property
    def used(self) -> int:
        """How many are taken."""
        return self._pool.held

    def take(self, blocks: int, owner: Hashable) -> Table | None:
        """That many, neighbours where possible; None if there are not as many now."""
        extents = self._pool.take(blocks, owner)
        if extents is None:
            return None
        found: Table = np.concatenate([np.arange(extent.first, extent.end, dtype=np.int64) for extent in extents])
        return found + self._first

    def give_back(self, owner: Hashable) -> None:
        """Nothing of the owner's is read or written any more."""
        self._pool.release(owner)


class StagingCache:
    """``device`` is the layout of the cache that the network can't be shown. ``size`` bytes are taken at most.

    Raises :class:`LayoutError` where that is too little for the smallest part of a prompt.
    """

    def __init__(self, device: Layout, size: int, transport: Transport) -> None:
        shape = Dense(device)
        self.block_bytes = shape.block_bytes
        """Of one block."""
        self.step = lcm(*(group.block_size for group in device.groups))
        """Tokens that fill blocks of all groups."""
        needed = PARTS * sum(self.step // group.block_size for group in device.groups)
        blocks = size // max(1, self.block_bytes)
        while blocks and shape.bytes(blocks) > size:
            blocks -= 1
        if blocks < needed:
            raise LayoutError(
                f"bounce_bytes ({size}) holds {blocks} blocks of this KV cache, and {needed} are needed; set at least "
                f"{shape.bytes(needed)}"
            )
        sent = min(blocks // PARTS, device.blocks)
        received = min(blocks - sent, device.blocks)
        self.sending, self.receiving = Room(0, sent), Room(sent, received)
        self._host = HostAccelerator()
        memory = self._host.allocate(shape.bytes(sent + received))
        self.registration = transport.register(memory)
        self.layout = shape.at(memory.address, sent + received)
        self._device = device
        self._plans: dict[tuple[Heads, frozenset[str]], CopyPlan] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are taken."""
        return (self.sending.used + self.receiving.used) * self.block_bytes

    def plan(self, heads: Heads, layers: frozenset[str]) -> CopyPlan:
        """How these heads of these layers are copied. Raises :class:`LayoutError` for heads that aren't ours."""
        found = self._plans.get((heads, layers))
        if found is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            found = self._plans[heads, layers] = CopyPlan(self._device, self.layout, heads, layers)
        return found

    def whole(self) -> CopyPlan:
        """How all of it is copied."""
        regions = self.layout.regions
        heads = min(region.first_head for region in regions), max(region.end_head for region in regions)
        return self.plan(heads, frozenset(region.layer for region in regions))
