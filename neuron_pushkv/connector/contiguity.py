"""Keeps vLLM's block tables contiguous, so that what is pushed merges into fewer, larger writes.

Two orders besides vLLM's own. ``sorted``: the very blocks that vLLM would hand out, by ascending number; what is
evicted is the same to the block. ``runs``: neighbours among the oldest candidates for eviction, with room behind a
prompt's first chunk for its next ones. vLLM's pool does all the bookkeeping in either: its method ``get_new_blocks`` is
wrapped, and ``runs`` first moves what it prefers to the head of the queue. One side alone gains little: a write's
blocks must be neighbours on both.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Order: TypeAlias = Literal["vllm", "sorted", "runs"]
Numbers: TypeAlias = NDArray[np.int64]
WINDOW_PART, WINDOW_BLOCKS = 4, 32
"""``runs`` chooses among the oldest candidates, a quarter of the pool at most: no block is evicted when more than so
many others would have been before it. And among no more than 32 for each block, so that what choosing costs is in
proportion."""


class Growing(NamedTuple):
    """A prompt that is computed in chunks: the number of its last block, and how many more it will have."""

    last: int
    more: int


class Contiguity:
    """See the module's text. Does nothing before :meth:`bind`, nor to a pool that it does not know its way about in."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._pool: Any = None
        self._new: int | None = None
        self._growing: list[Growing] = []
        self._rooms: list[Growing] = []
        """What is kept free for prompts' next chunks, as long as others find enough elsewhere."""

    def bind(self, pool: Any) -> None:
        """vLLM's block pool. Binding it once more changes nothing."""
        if self._order == "vllm" or pool is self._pool:
            return
        missing = _missing(pool, self._order)
        if missing:
            logger.warning("vLLM's block pool has no %s as it is known here; it keeps its own order of blocks", missing)
            return
        self._pool = pool
        self._take = pool.get_new_blocks
        pool.get_new_blocks = self._get_new_blocks

    def begin(self, blocks: int) -> None:
        """A request is allocated next that has none of its own yet, and will have so many for its prompt."""
        self._new = blocks

    def begun(self) -> None:
        """It has its first ones."""
        self._new = None

    def grow(self, growing: Iterable[Growing]) -> None:
        """Prompts that go on in the next step, in the order in which vLLM will come to them."""
        self._new = None
        self._growing = list(growing)
        self._rooms = list(self._growing)

    def _get_new_blocks(self, num_blocks: int) -> Any:
        """In place of the pool's own."""
        if self._order == "runs" and num_blocks > 1 and self._prefer(num_blocks):
            return self._take(num_blocks)
        return sorted(self._take(num_blocks), key=_number)

    def _prefer(self, count: int) -> bool:
        """Move the blocks that shall be taken to the head of the queue, if there is any choice."""
        queue = self._pool.free_block_queue
        try:
            last, room = self._continued(count)
            size = max(count, min(room * WINDOW_BLOCKS, self._pool.num_gpu_blocks // WINDOW_PART))
            window = {block.block_id: block for block in islice(_candidates(queue), size)}
            if len(window) <= count:
                return False
            numbers = np.fromiter(window, np.int64)
            ages = np.argsort(numbers)
            free = numbers[ages]
            others = apart(free, self._rooms)
            if np.count_nonzero(others) >= count:
                free, ages = free[others], ages[others]
            chosen = [window[number] for number in choose(free, ages, count, last, room)]
            if room > count:
                self._rooms.append(Growing(chosen[-1].block_id, room - count))
        except Exception:
            # It would end vLLM's engine core.
            logger.exception("a bug in neuron_pushkv: please report it; blocks are only sorted from now on")
            self._order = "sorted"
            return False
        for block in chosen:
            queue.remove(block)
        queue.prepend_n(chosen)
        return True

    def _continued(self, count: int) -> tuple[int | None, int]:
        """Behind which block ``count`` more should follow, if any, and for how many there should be room.

        vLLM does not say whose they are, but it comes to prompts in order, and asks for single blocks when it decodes.
        """
        if self._new is not None:
            return None, max(count, self._new)
        for index, growing in enumerate(self._growing):
            if count <= growing.more:
                del self._growing[: index + 1]
                self._rooms.remove(growing)
                return growing.last, growing.more
        return None, count


def apart(free: Numbers, rooms: Sequence[Growing]) -> NDArray[np.bool_]:
    """Which of the numbers in ``free``, which ascend, lie in none of the rooms."""
    if not rooms:
        return np.ones(len(free), np.bool_)
    first, more = np.array(rooms).T
    steps: Numbers = np.zeros(len(free) + 1, np.int64)
    np.add.at(steps, np.searchsorted(free, first + 1), 1)
    np.add.at(steps, np.searchsorted(free, first + 1 + more), -1)
    return np.cumsum(steps[:-1]) == 0


def choose(free: Numbers, ages: Numbers, count: int, last: int | None, room: int) -> list[int]:
    """``count`` of the numbers in ``free``, which ascend and of which there are as many at least.

    First the ones behind ``last``. Then the beginning of ``room`` neighbours: of the runs that have as many the one
    whose newest block is the oldest (``ages``: the places in the queue), at its end, since the blocks at its beginning
    are a prefix that more prompts may have. If none has as many, the longest ones.
    """
    edges = np.flatnonzero(np.diff(free) != 1) + 1
    starts = np.concatenate(([0], edges))
    lengths = np.diff(np.concatenate((starts, [len(free)])))
    newest = np.maximum.reduceat(ages, starts)
    chosen: list[int] = []
    if last is not None:
        place = int(np.searchsorted(free, last + 1))
        if place < len(free) and free[place] == last + 1:
            run = int(np.searchsorted(starts, place, side="right")) - 1
            behind = free[place : int(starts[run] + lengths[run])]
            chosen += behind[:count].tolist()
            lengths[run] -= len(behind)
    while len(chosen) < count:
        needed = room - len(chosen)
        wide = np.flatnonzero(lengths >= needed)
        run = int(wide[np.argmin(newest[wide])] if len(wide) else np.argmax(lengths))
        before = max(0, int(lengths[run]) - needed)
        start, end = int(starts[run]) + before, int(starts[run] + lengths[run])
        chosen += free[start : min(end, start + count - len(chosen))].tolist()
        lengths[run] = before
    return chosen


def _candidates(queue: Any) -> Iterator[Any]:
    """The free blocks in the order of their eviction."""
    block = queue.fake_free_list_head.next_free_block
    while block is not None and block is not queue.fake_free_list_tail:
        yield block
        block = block.next_free_block


def _number(block: Any) -> int:
    return int(block.block_id)


def _missing(pool: Any, order: Order) -> str:
    """What of vLLM's pool isn't as ``order`` needs it; "" if all is (0.24 to 0.32)."""
    take = getattr(pool, "get_new_blocks", None)
    if not callable(take) or list(inspect.signature(take).parameters) != ["num_blocks"]:
        return "get_new_blocks(num_blocks)"
    if order == "sorted":
        return ""
    if not isinstance(getattr(pool, "num_gpu_blocks", None), int):
        return "num_gpu_blocks"
    queue = getattr(pool, "free_block_queue", None)
    for name, parameter in (("remove", "block"), ("prepend_n", "blocks")):
        method = getattr(queue, name, None)
        if not callable(method) or list(inspect.signature(method).parameters) != [parameter]:
            return f"free_block_queue.{name}({parameter})"
    head = getattr(queue, "fake_free_list_head", None)
    if not hasattr(head, "next_free_block") or not hasattr(queue, "fake_free_list_tail"):
        return "free_block_queue.fake_free_list_head.next_free_block"
    return ""
