"""Random pairs of engines with unlike layouts, and what one wants from the other, for property tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
from hypothesis import strategies as st

from neuron_pushkv.plan.pair import Move
from tests.layouts import ORDERS, Cache, cache, grouped

BLOCKS = 24


@dataclass
class Case:
    """Two engines, a receiving rank, and what it asks for."""

    senders: list[list[Cache]]
    """By pipeline and tensor parallel rank."""
    receiver: Cache
    tp: tuple[int, int]
    apart: tuple[bool, bool]
    """Whether each side's regions are registered by themselves."""
    moves: list[Move]


@st.composite
def tables(draw: st.DrawFn, count: int) -> list[int] | np.ndarray:
    """Block ids: ascending, descending, or mixed, so that some merge."""
    start = draw(st.integers(0, BLOCKS - count))
    found = list(range(start, start + count))
    match draw(st.sampled_from(("up", "down", "mixed", "random"))):
        case "down":
            found.reverse()
        case "mixed":
            found = found[1::2] + found[::2]
        case "random":
            found = random.Random(draw(st.integers(0, 99))).sample(range(BLOCKS), count)
    return np.array(found) if draw(st.booleans()) else found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = draw(st.sampled_from(("rows", "latent", "packed")))
    heads = 1 if kinds == "latent" else draw(st.sampled_from((1, 2, 4, 6)))
    sizes = [size for size in (1, 2, 3, 4, 8) if heads % size == 0 or size % heads == 0]
    tp_sizes = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    tp = draw(st.integers(0, tp_sizes[1] - 1)), tp_sizes[1]
    pp = draw(st.sampled_from((1, 1, 2)))
    kernel = "rows" if kinds != "packed" else "cpu"
    sides: list[list[Callable[[tuple[int, int], int, int], Cache]]] = [[], []]
    moves = []
    for group in range(draw(st.integers(1, 2))):
        block_sizes = [draw(st.sampled_from((1, 2, 3, 4, 6, 8))) for _ in range(2)]
        if kinds == "packed":
            block_sizes[1] = block_sizes[0]
        dim, value = draw(st.integers(1, 4)), draw(st.sampled_from((None, None, 1, 3)))
        window, layers = draw(st.sampled_from((0, 5))), draw(st.integers(1, 3))
        for side in range(2):
            order = draw(st.sampled_from(ORDERS))
            kv = kinds if kinds != "rows" else draw(st.sampled_from(("apart", "together", "rows")))
            gap = draw(st.sampled_from((0, 0, 3)))

            def build(
                rank: tuple[int, int],
                stage: int,
                stages: int,
                order: str = order,
                kv: str = kv,
                gap: int = gap,
                block_size: int = block_sizes[side],
                dim: int = dim,
                value: int | None = value,
                window: int = window,
                names: tuple[str, ...] = tuple(f"{group}.{number}" for number in range(layers)),
            ) -> Cache:
                return cache(
                    order=order,
                    kv=kv,
                    layers=names[stage::stages],
                    heads=heads,
                    tp=rank,
                    block_size=block_size,
                    blocks=BLOCKS,
                    dim_bytes=dim,
                    value_bytes=value,
                    window=window,
                    gap=gap,
                    kernel=kernel,
                )

            sides[side].append(build)
        unit = gcd(*block_sizes)
        end = draw(st.integers(1, 3 * max(block_sizes)))
        start = draw(st.integers(0, (end - 1) // block_sizes[1])) * block_sizes[1]
        bounds = sorted({start, *(draw(st.integers(start // unit, end // unit)) * unit for _ in range(2)), end})
        source, target = [
            draw(tables(-(-count // size))) for count, size in zip((end, end - start), block_sizes, strict=True)
        ]
        if start:  # a window's blocks before it are gone, and so they are never looked at
            source[: start // block_sizes[0]] = [-1] * (start // block_sizes[0]) if isinstance(source, list) else -1
        moves += [Move(group, source, target, start, *pair) for pair in pairwise(bounds)]
    senders = [
        [grouped(*(build((rank, tp_sizes[0]), stage, pp) for build in sides[0])) for rank in range(tp_sizes[0])]
        for stage in range(pp)
    ]
    receiver = grouped(*(build(tp, 0, 1) for build in sides[1]))
    return Case(senders, receiver, tp, (draw(st.booleans()), draw(st.booleans())), moves)
