"""Slots and epochs: what the immediate of every write says, and whose it is."""

from __future__ import annotations

from collections import deque

from neuron_pushkv.transport.base import EPOCHS, SLOTS

RESTING = 1 << 10
"""With so many quiet slots no fresh one is taken: the tables, also the transport's, stay as small as they can be."""


class SlotTable:
    """Hands out (slot, epoch), each slot least recently used, each use of a slot with its next epoch.

    A slot comes back only when it is quiet. With a thousand slots taken in turn an epoch of 12 bits comes round after
    four million deliveries, long after any write of the first one.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._fresh = 0
        self._quiet: deque[tuple[int, int]] = deque()
        self._taken: dict[int, int] = {}

    def take(self) -> tuple[int, int] | None:
        """A slot and its new epoch, or None when all are taken."""
        if self._fresh < self._slots and len(self._quiet) < RESTING:
            slot, epoch = self._fresh, 1
            self._fresh += 1
        elif self._quiet:
            slot, last = self._quiet.popleft()
            epoch = (last + 1) % EPOCHS
        else:
            return None
        self._taken[slot] = epoch
        return slot, epoch

    def give_back(self, slot: int) -> None:
        """The slot is quiet: no write of its epoch can arrive any more."""
        self._quiet.append((slot, self._taken.pop(slot)))

    @property
    def taken(self) -> int:
        """How many are in use."""
        return len(self._taken)
