"""Prefill legs on the scheduler side: offered when they arrive, ready chunk by chunk, kept until pushed.

What is kept is a reference in vLLM's block pool, so vLLM itself is done with the request, the prefix cache goes on
sharing its blocks, and an engine that keeps KV may sleep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuron_pushkv.connector.compat import NULL_BLOCK, Scheduled, StepView
from neuron_pushkv.connector.contiguity import Growing
from neuron_pushkv.connector.parameters import PrefillLeg
from neuron_pushkv.connector.parking import Parking
from neuron_pushkv.content import Content
from neuron_pushkv.layout import Group
from neuron_pushkv.orders import Blocks, Finish, Offer, Ready

GONE = -1
"""In a Ready's window group: vLLM has let go of this block."""


@dataclass
class _Offered:
    tokens: int
    transfer: str
    tables: list[list[int]]
    known: bool = True
    """Whether ``tables`` are what vLLM has; not once a step could not be read."""
    running: bool = False
    """Whether it has blocks: scheduled, and not preempted since."""
    sealed: bool = False
    """Whether all of the prompt is computed, or will be when the step that was last announced is ready."""
    windows: list[Any] = field(default_factory=list)
    """Blocks that hold the last window of a sealed prompt, with a reference of ours: vLLM drops its own, without a
    word, as soon as the window has moved on."""


@dataclass(frozen=True)
class Step:
    """What a step takes from us (requests that were preempted), and what it adds to the others' :class:`Ready`.

    ``cached``: filled by earlier steps, and here when this one begins; ``ready``: with this one.
    """

    preempted: tuple[str, ...]
    cached: tuple[Ready, ...]
    ready: tuple[Ready, ...]


class Sending:
    """All prefill legs of this engine. ``coordinates`` is the part of the answer that is the same for all of them.

    ``by_step``: workers hear of each chunk of a prompt, not only of its last one.
    """

    def __init__(
        self, groups: Sequence[Group], coordinates: Mapping[str, Any], parking: Parking, *, by_step: bool = True
    ) -> None:
        self._groups = groups
        self._by_step = by_step
        self._coordinates = dict(coordinates)
        self._parking = parking
        self._pool: Any = None
        self._offered: dict[str, _Offered] = {}
        self._offers: list[Offer] = []
        self._finishes: list[Finish] = []

    def __contains__(self, request: object) -> bool:
        return request in self._offered

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool, which counts references."""
        self._pool = pool

    def arrived(self, request: str, leg: PrefillLeg, content: Content, traceparent: str = "") -> bool:
        """A prefill leg has been queued. False if another one of that id is still kept, and this can't be offered."""
        if request in self._parking or request in self._offered:
            return False
        self._offered[request] = _Offered(content.length, leg.transfer, [[] for _ in self._groups])
        self._offers.append(Offer(request, leg.transfer, content, leg.deliveries, traceparent))
        return True

    def step(self, view: StepView) -> Step:
        """Read one of vLLM's steps."""
        preempted = {request for request in view.preempted if request in self._offered}
        # 0.24 names only what its scheduler preempts, not what a reset of the prefix cache does; but it comes back.
        comeback = {scheduled.request for scheduled in (*view.new, *view.resumed)}
        preempted |= {request for request in comeback - preempted if self._offered[request].running}
        for request in preempted:
            offered = self._offered[request]
            offered.running = False
            self._unseal(offered)
        filling = self._filling(view)
        cached, ready = [], []
        for scheduled in view.scheduled:
            offered = self._offered[scheduled.request]
            offered.running = True
            if offered.sealed:
                continue
            _extend(offered, scheduled)
            if not offered.known:
                continue
            if filling is not None and scheduled in view.new:
                hits = self._hits(scheduled, filling)
                if hits:
                    cached.append(Ready(scheduled.request, hits, self._filled(scheduled.request, hits, offered)))
            tokens = min(scheduled.computed + scheduled.scheduled, offered.tokens)
            whole = tokens == offered.tokens
            if whole:
                self._seal(scheduled.request, offered)
            if whole or self._by_step:
                ready.append(Ready(scheduled.request, tokens, self._filled(scheduled.request, tokens, offered)))
        return Step(tuple(sorted(preempted)), tuple(cached), tuple(ready))

    def blind_step(self) -> Step:
        """A step that could not be read: anything may have been preempted, so nothing may be read any more."""
        for offered in self._offered.values():
            offered.known = False
            self._unseal(offered)
        return Step(tuple(self._offered), (), ())

    def growing(self) -> Iterator[Growing]:
        """Prompts of which a part is computed."""
        for offered in self._offered.values():
            if offered.running and offered.known and not offered.sealed:
                for group, table in zip(self._groups, offered.tables, strict=True):
                    more = group.blocks_for(0, offered.tokens) - len(table)
                    if table and more > 0:
                        yield Growing(table[-1], more)

    def finished(self, request: str, tables: Blocks) -> dict[str, Any] | None:
        """vLLM is about to free the request's blocks. If they hold its prompt: keep them, and answer the parameters
        with which a decode engine gets them."""
        offered = self._offered[request]
        if not offered.sealed:
            self.dropped(request)
            return None
        blocks = [
            self._pool.blocks[block]
            for group, table in zip(self._groups, tables, strict=True)
            if not group.window
            for block in _first_blocks(request, offered.tokens, group, table)
        ]
        parameters = {
            **self._coordinates,
            "remote_request_id": request,
            "transfer_id": offered.transfer,
            "remote_num_tokens": offered.tokens,
        }
        self._parking.keep(request, offered.windows, self._pool, blocks)
        del self._offered[request]
        self._finishes.append(Finish(request, kept=True))
        return parameters

    def dropped(self, request: str) -> None:
        """The request has ended and its blocks are vLLM's again. Nothing happens if it isn't one of ours."""
        offered = self._offered.pop(request, None)
        if offered is None:
            return
        announced = len(self._offers)
        self._offers = [offer for offer in self._offers if offer.request != request]
        if len(self._offers) == announced:  # The workers know of it.
            self._finishes.append(Finish(request, kept=False))
        self._unseal(offered)

    def take(self) -> tuple[tuple[Offer, ...], tuple[Finish, ...]]:
        """Offers and finishes that the workers have not heard of."""
        taken = tuple(self._offers), tuple(self._finishes)
        self._offers, self._finishes = [], []
        return taken

    def _seal(self, request: str, offered: _Offered) -> None:
        blocks = [
            self._pool.blocks[block]
            for group, table in zip(self._groups, offered.tables, strict=True)
            if group.window
            for block in _window_blocks(request, offered.tokens, group, table)
            if block != GONE
        ]
        if blocks:
            self._pool.touch(blocks)
        offered.windows = blocks
        offered.sealed = True

    def _unseal(self, offered: _Offered) -> None:
        """Blocks that are freed now are filled in the next step at the earliest, and the workers, who may read them,
        hear of it before."""
        blocks, offered.windows, offered.sealed = offered.windows, [], False
        if blocks:
            self._pool.free_blocks(reversed(blocks))

    def _filling(self, view: StepView) -> frozenset[int] | None:
        """Blocks that are written to in this step. ``None`` if that can't be told, or nobody needs to know."""
        if view.others is None or not self._by_step or not all(scheduled.whole for scheduled in view.scheduled):
            return None
        return frozenset(
            block
            for scheduled in (*view.scheduled, *view.others)
            for group, table in zip(self._groups, scheduled.blocks, strict=True)
            for block in table[scheduled.computed // group.block_size :]
        )

    def _hits(self, scheduled: Scheduled, filling: frozenset[int]) -> int:
        """How many of the prompt's first tokens were computed before this step.

        Not all of its prefix hits: vLLM counts blocks as computed that another request fills in this very step.
        """
        tokens = scheduled.computed
        for group, table in zip(self._groups, scheduled.blocks, strict=True):
            if not group.window:
                blocks = table[: group.blocks_for(0, tokens)]
                old = next((place for place, block in enumerate(blocks) if block in filling), len(blocks))
                tokens = min(tokens, old * group.block_size)
        return tokens

    def _filled(self, request: str, tokens: int, offered: _Offered) -> Blocks:
        """The blocks that hold the prompt's first ``tokens``, as :class:`Ready` has them."""
        blocks: list[tuple[int, ...]] = []
        for group, table in zip(self._groups, offered.tables, strict=True):
            if not group.window:
                blocks.append(_first_blocks(request, tokens, group, table))
            elif offered.sealed:
                blocks.append(_window_blocks(request, tokens, group, table))
            else:
                blocks.append(())
        return tuple(blocks)


def _extend(offered: _Offered, scheduled: Scheduled) -> None:
    if scheduled.whole:
        offered.tables, offered.known = [list(table) for table in scheduled.blocks], True
        return
    for table, added in zip(offered.tables, scheduled.blocks, strict=bool(scheduled.blocks)):
        table.extend(added)


def _first_blocks(request: str, tokens: int, group: Group, table: Sequence[int]) -> tuple[int, ...]:
    needed = group.blocks_for(0, tokens)
    if len(table) < needed:
        raise ValueError(f"{request} has {len(table)} blocks for {tokens} tokens, which need {needed}")
    return tuple(table[:needed])


def _window_blocks(request: str, tokens: int, group: Group, table: Sequence[int]) -> tuple[int, ...]:
    """Of the blocks of the first ``tokens`` those that the last of these tokens sees; :data:`GONE` for the others.

    vLLM has them in the step that computes this token, and may be rid of the oldest by the next one.
    """
    blocks = _first_blocks(request, tokens, group, table)
    gone = group.first_token(0, tokens - 1) // group.block_size
    return tuple(GONE if place < gone or block == NULL_BLOCK else block for place, block in enumerate(blocks))
