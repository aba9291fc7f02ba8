"""Handover: what a first token takes beyond prefill and one decode step.

For one prompt after the other: the prefill engine alone is asked for it, then the whole through the proxy. Handover is
the second's time to first token, less the first's, less a decode step, which is the mean time between the tokens that
follow (decode has to run one for the last token, whoever brought the KV). ``cached``: prefill has the prompt in its
prefix cache, and computes one token, so nothing hides the handover. ``cold``: it has not, and what is moved while it
computes doesn't show. Decode never has it. Each answer is checked to be made of the KV of the whole prompt.

A connector that keeps its engines busy slows down their prefill and their decode steps, which are then taken off its
own time to first token. So that time is given too; and ``gap``, from prefill's answer to decode's first byte, as the
proxy has seen them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.serving.running import Running
from neuron_pushkv import tinymodel
from neuron_pushkv.errors import FleetError

WARM_UP = 2
TOKENS = 9
EXTERNAL = "external_kv_transfer"


@dataclass(frozen=True)
class Sample:
    """One request, in seconds; and how many writes, or descriptors, its KV took."""

    first: float
    prefill: float
    step: float
    gap: float
    writes: float = 0.0

    @property
    def handover(self) -> float:
        """What is left of the first token's time."""
        return self.first - self.prefill - self.step


@dataclass(frozen=True)
class Cell:
    """What is asked. ``tokens``: one more than whole blocks hold, so that a prefix cache can have all but that one."""

    tokens: int
    cached: bool

    @property
    def slow(self) -> bool:
        """Whether it takes so long that there is time for few."""
        return not self.cached and self.tokens > 6000

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.tokens:,} tokens, {'cached' if self.cached else 'cold'}"


def touch(running: Running, cache_tokens: int) -> None:
    """Have every block of decode's cache written to: the first touch of a page costs as much as copying it."""
    cell = Cell(2049, cached=True)
    prompts = _prompts(cell, 0)
    for _ in range(cache_tokens // cell.tokens + 2):
        running.forget_on_decode()
        running.ask(next(prompts), 2)


def measure(running: Running, cell: Cell, repeats: int, seed: int) -> list[Sample]:
    """``repeats`` samples, after a few that don't count; a third of that where each is slow.

    Raises :class:`FleetError` if KV was not transferred.
    """
    prompts = _prompts(cell, seed)
    if cell.cached:
        running.ask_prefill(next(prompts))
    warm_up, count = (1, max(1, repeats // 3)) if cell.slow else (WARM_UP, repeats)
    return [_sample(running, prompts, cell) for _ in range(warm_up + count)][warm_up:]


def _sample(running: Running, prompts: Iterator[list[int]], cell: Cell) -> Sample:
    running.forget_on_decode()
    prefill = running.ask_prefill(next(prompts))
    before, written = _transferred(running), running.written()
    answer = running.ask(next(prompts), TOKENS)
    moved = _transferred(running) - before
    if moved < cell.tokens - 1:
        raise FleetError(f"{running.contestant.name}: decode has computed {cell.tokens - moved} tokens by itself")
    leg = running.legs()[-1]
    gap = leg["first"] - leg["prefill"]
    return Sample(answer.first_seconds, prefill, answer.seconds_per_token, gap, running.written() - written)


def _transferred(running: Running) -> int:
    return round(running.metrics(running.last).total("vllm:prompt_tokens_by_source_total", source=EXTERNAL))


def _prompts(cell: Cell, seed: int) -> Iterator[list[int]]:
    """Always the same one if it is to be cached, else always another."""
    dice = random.Random(f"{cell.tokens} {cell.cached} {seed}")
    same = dice.choices(range(3, tinymodel.VOCABULARY), k=cell.tokens)
    while True:
        yield same if cell.cached else dice.choices(range(3, tinymodel.VOCABULARY), k=cell.tokens)
