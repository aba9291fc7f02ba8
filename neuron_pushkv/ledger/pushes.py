"""Which writes a delivery needs next: everything that is ready and was asked for, and nothing else."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Layout
from neuron_pushkv.ledger.delivery import Delivery, State
from neuron_pushkv.ledger.effects import Effect, Write
from neuron_pushkv.ledger.sources import Source
from neuron_pushkv.ledger.tracks import ABSENT, Track
from neuron_pushkv.orders import Ready
from neuron_pushkv.wire import Register

Tables: TypeAlias = tuple[NDArray[np.int64], ...]
"""A request's blocks, for each KV cache group from token 0 on."""


def block_tables(order: Ready) -> Tables:
    """An order's, in the form that all the rest works with."""
    return tuple(np.array(group, dtype=np.int64) for group in order.blocks)


class Pushes:
    """``layout`` is the sender's. ``late``: the transport ``reads_late``."""

    def __init__(self, layout: Layout, late: bool = False) -> None:
        self._late = late
        self._groups = layout.groups
        self._layers = tuple(dict.fromkeys(region.layer for region in layout.regions))

    def all_ready(self, delivery: Delivery, source: Source, now: float) -> list[Effect] | None:
        """Writes of all that is full now; the prompt's last block, or the receiver's, need not be full.

        None if the sender hasn't got what it should have: the delivery is stopped then.
        """
        effects: list[Effect] = []
        for index, track in enumerate(delivery.tracks):
            end = track.ready(source.ready, sealed=source.sealed)
            if end <= track.next:
                continue
            if not self._holds(track, source.blocks, end):
                delivery.stop(Reason.BAD_RANGE, f"the sender doesn't hold all blocks of tokens {track.next} to {end}")
                return None
            ahead = track.layers_ahead(end)
            left = tuple(layer for layer in self._layers if layer not in ahead) if ahead else None
            if left == ():
                effects += self._went_on(delivery, track, end, now)
            else:
                effects.append(self._write(delivery, index, source.blocks, end, left))
        return effects

    def layer(self, delivery: Delivery, tables: Tables, tokens: int, layer: str) -> list[Effect]:
        """Writes of one layer of a step whose other layers are still being computed."""
        effects: list[Effect] = []
        for index, track in enumerate(delivery.tracks):
            end = track.ready(tokens, sealed=False)
            if end > track.next and layer not in track.layers_ahead(end) and self._holds(track, tables, end):
                effects.append(self._write(delivery, index, tables, end, (layer,), ahead=True))
        return effects

    def handed_over(self, delivery: Delivery, write: Write, end: int, now: float) -> list[Effect]:
        """The transport has taken a write up to token ``end``."""
        track = delivery.tracks[write.track]
        if write.ahead:
            assert write.layers is not None
            track.went_ahead(write.layers, end)
            return []
        return self._went_on(delivery, track, end, now)

    def _went_on(self, delivery: Delivery, track: Track, end: int, now: float) -> list[Effect]:
        """All layers of a track have been handed over up to ``end``."""
        track.next = end
        track.ahead.clear()
        if delivery.complete:
            delivery.reached("posted", now)
        return self.announced(delivery, now)

    def announced(self, delivery: Delivery, now: float) -> list[Effect]:
        """COMMIT, once, as soon as everything has been handed over.

        Where the target reads late it may count writes whose source is ours no longer, after a fence. So there COMMIT,
        without which no count suffices, waits until every ticket has ended as written.
        """
        if delivery.state is not State.PUSHING or delivery.committed or (self._late and delivery.tickets):
            return []
        return delivery.commit() if delivery.complete else []

    def _holds(self, track: Track, tables: Tables, end: int) -> bool:
        """Whether the sender's tables reach from ``next`` to ``end``, with no block that vLLM has let go of."""
        for group in track.groups:
            size = self._groups[group].block_size
            first, last = track.next // size, -(-end // size)
            part = tables[group][first:last]
            if len(part) < last - first or (part == ABSENT).any():
                return False
        return True

    def _write(
        self,
        delivery: Delivery,
        index: int,
        tables: Tables,
        end: int,
        layers: tuple[str, ...] | None,
        ahead: bool = False,
    ) -> Write:
        assert delivery.receiver is not None
        assert isinstance(delivery.wish, Register)
        moves = delivery.tracks[index].moves(tables, delivery.receiver, end)
        return Write(delivery.key, delivery.wish.heads, index, moves, layers, ahead)
