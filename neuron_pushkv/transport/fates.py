"""What can happen to a write: the kinds of trouble that :mod:`neuron_pushkv.transport.faults` deals out."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from dataclasses import dataclass

from neuron_pushkv.transport.base import Product


@dataclass
class Fate:
    """What is going to happen to one write."""

    number: int
    """Writes are counted from 0 since the transport was opened,"""
    batch: int
    """and so are batches."""
    delay: float = 0.0
    """Seconds until it is posted."""
    copies: int = 1
    dropped: bool = False
    failure: str | None = None


class Fault:
    """One kind of trouble; subclasses do one of these three."""

    def befall(self, fate: Fate, chance: random.Random) -> None:
        """Change the fate of a write."""

    def arrange(self, writes: list[Product], chance: random.Random) -> None:
        """Change the order of a batch's writes."""

    def permits(self, under_way: int) -> bool:
        """Whether another write may be posted now."""
        return True


@dataclass
class Delay(Fault):
    """A share of the writes is posted late, by ``least`` to ``most`` seconds."""

    least: float
    most: float
    share: float = 1.0

    def befall(self, fate: Fate, chance: random.Random) -> None:
        """Overtaken by those that are not delayed."""
        if chance.random() < self.share:
            fate.delay += chance.uniform(self.least, self.most)


@dataclass
class Drop(Fault):
    """Write number ``nth`` gets nowhere and is never heard of; its ticket ends with the peer's fence only."""

    nth: int

    def befall(self, fate: Fate, chance: random.Random) -> None:
        """Like a completion that is lost."""
        fate.dropped |= fate.number == self.nth


@dataclass
class Fail(Fault):
    """Write number ``nth`` fails."""

    nth: int

    def befall(self, fate: Fate, chance: random.Random) -> None:
        """It is not posted at all, so that nothing of it is in doubt."""
        if fate.number == self.nth:
            fate.failure = f"write {fate.number} was made to fail"


@dataclass
class FailBatches(Fault):
    """These batches fail, with all their writes."""

    batches: Collection[int]

    def befall(self, fate: Fate, chance: random.Random) -> None:
        """As in :class:`Fail`."""
        if fate.batch in self.batches:
            fate.failure = f"batch {fate.batch} was made to fail"


@dataclass
class Duplicate(Fault):
    """A share of the writes is made twice, immediate and all."""

    share: float = 1.0

    def befall(self, fate: Fate, chance: random.Random) -> None:
        """The receiver counts more than the ticket says."""
        fate.copies += chance.random() < self.share


class Reorder(Fault):
    """The writes of a batch are posted in random order."""

    def arrange(self, writes: list[Product], chance: random.Random) -> None:
        """Within one ticket; different tickets overtake each other by delays."""
        chance.shuffle(writes)


@dataclass
class Depth(Fault):
    """No more than ``writes`` are under way at once."""

    writes: int

    def permits(self, under_way: int) -> bool:
        """A queue that is full most of the time."""
        return under_way < self.writes


class Stall(Fault):
    """Nothing is posted between ``begin()`` and ``end()``."""

    def __init__(self) -> None:
        self._stalled = threading.Event()

    def begin(self) -> None:
        """From now on."""
        self._stalled.set()

    def end(self) -> None:
        """Until now."""
        self._stalled.clear()

    def permits(self, under_way: int) -> bool:
        """What is under way goes on."""
        return not self._stalled.is_set()
