"""How NxD Inference keeps its KV cache: one tensor for K and one for V of each layer, in one of four orders.

From aws-neuron/neuronx-distributed-inference, ``kv_cache_manager.py`` and ``block_kv_cache_manager.py`` in
``modules/kvcache``. Its releases so far keep the cache inside compiled models, which tell nobody where it is; whoever
does know the addresses describes it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from neuron_pushkv.layout import ROWS, Group, Layout, Part, Region


class Order(Enum):
    """What a tensor's dimensions are. A block of ``LINES`` is one sequence's whole line, of the longest length.

    The last dimension but the head's content may come in tiles (``kv_cache_tiling``, ``block_tiling``): the bytes are
    the same.
    """

    LINES = "sequence, head, token, content"
    LINES_WITH_K_TRANSPOSED = "K: sequence, head, content, token"
    BLOCKS = "block, token, head, content"
    """Prefix caching. One more block than are counted follows, where tokens go that are none."""
    CHUNKED_PREFILL = "block, head, token, content"


def layout(
    order: Order,
    addresses: Mapping[str, tuple[int, int]],
    *,
    blocks: int,
    block_size: int,
    heads: int,
    row_bytes: int,
    first_head: int = 0,
    total_heads: int | None = None,
) -> Layout:
    """The layout of one rank's cache.

    ``addresses``: name of a layer -> where its K and its V begin. ``blocks``: sequences, or blocks without the extra
    one; ``block_size`` in tokens; ``heads`` of this rank, beginning with ``first_head`` of the model's ``total_heads``
    (all are here by default); ``row_bytes``: of one token and head.
    """
    tokens_first = order is Order.BLOCKS
    block = block_size * heads * row_bytes
    by_head, by_token = (row_bytes, heads * row_bytes) if tokens_first else (block_size * row_bytes, row_bytes)
    transposed = order is Order.LINES_WITH_K_TRANSPOSED
    kernel = f"nxd-transposed/{row_bytes}" if transposed else ROWS
    regions = []
    for layer, (keys, values) in addresses.items():
        parts: tuple[tuple[Part, int], ...] = (("k", keys), ("v", values))
        for part, address in parts:
            # What is not all rows goes block by block, also the part that has rows.
            rows = {"token_stride": 0, "row_bytes": block_size * row_bytes}
            if not transposed:
                rows = {"token_stride": by_token, "row_bytes": row_bytes}
            regions.append(
                Region(
                    layer=layer,
                    part=part,
                    group=0,
                    address=address,
                    block_stride=block,
                    head_stride=by_head if heads > 1 else 0,
                    first_head=first_head,
                    heads=heads,
                    **rows,
                )
            )
    return Layout(kernel, blocks, (Group(block_size),), tuple(regions), total_heads or heads)
