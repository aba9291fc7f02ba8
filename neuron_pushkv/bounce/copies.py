"""Which bytes are copied between the device's cache and the staging cache. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.device.base import Copies, Memory
from neuron_pushkv.layout import Layout
from neuron_pushkv.plan.pair import Move, PairPlan
from neuron_pushkv.plan.shares import Heads
from neuron_pushkv.transport.base import Product, Registration
from neuron_pushkv.wire import RemoteRegion

Table: TypeAlias = NDArray[np.int64]
"""Block ids."""


class CopyPlan:
    """From one cache into another of the same shape: a plan like any other, whose two sides are both ours.

    Only ``heads``, and only the layers in ``layers``. Whatever is contiguous on both sides is one copy.
    """

    def __init__(self, device: Layout, staging: Layout, heads: Heads, layers: frozenset[str]) -> None:
        regions = tuple(region for region in staging.regions if region.layer in layers)
        wanted = msgspec.structs.replace(staging, regions=regions)
        nowhere = Registration(0, Memory(0, 1 << 63), b"")  # Nothing of this plan goes over the network.
        places = [RemoteRegion(0, region.address) for region in regions]
        self._sizes = tuple(group.block_size for group in device.groups)
        self._plan = PairPlan(device, wanted, heads, [nowhere] * len(device.regions), places)

    def copies(self, blocks: Sequence[tuple[int, Table, Table]]) -> Copies:
        """For each (group, the device's blocks, the staging cache's). Raises :class:`LayoutError` for none of theirs.

        No rows where the plan has nothing to do with these groups.
        """
        moves = [
            Move(group, device, staging, 0, 0, len(device) * self._sizes[group]) for group, device, staging in blocks
        ]
        rows = [_expanded(product) for product in self._plan.batch(moves)]
        return np.concatenate([np.empty((0, 3), dtype=np.uint64), *rows])


def _expanded(product: Product) -> Copies:
    spans, runs = product.spans.flat, product.runs
    copies: Copies = np.empty((len(spans), len(runs), 3), dtype=np.uint64)
    copies[:, :, 0] = spans[:, 1, None] + runs[:, 0]
    copies[:, :, 1] = spans[:, 3, None] + runs[:, 1]
    copies[:, :, 2] = runs[:, 2]
    return copies.reshape(-1, 3)
