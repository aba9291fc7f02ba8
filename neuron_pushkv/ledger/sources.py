"""The prompts whose KV a sender has or will have, and which of them a registration asks for."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from neuron_pushkv.content import Content
from neuron_pushkv.wire import Register

REMEMBERED_TRANSFERS = 1 << 14
"""Ended transfers that are answered with GONE at once; an older one is merely unknown, which takes longer to say."""


Key = TypeVar("Key", str, bytes)


@dataclass
class Source:
    """One offered request. ``blocks`` hold the first ``ready`` tokens of its prompt."""

    request: str
    transfer: str
    content: Content
    wanted: int
    """Deliveries that were announced for its whole transfer; when that many are done, nobody else will ask."""
    order: int
    ready: int = 0
    blocks: tuple[int, ...] = ()
    finished: bool = False
    """vLLM has let go of the request, so its blocks are held by our reference alone."""
    released: bool = False
    """The router has said that nobody will ask any more."""
    deliveries: int = 0
    """Ever matched, for choosing between equal sources."""
    active: set[tuple[int, int, int]] = field(default_factory=set)
    keep_until: float = float("inf")

    @property
    def state(self) -> str:
        """What a receiver is told: "computing", or "sealed" when the whole prompt is there."""
        return "sealed" if self.ready >= self.content.length else "computing"

    def agrees(self, register: Register) -> bool:
        """Whether its content is what the receiver has at the first and the last position asked for."""
        return (
            register.end_token <= self.content.length
            and self.content.at(register.end_token) == register.end_content
            and self.content.at(register.start_token) == register.start_content
        )


class Sources:
    """All sources of a sender, found by request, by transfer id, or by the content of the whole prompt."""

    def __init__(self) -> None:
        self._by_request: dict[str, Source] = {}
        self._by_transfer: dict[str, list[Source]] = {}
        self._by_content: dict[bytes, list[Source]] = {}
        self._done: Counter[str] = Counter()
        self._ended: OrderedDict[str, None] = OrderedDict()
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

    def add(self, request: str, transfer: str, content: Content, wanted: int) -> Source:
        """A new source; ``request`` must not be known."""
        self._count += 1
        source = Source(request, transfer, content, wanted, self._count)
        self._by_request[request] = source
        if transfer:
            self._by_transfer.setdefault(transfer, []).append(source)
        self._by_content.setdefault(content.at(content.length), []).append(source)
        return source

    def remove(self, source: Source) -> None:
        """It has ended. When the last one of its transfer has, the transfer is remembered as gone."""
        del self._by_request[source.request]
        if source.transfer and _drop(self._by_transfer, source.transfer, source):
            del self._done[source.transfer]
            self._ended[source.transfer] = None
            if len(self._ended) > REMEMBERED_TRANSFERS:
                self._ended.popitem(last=False)
        _drop(self._by_content, source.content.at(source.content.length), source)

    def delivered(self, source: Source) -> list[Source]:
        """One more delivery of it is done. Answers the sources that nobody will ask for any more: none, or all of its
        transfer's."""
        if source not in self.of_transfer(source.transfer):
            return [source]  # Its request has ended; or an old proxy's, that sends each prompt to one receiver.
        self._done[source.transfer] += 1
        return self.of_transfer(source.transfer) if self._done[source.transfer] >= source.wanted else []

    def gone(self, transfer: str) -> bool:
        """Whether every source of that transfer has ended (as far back as is remembered)."""
        return transfer in self._ended and transfer not in self._by_transfer

    def match(self, register: Register) -> Source | None:
        """The source asked for: of that transfer, or of any if none is named, the oldest with the fewest deliveries."""
        if register.transfer:
            among = self._by_transfer.get(register.transfer, [])
        else:
            among = self._by_content.get(register.end_content, [])
        agreeing = [source for source in among if source.agrees(register)]
        return min(agreeing, key=lambda source: (source.deliveries, source.order), default=None)

    def can_still_match(self, register: Register) -> bool:
        """Whether another source of that transfer may yet appear: one dispatch may carry a batch of prompts."""
        among = self._by_transfer.get(register.transfer, [])
        return not among or any(source.wanted > len(among) for source in among)


def _drop(table: dict[Key, list[Source]], key: Key, source: Source) -> bool:
    """Take ``source`` out; True if it was the last under ``key``."""
    table[key].remove(source)
    if table[key]:
        return False
    del table[key]
    return True
