"""The connector in vLLM's worker process: carries the orders of each step to this rank's engine, and reports back.

vLLM must hear of each load once, and never of one that it does not wait for: what is reported is what was ordered.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from neuron_pushkv.connector.metadata import PushKVMetadata, StepNumber
from neuron_pushkv.device.base import HearsOutputs
from neuron_pushkv.orders import Blocks, Ready, StepOrders

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.003
"""How long a step that computes nothing waits for a load to end. vLLM takes such steps without pause (a millisecond of
sleep between two) as long as it waits for KV, and takes the processor from those who bring it. Nothing that comes in
meanwhile is seen before."""


class Results(Protocol):
    """Loads that have ended; ``failed`` is a subset of ``finished``."""

    @property
    def finished(self) -> frozenset[str]:
        """All of them."""

    @property
    def failed(self) -> frozenset[str]:
        """Those whose KV is not there."""


class Engine(Protocol):
    """The part of :class:`~neuron_pushkv.engine.PushEngine` that a worker uses."""

    def begin_step(self, orders: StepOrders) -> None:
        """Before the forward pass."""

    def advance(self, ready: Sequence[Ready]) -> None:
        """After the forward pass has been launched."""

    def advance_layer(self, layer: str, ready: Sequence[Ready]) -> None:
        """After that layer of the forward pass has been launched."""

    def end_step(self) -> None:
        """Nothing more of this step follows."""

    def take_results(self, patience: float = 0.0) -> Results:
        """Each load once; waits so many seconds until there is any."""

    def take_stats(self) -> dict[str, Any]:
        """What has happened since the last call."""

    def close(self) -> None:
        """End everything."""


class WorkerSide:
    """See the module's text. ``leads``: this rank speaks for the engine where each rank would count the same event.

    ``about`` names the effective provider and library for the metrics, ``measured`` maps gauges to what they are for
    good on each rank that is known here. ``listener``, if there is one, is told of the steps whose outputs vLLM has.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        leads: bool,
        about: dict[str, str],
        measured: Mapping[str, Mapping[str, float]] | None = None,
        listener: HearsOutputs | None = None,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._leads = leads
        self._about = about
        self._measured = measured or {}
        self._step = 0
        self._empty = False
        self._open: dict[str, Blocks] = {}
        self._announced: set[str] = set()
        self._refused: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._events: Counter[str] = Counter()
        self._untried: Counter[str] = Counter()
        self._gauges: dict[str, int] = {}

    def begin(self, metadata: PushKVMetadata) -> None:
        """Carry out the step's orders, once. Called by whichever hook comes first, before blocks are overwritten."""
        if metadata.step == self._step:
            return
        self._step = metadata.step
        self._empty = metadata.empty
        if self._listener is not None:
            self._listener.begin_step(metadata.step, metadata.ended)
        orders = metadata.orders
        # A load that this rank has reported is none of the engine's any more; an intent alone is never reported.
        withdrawn = tuple(name for name in orders.withdrawn if name in self._open or name in self._announced)
        self._announced.difference_update(orders.withdrawn, (receive.request for receive in orders.receives))
        self._announced.update(intent.request for intent in orders.intents)
        self._open.update({receive.request: receive.blocks for receive in orders.receives})
        self._open.update({refused.request: refused.blocks for refused in metadata.refused})
        self._refused.update(refused.request for refused in metadata.refused)
        counters = orders.counters if self._leads else {}
        self._gauges.update(metadata.gauges if self._leads else {})
        self._untried.update(metadata.untried)  # By each rank, as each counts its own part of every other transfer.
        self._engine.begin_step(dataclasses.replace(orders, withdrawn=withdrawn, counters=counters))

    def advance(self, metadata: PushKVMetadata) -> None:
        """The forward pass has been launched: what it computes may be pushed behind it."""
        if metadata.orders.ready:
            self._engine.advance(metadata.orders.ready)

    def advance_layer(self, layer: str, metadata: PushKVMetadata) -> None:
        """That layer of the forward pass has been launched: its part may be pushed while the next one is computed."""
        if metadata.orders.ready:
            self._engine.advance_layer(layer, metadata.orders.ready)

    def number(self, metadata: PushKVMetadata) -> StepNumber | None:
        """To come back with the step's outputs, if anybody here waits for them."""
        waits = self._listener is not None and metadata.orders.ready
        return StepNumber(metadata.step) if waits else None

    def end(self) -> None:
        """The step is over."""
        self._engine.end_step()

    def take_results(self) -> tuple[set[str], set[str]]:
        """Loads that have ended, and which of them failed. The failed ones' blocks are kept for :meth:`bad_blocks`."""
        waits = self._empty and bool(self._open) and not self._refused
        results = self._engine.take_results(PATIENCE_SECONDS if waits else 0.0)
        ended = self._ordered(results.finished) | self._refused
        failed = {request for request in ended if request in results.failed or request in self._refused}
        self._refused.clear()
        for request in ended:
            blocks = self._open.pop(request)
            if request in failed:
                self._bad_blocks.update(blocks[0])
        return ended, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the loads that failed, for vLLM before 0.30."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def take_stats(self) -> dict[str, Any]:
        """What has happened since the last call; the first one says which provider is in effect, and the like."""
        stats = {**self._about, **self._engine.take_stats()}
        self._about = {}
        for name, ours in (("events", self._events), ("transfers", self._untried)):
            if ours:
                stats[name] = dict(Counter(stats.get(name, {})) + ours)
                ours.clear()
        gauges = {**self._measured, **{name: {"engine": value} for name, value in self._gauges.items()}}
        if gauges:
            stats["gauges"] = {**stats.get("gauges", {}), **gauges}
            self._gauges.clear()
            self._measured = {}
        return stats

    def close(self) -> None:
        """End all transfers."""
        self._engine.close()

    def _ordered(self, requests: Iterable[str]) -> set[str]:
        """Those that vLLM waits for; telling it of any other would end its engine core."""
        ordered = set()
        for request in requests:
            if request in self._open:
                ordered.add(request)
            else:
                logger.error("a load of %s was reported that nobody waits for; please report this", request)
                self._events["unexpected_result"] += 1
        return ordered
