"""KV that finished requests keep for receivers: references in vLLM's block pool, and a cap on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Keeping(Protocol):
    """What is needed of the engine's :class:`~neuron_pushkv.directory.Directory`."""

    def keep(self, request: str) -> None:
        """This request's blocks are held until all ranks have let go."""

    def take_freed(self) -> list[str]:
        """Requests whose blocks no rank reads any more, each once."""


class Parking:
    """Kept requests, oldest first. Blocks that several of them share count once.

    ``limit``: blocks that may be kept. Beyond it the oldest requests are to be evicted, but theirs stay kept until all
    ranks have let go. ``block_bytes``: of one rank.
    """

    def __init__(self, directory: Keeping, *, limit: int, block_bytes: int) -> None:
        self._directory = directory
        self._limit = limit
        self._block_bytes = block_bytes
        self._kept: dict[str, list[Any]] = {}
        self._staying: dict[str, None] = {}
        self._held: Counter[int] = Counter()
        self._held_to_stay: Counter[int] = Counter()

    def __contains__(self, request: object) -> bool:
        return request in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """What is kept, evicted or not, on one rank."""
        return len(self._held) * self._block_bytes

    def keep(self, request: str, touched: Sequence[Any], pool: Any, untouched: Sequence[Any]) -> None:
        """Keep the blocks of a request that has finished; ``touched`` ones carry our reference already."""
        self._directory.keep(request)
        pool.touch(untouched)
        blocks = [*untouched, *touched]
        self._kept[request] = blocks
        self._staying[request] = None
        _add(self._held, blocks)
        _add(self._held_to_stay, blocks)

    def evict(self) -> tuple[str, ...]:
        """Requests that have to go, each once, so that what stays is within the limit."""
        evicted = []
        while len(self._held_to_stay) > self._limit:
            request = next(iter(self._staying))
            self._leave(request, self._kept[request])
            evicted.append(request)
        return tuple(evicted)

    def free(self, pool: Any) -> None:
        """Drop the references to blocks that no rank reads any more."""
        for request in self._directory.take_freed():
            blocks = self._kept.pop(request, None)
            if blocks is None:
                continue
            if request in self._staying:
                self._leave(request, blocks)
            _remove(self._held, blocks)
            pool.free_blocks(reversed(blocks))  # As vLLM does: the prompt's tail is evicted before its head.

    def _leave(self, request: str, blocks: Sequence[Any]) -> None:
        del self._staying[request]
        _remove(self._held_to_stay, blocks)


def _add(counts: Counter[int], blocks: Iterable[Any]) -> None:
    for block in blocks:
        counts[block.block_id] += 1


def _remove(counts: Counter[int], blocks: Iterable[Any]) -> None:
    for block in blocks:
        counts[block.block_id] -= 1
        if not counts[block.block_id]:
            del counts[block.block_id]
