"""All deliveries of a sender: by the receiver's name for them, by ticket, and those that wait for their source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from neuron_pushkv.ledger.delivery import Delivery, Push
from neuron_pushkv.ledger.effects import Key

MAX_DELIVERIES = 1 << 14
"""Registrations that a sender holds for one receiver at a time; one more is rejected."""


class Deliveries:
    """See the module's text."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Delivery] = {}
        self._by_ticket: dict[int, Delivery] = {}
        self._waiting: dict[str | bytes, list[Delivery]] = {}
        """Those without a source, by transfer, or by their last content where none is named."""
        self._per_connection: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(list(self._by_key.values()))

    def __getitem__(self, key: Key) -> Delivery:
        return self._by_key[key]

    def get(self, key: Key) -> Delivery | None:
        """The one that its receiver calls so."""
        return self._by_key.get(key)

    def full(self, connection: int) -> bool:
        """Whether that receiver has as many as it may have."""
        return self._per_connection[connection] >= MAX_DELIVERIES

    def add(self, delivery: Delivery) -> None:
        """It waits for its source unless it has one."""
        self._by_key[delivery.key] = delivery
        self._per_connection[delivery.key[0]] += 1
        if delivery.source is None:
            self._waiting.setdefault(_place(delivery), []).append(delivery)

    def remove(self, delivery: Delivery) -> None:
        """It has ended."""
        del self._by_key[delivery.key]
        self._per_connection[delivery.key[0]] -= 1
        if not self._per_connection[delivery.key[0]]:
            del self._per_connection[delivery.key[0]]
        if delivery.source is None:
            self.found(delivery)

    def waiting(self, places: Iterable[str | bytes]) -> list[Delivery]:
        """Those that wait for a source of that transfer, or that last content."""
        return [delivery for place in places for delivery in self._waiting.get(place, ())]

    def found(self, delivery: Delivery) -> None:
        """It waits for its source no more."""
        place = _place(delivery)
        self._waiting[place].remove(delivery)
        if not self._waiting[place]:
            del self._waiting[place]

    def posted(self, delivery: Delivery, ticket: int, push: Push) -> None:
        """A ticket of it is under way."""
        delivery.tickets[ticket] = push
        self._by_ticket[ticket] = delivery

    def ended(self, ticket: int) -> tuple[Delivery, Push]:
        """A ticket has ended."""
        delivery = self._by_ticket.pop(ticket)
        return delivery, delivery.tickets.pop(ticket)


def _place(delivery: Delivery) -> str | bytes:
    return delivery.wish.transfer or delivery.wish.end_content
