"""Worn block pools: what serving mixed prompts leaves of a fresh pool's order."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from benchmarks.serving.running import Running
from neuron_pushkv import tinymodel

SHORTEST, LONGEST = 60, 1200
AT_ONCE = 6
TIMES = 1.5
"""How often every block is used, on average."""


def wear(running: Running, cache_tokens: int) -> None:
    """Prompts of mixed length, several at a time, until both pools have been used up more than once."""
    dice = random.Random("wear")
    lengths: list[int] = []
    while sum(lengths) < TIMES * cache_tokens:
        lengths.append(dice.randint(SHORTEST, LONGEST))
    prompts = [dice.choices(range(3, tinymodel.VOCABULARY), k=length) for length in lengths]
    answers = [dice.randint(1, 12) for _ in lengths]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(running.ask, prompts, answers))
