"""Prefill legs on the scheduler side: offered when they arrive, ready chunk by chunk, kept until pushed.

What is kept is a reference in vLLM's block pool, so vLLM itself is done with the request, the prefix cache goes on
sharing its blocks, and an engine that keeps KV may sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from neuron_pushkv.connector.compat import StepView
from neuron_pushkv.connector.parameters import PrefillLeg
from neuron_pushkv.content import Content
from neuron_pushkv.orders import Finish, Offer, Ready


class Keeping(Protocol):
    """What is needed of the engine's :class:`~neuron_pushkv.directory.Directory`."""

    def keep(self, request: str) -> None:
        """This request's blocks are held until all ranks have let go."""

    def take_freed(self) -> list[str]:
        """Requests whose blocks no rank reads any more, each once."""


@dataclass
class _Offered:
    tokens: int
    transfer: str
    table: list[int] = field(default_factory=list)
    known: bool = True
    """Whether ``table`` is what vLLM has; not once a step could not be read."""
    running: bool = False
    """Whether it has blocks: scheduled, and not preempted since."""
    sealed: bool = False
    """Whether all of the prompt is computed, or will be when the step that was last announced is ready."""


class Sending:
    """All prefill legs of this engine. ``coordinates`` is the part of the answer that is the same for all of them.

    ``by_step``: workers hear of each chunk of a prompt, not only of its last one.
    """

    def __init__(
        self, block_size: int, coordinates: Mapping[str, Any], directory: Keeping, *, by_step: bool = True
    ) -> None:
        self._block_size = block_size
        self._by_step = by_step
        self._coordinates = dict(coordinates)
        self._directory = directory
        self._offered: dict[str, _Offered] = {}
        self._kept: dict[str, list[Any]] = {}
        self._offers: list[Offer] = []
        self._finishes: list[Finish] = []

    @property
    def kept(self) -> int:
        """How many finished requests' blocks are held."""
        return len(self._kept)

    def __contains__(self, request: object) -> bool:
        return request in self._offered

    def arrived(self, request: str, leg: PrefillLeg, content: Content) -> bool:
        """A prefill leg has been queued. False if another one of that id is still kept, and this can't be offered."""
        if request in self._kept or request in self._offered:
            return False
        self._offered[request] = _Offered(content.length, leg.transfer)
        self._offers.append(Offer(request, leg.transfer, content, leg.deliveries))
        return True

    def step(self, view: StepView) -> tuple[tuple[str, ...], tuple[Ready, ...]]:
        """What this step takes from us (requests that were preempted) and what it adds to the others."""
        preempted = {request for request in view.preempted if request in self._offered}
        # 0.24 names only what its scheduler preempts, not what a reset of the prefix cache does; but it comes back.
        comeback = {scheduled.request for scheduled in (*view.new, *view.resumed)}
        preempted |= {request for request in comeback - preempted if self._offered[request].running}
        for request in preempted:
            self._offered[request].sealed = self._offered[request].running = False
        ready = []
        for scheduled in view.scheduled:
            offered = self._offered[scheduled.request]
            offered.running = True
            if offered.sealed:
                continue
            if scheduled.whole:
                offered.table, offered.known = list(scheduled.blocks), True
            else:
                offered.table += scheduled.blocks
            if not offered.known:
                continue
            tokens = min(scheduled.computed + scheduled.scheduled, offered.tokens)
            offered.sealed = tokens == offered.tokens
            if offered.sealed or self._by_step:
                blocks = self._first_blocks(scheduled.request, tokens, offered.table)
                ready.append(Ready(scheduled.request, tokens, (blocks,)))
        return tuple(sorted(preempted)), tuple(ready)

    def blind_step(self) -> tuple[tuple[str, ...], tuple[Ready, ...]]:
        """A step that could not be read: anything may have been preempted, so nothing may be read any more."""
        for offered in self._offered.values():
            offered.sealed = offered.known = False
        return tuple(self._offered), ()

    def finished(self, request: str, pool: Any, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """vLLM is about to free the request's blocks. If they hold its prompt: keep them, and answer the parameters
        with which a decode engine gets them."""
        offered = self._offered[request]
        if not offered.sealed:
            self.dropped(request)
            return None
        blocks = [pool.blocks[block] for block in self._first_blocks(request, offered.tokens, block_ids)]
        parameters = {
            **self._coordinates,
            "remote_request_id": request,
            "transfer_id": offered.transfer,
            "remote_num_tokens": offered.tokens,
        }
        self._directory.keep(request)
        pool.touch(blocks)
        self._kept[request] = blocks
        del self._offered[request]
        self._finishes.append(Finish(request, kept=True))
        return parameters

    def dropped(self, request: str) -> None:
        """The request has ended and its blocks are vLLM's again. Nothing happens if it isn't one of ours."""
        if self._offered.pop(request, None) is None:
            return
        announced = len(self._offers)
        self._offers = [offer for offer in self._offers if offer.request != request]
        if len(self._offers) == announced:  # The workers know of it.
            self._finishes.append(Finish(request, kept=False))

    def free(self, release: Callable[[Iterable[Any]], None]) -> None:
        """Drop the references to blocks that no rank reads any more. ``release`` is the pool's ``free_blocks``."""
        for request in self._directory.take_freed():
            blocks = self._kept.pop(request, None)
            if blocks is not None:
                release(reversed(blocks))  # As vLLM does: the prompt's tail is evicted before its head.

    def take(self) -> tuple[tuple[Offer, ...], tuple[Finish, ...]]:
        """Offers and finishes that the workers have not heard of."""
        taken = tuple(self._offers), tuple(self._finishes)
        self._offers, self._finishes = [], []
        return taken

    def _first_blocks(self, request: str, tokens: int, table: Sequence[int]) -> tuple[int, ...]:
        needed = -(-tokens // self._block_size)
        if len(table) < needed:
            raise ValueError(f"{request} has {len(table)} blocks for {tokens} tokens, which need {needed}")
        return tuple(table[:needed])
