"""The prompts whose KV a sender has or will have, and which of them a registration asks for."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.content import Content
from neuron_pushkv.wire import Intent, Register

REMEMBERED_TRANSFERS = 1 << 14
"""Ended transfers that are answered with GONE at once; an older one is merely unknown, which takes longer to say.
Likewise released ones whose sources have not come yet."""


Key = TypeVar("Key", str, bytes)
Value = TypeVar("Value")


@dataclass
class Source:
    """One offered request. ``blocks``, a table per KV cache group, hold the first ``ready`` tokens of its prompt."""

    request: str
    transfer: str
    content: Content
    wanted: int
    """Deliveries that were announced for its whole transfer; when that many are done, nobody else will ask."""
    order: int
    traceparent: str = ""
    ready: int = 0
    blocks: tuple[NDArray[np.int64], ...] = ()
    finished: bool = False
    """vLLM has let go of the request, so its blocks are held by our reference alone."""
    released: bool = False
    """Nobody will ask any more, or what is kept is too much."""
    asked: int = 0
    """How many of this engine's ranks were asked for it, by who got it."""
    got: Fraction = Fraction(0)
    """How many deliveries of it are done, where no transfer counts them."""
    satisfied: bool = False
    """All deliveries that were announced are done."""
    deliveries: int = 0
    """Ever matched, for choosing between equal sources."""
    active: set[tuple[int, int, int]] = field(default_factory=set)
    keep_until: float = float("inf")

    @property
    def state(self) -> str:
        """What a receiver is told: "computing", or "sealed" when the whole prompt is there."""
        return "sealed" if self.sealed else "computing"

    @property
    def sealed(self) -> bool:
        """Whether the whole prompt is there."""
        return self.ready >= self.content.length

    def agrees(self, wish: Intent | Register) -> bool:
        """Whether its content is what the receiver has at the last position asked for, and at the first if it says."""
        return (
            0 < wish.end_token <= self.content.length
            and self.content.at(wish.end_token) == wish.end_content
            and (isinstance(wish, Intent) or self.content.at(wish.start_token) == wish.start_content)
        )


class Sources:
    """All sources of a sender, found by request, by transfer id, or by the content of the whole prompt."""

    def __init__(self) -> None:
        self._by_request: dict[str, Source] = {}
        self._by_transfer: dict[str, list[Source]] = {}
        self._by_content: dict[bytes, list[Source]] = {}
        self._done: defaultdict[str, Fraction] = defaultdict(Fraction)
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._released: OrderedDict[str, int] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request: str) -> Source | None:
        """The source that vLLM's ``request`` computes."""
        return self._by_request.get(request)

    def all(self) -> list[Source]:
        """A copy, so that callers may end sources while they look."""
        return list(self._by_request.values())

    def of_transfer(self, transfer: str) -> list[Source]:
        """Sources of one router dispatch."""
        return list(self._by_transfer.get(transfer, ()))

    def add(self, request: str, transfer: str, content: Content, wanted: int, traceparent: str = "") -> Source:
        """A new source; ``request`` must not be known."""
        self._count += 1
        source = Source(request, transfer, content, wanted, self._count, traceparent)
        self._by_request[request] = source
        if transfer:
            self._by_transfer.setdefault(transfer, []).append(source)
        if transfer in self._released:
            source.released, source.asked = True, self._released[transfer]
        for end in ends(content):
            self._by_content.setdefault(end, []).append(source)
        return source

    def remove(self, source: Source) -> None:
        """It has ended. When the last one of its transfer has, the transfer is remembered as gone."""
        del self._by_request[source.request]
        if source.transfer and _drop(self._by_transfer, source.transfer, source):
            self._done.pop(source.transfer, None)
            _remember(self._ended, source.transfer, None)
        for end in ends(source.content):
            _drop(self._by_content, end, source)

    def release(self, transfer: str, asked: int) -> list[Source]:
        """Nobody asks for that transfer any more, neither for the sources that answers nor for any to come."""
        if transfer:
            _remember(self._released, transfer, asked)
        for source in self.of_transfer(transfer):
            source.released, source.asked = True, max(source.asked, asked)
        return self.of_transfer(transfer)

    def delivered(self, source: Source, askers: int, asked: int) -> list[Source]:
        """One more delivery of it is done, or its part for one of ``askers``.

        Answers the sources that nobody will ask for any more: none, or all of its transfer's.
        """
        source.asked = max(source.asked, asked)
        if source not in self.of_transfer(source.transfer):
            # Its request has ended; or an old proxy's, that sends each prompt to one receiver.
            source.got += Fraction(1, askers)
            return [source] if source.got >= 1 else []
        self._done[source.transfer] += Fraction(1, askers)
        return self.of_transfer(source.transfer) if self._done[source.transfer] >= source.wanted else []

    def gone(self, transfer: str) -> bool:
        """Whether every source of that transfer has ended (as far back as is remembered)."""
        return transfer in self._ended and transfer not in self._by_transfer

    def match(self, wish: Intent | Register) -> Source | None:
        """The source asked for: of that transfer, or of any if none is named, the oldest with the fewest deliveries."""
        if wish.transfer:
            among = self._by_transfer.get(wish.transfer, [])
        else:
            among = self._by_content.get(wish.end_content, [])
        agreeing = [source for source in among if source.agrees(wish)]
        return min(agreeing, key=lambda source: (source.deliveries, source.order), default=None)

    def can_still_match(self, transfer: str) -> bool:
        """Whether another source of that transfer may yet appear: one dispatch may carry a batch of prompts."""
        among = self._by_transfer.get(transfer, [])
        return not among or any(source.wanted > len(among) for source in among)


def ends(content: Content) -> tuple[bytes, ...]:
    """What a receiver that names no transfer may give as a prompt's last content: of all its tokens, or all but one."""
    return tuple(content.at(count) for count in {content.length, content.length - 1} if count > 0)


def _drop(table: dict[Key, list[Source]], key: Key, source: Source) -> bool:
    """Take ``source`` out; True if it was the last under ``key``."""
    table[key].remove(source)
    if table[key]:
        return False
    del table[key]
    return True


def _remember(table: OrderedDict[str, Value], transfer: str, value: Value) -> None:
    table[transfer] = value
    table.move_to_end(transfer)
    if len(table) > REMEMBERED_TRANSFERS:
        table.popitem(last=False)
