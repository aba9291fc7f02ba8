"""From pairs of blocks to coalesced writes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neuron_pushkv.layout import Layout
from neuron_pushkv.transport.base import Product, Registration, Span, SpanTable
from neuron_pushkv.wire import RemoteRegion


def runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge pairs of blocks into (first source block, first target block, count) wherever both sides are contiguous.

    Pairs are sorted first: vLLM hands out freed blocks in descending order, which would merge with nothing.
    """
    merged: list[tuple[int, int, int]] = []
    for here, there in sorted(zip(source, target, strict=True)):
        if merged:
            first_here, first_there, count = merged[-1]
            if here == first_here + count and there == first_there + count:
                merged[-1] = (first_here, first_there, count + 1)
                continue
        merged.append((here, there, 1))
    return merged


def plan(
    layout: Layout,
    registrations: Sequence[Registration],
    remote: Sequence[RemoteRegion],
    source: Sequence[int],
    target: Sequence[int],
) -> list[Product]:
    """Writes that copy ``source`` blocks into ``target`` blocks of a peer with an equal layout.

    ``registrations`` and ``remote`` give our and the peer's memory for each region of ``layout``. Regions whose blocks
    are equally large share one product, so its size is O(regions + runs), never O(regions x blocks).
    """
    merged = runs(source, target)
    products = []
    for block_bytes in sorted({region.block_bytes for region in layout.regions}):
        spans = [
            Span(registration, region.address, there.memory, there.offset)
            for region, registration, there in zip(layout.regions, registrations, remote, strict=True)
            if region.block_bytes == block_bytes
        ]
        table = np.array(merged, dtype=np.uint64) * np.uint64(block_bytes)
        products.append(Product(SpanTable(spans), table))
    return products
