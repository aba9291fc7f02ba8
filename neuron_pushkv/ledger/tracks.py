"""How far a delivery has got, by token position.

All groups of full attention go on together, as prefill fills blocks. Each sliding window group is a track of its own
that moves once, when the prompt is complete: before that vLLM takes its blocks back as the window moves on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from neuron_pushkv.layout import Group
from neuron_pushkv.ledger.registration import Receiver
from neuron_pushkv.plan.pair import Move
from neuron_pushkv.wire import Register

ABSENT = -1
"""A block id that stands for a block which vLLM has let go of."""


@dataclass(eq=False)
class Track:
    """Groups that move together. ``next``: what lies before it has been handed to the transport.

    ``unit`` is how many tokens move together at least; only the last of them may be fewer.
    """

    groups: tuple[int, ...]
    first: int
    end: int
    unit: int
    streams: bool
    next: int
    ahead: set[str] = field(default_factory=set)
    """Layers that were handed over up to ``ahead_to`` before the step that computes them all was over."""
    ahead_to: int = 0

    @property
    def complete(self) -> bool:
        """Whether all of it has been handed over."""
        return self.next >= self.end

    def ready(self, tokens: int, *, sealed: bool) -> int:
        """Up to where it can be handed over, when ``tokens`` of the prompt are there."""
        if tokens >= self.end and (self.streams or sealed):
            return self.end
        return max(self.next, min(tokens, self.end) // self.unit * self.unit) if self.streams else self.next

    def layers_ahead(self, end: int) -> set[str]:
        """Layers that have been handed over from ``next`` to just ``end``."""
        return self.ahead if self.ahead_to == end else set()

    def went_ahead(self, layers: tuple[str, ...], end: int) -> None:
        """These have been handed over from ``next`` to ``end``; all will be, by the step's end or later."""
        if self.ahead_to != end:
            self.ahead.clear()
        self.ahead.update(layers)
        self.ahead_to = end

    def moves(self, source: Sequence[Sequence[int]], receiver: Receiver, end: int) -> tuple[Move, ...]:
        """From ``next`` to ``end``. ``source``: the sender's table for each group."""
        return tuple(
            Move(group, source[group], receiver.blocks[group], self._target_start(group, receiver), self.next, end)
            for group in self.groups
        )

    def _target_start(self, group: int, receiver: Receiver) -> int:
        size = receiver.groups[group].block_size
        return self.first // size * size


def tracks(register: Register, receiver: Receiver) -> tuple[Track, ...]:
    """What has to be moved for a registration that was found good."""
    start, end = register.start_token, register.end_token
    full = tuple(index for index, group in enumerate(receiver.groups) if not group.window)
    found = []
    if full:
        unit = math.lcm(*(receiver.units[index] for index in full))
        found.append(Track(full, start, end, unit, streams=True, next=start))
    for index, group in enumerate(receiver.groups):
        if group.window:
            # By units: in larger blocks, the receiver's table may begin before what the sender still has to have.
            unit = receiver.units[index]
            first = Group(unit, group.window).first_token(start, end)
            found.append(Track((index,), first, end, unit, streams=False, next=first))
    return tuple(found)
