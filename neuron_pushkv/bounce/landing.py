"""Receives whose KV lands in the staging cache, and is written to the device when all of it has come.

A receive that finds no room waits its turn. Its blocks in the staging cache are given out again when the ledger has
reported it, which is when no write can touch them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from neuron_pushkv.bounce.cache import StagingCache
from neuron_pushkv.bounce.copier import BATCH_BYTES, Copier
from neuron_pushkv.bounce.copies import Table
from neuron_pushkv.errors import DeviceError, Reason
from neuron_pushkv.ledger.effects import Received
from neuron_pushkv.ledger.inbound import MAX_DELIVERIES
from neuron_pushkv.orders import Receive

Ended: TypeAlias = Callable[[Received], None]
Blocks: TypeAlias = list[tuple[int, Table, Table]]
"""Group, the device's blocks, the staging cache's."""


@dataclass(frozen=True)
class _Waiting:
    order: Receive
    since: float


class Landings:
    """Used under the engine's lock. ``ended`` is told of each receive that was landed, or never began; once."""

    def __init__(self, cache: StagingCache, copier: Copier, ended: Ended, patience: float) -> None:
        self._cache, self._copier, self._ended, self._patience = cache, copier, ended, patience
        self._room, self._plan = cache.receiving, cache.whole()
        self._landings: dict[str, Blocks] = {}
        """Those that have their room."""
        self._waiting: dict[str, _Waiting] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._landings or request in self._waiting

    def waits(self, request: str) -> bool:
        """Whether it has no room yet."""
        return request in self._waiting

    def add(self, order: Receive, now: float) -> bool:
        """It waits for room, if only for a moment. False if it has failed, since there never can be enough."""
        needed = sum(len(blocks) for blocks in order.blocks)
        if needed > self._room.blocks:
            size = needed * self._cache.block_bytes
            detail = (
                f"{needed} blocks ({size} bytes) are received through a staging cache that has {self._room.blocks} for "
                f"it; raise bounce_bytes"
            )
        elif len(self._waiting) >= MAX_DELIVERIES:
            detail = f"over {MAX_DELIVERIES} requests wait for room in the staging cache"
        else:
            self._waiting[order.request] = _Waiting(order, now)
            return True
        self._ended(_never_began(_Waiting(order, now), Reason.TABLE_FULL, detail))
        return False

    def next(self) -> Receive | None:
        """The one that has waited longest, if there is room for it now: with the staging cache's blocks."""
        waiting = next(iter(self._waiting.values()), None)
        if waiting is None:
            return None
        order = waiting.order
        device = [np.array(blocks, dtype=np.int64) for blocks in order.blocks]
        staging = self._room.take(sum(map(len, device)), order.request)
        if staging is None:
            return None
        del self._waiting[order.request]
        tables = np.split(staging, np.cumsum([len(blocks) for blocks in device[:-1]]))
        self._landings[order.request] = list(zip(range(len(device)), device, tables, strict=True))
        return replace(order, blocks=tuple(tuple(table.tolist()) for table in tables))

    def give_up(self, request: str) -> None:
        """vLLM has aborted one that has no room yet."""
        self._ended(_never_began(self._waiting.pop(request), Reason.ABORTED, ""))

    def expired(self, now: float) -> list[str]:
        """Those that have waited too long; they have ended."""
        late = [waiting for waiting in self._waiting.values() if now - waiting.since >= self._patience]
        for waiting in late:
            del self._waiting[waiting.order.request]
        for waiting in late:
            detail = f"no room in the staging cache within {now - waiting.since:.1f} s; raise bounce_bytes"
            self._ended(_never_began(waiting, Reason.TIMEOUT, detail))
        return [waiting.order.request for waiting in late]

    def land(self, received: Received) -> None:
        """The ledger is done with it: copy what has come to the device, and tell that it has ended."""
        if received.reason is not None:
            self._end(received)
            return
        self._copy(received, self._batches(self._landings[received.request]), None)

    def _copy(self, received: Received, batches: Iterator[Blocks], error: DeviceError | None) -> None:
        """One batch after the other, so that sending gets its turns."""
        if error is not None:
            self._end(replace(received, reason=Reason.DEVICE_FAILED, detail=str(error), tokens=0, writes=0))
            return
        batch = next(batches, None)
        if batch is None:
            self._end(received)
            return
        self._copier.to_device(self._plan.copies(batch), lambda error: self._copy(received, batches, error))

    def _batches(self, blocks: Blocks) -> Iterator[Blocks]:
        most = max(1, BATCH_BYTES // self._cache.block_bytes)
        for group, device, staging in blocks:
            for first in range(0, len(device), most):
                yield [(group, device[first : first + most], staging[first : first + most])]

    def _end(self, received: Received) -> None:
        if self._landings.pop(received.request, None) is not None:
            self._room.give_back(received.request)
        self._ended(received)


def _never_began(waiting: _Waiting, reason: Reason, detail: str) -> Received:
    order = waiting.order
    return Received(
        request=order.request,
        transfer=order.transfer,
        traceparent=order.traceparent,
        connection=-1,
        reason=reason,
        detail=detail,
        tokens=0,
        writes=0,
        started=waiting.since,
        moments={},
    )
