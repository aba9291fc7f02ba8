"""Telemetry of one worker: what is counted at once, and what is told by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import Any

from neuron_pushkv.blocks import BlockPool
from neuron_pushkv.errors import Reason
from neuron_pushkv.telemetry.counts import Counts, Gauge
from neuron_pushkv.telemetry.lines import log, transfer_fields
from neuron_pushkv.telemetry.spans import Spans
from neuron_pushkv.telemetry.transfer import Transfer

logger = logging.getLogger(__name__)
transfers = logging.getLogger("neuron_pushkv.transfers")

MAX_WAITING = 1 << 12
"""Transfers that may wait to be told of. More than that wait only while the log's reader is stuck."""
CLOSE_SECONDS = 2.0
"""How long what still waits may take to be told at the end."""


class Telemetry:
    """Counts what happens, and tells of every transfer that ends: by a line of the logger ``neuron_pushkv.transfers``
    (INFO, or WARNING if it has failed) and, if its request is traced, by a span.

    Not thread-safe: its owner holds a lock. No method but :meth:`close` waits for anything. Lines and spans come from a
    thread that whoever reads the log may hold up. Beyond :data:`MAX_WAITING` transfers they are dropped, and counted as
    the event ``transfer_not_logged``.
    """

    def __init__(self, provider: str, library: str, *, engine: str, rank: str) -> None:
        """``engine`` and ``rank`` (data, pipeline and tensor parallel, like ``0.0.1``) name this worker."""
        self._engine = engine
        self._rank = rank
        self._counts = Counts(provider, library, rank)
        self._spans = Spans()
        self._waiting: SimpleQueue[tuple[Transfer, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._tell_all, name="pushkv-telemetry", daemon=True)
        self._thread.start()

    def ended(self, transfer: Transfer) -> None:
        """A transfer has ended just now. Once for each, on either side."""
        seconds = time.monotonic() - transfer.started
        self._counts.ended(transfer, seconds)
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((transfer, seconds))
        else:
            self._counts.event("transfer_not_logged")

    def event(self, name: str, count: int = 1) -> None:
        """Something that is only counted."""
        self._counts.event(name, count)

    def refused(self, reason: Reason, count: int = 1) -> None:
        """A connection or frame was refused."""
        self._counts.refused(reason, count)

    def gauge(self, name: Gauge, value: float) -> None:
        """How much of it there is now, on this rank."""
        self._counts.gauge(name, value)

    def staging(self, pool: BlockPool | None) -> None:
        """How full the staging buffer is now, byte by byte; None if there is none yet."""
        pool = pool or BlockPool()
        self._counts.gauge("staging_bytes", pool.held)
        self._counts.gauge("staging_largest_bytes", pool.largest)
        self._counts.gauge("staging_fragmentation", pool.fragmentation)

    def take(self) -> dict[str, Any]:
        """What has happened since the last call; see :meth:`~neuron_pushkv.telemetry.counts.Counts.take`."""
        return self._counts.take()

    def close(self) -> None:
        """Tell what still waits, within :data:`CLOSE_SECONDS`. Idempotent; nothing that ends afterwards is told of.

        Waits for the log, so no lock may be held.
        """
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _tell_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._tell(*item)
            except Exception:
                logger.exception("a bug in neuron_pushkv: please report it; one transfer was not told of")

    def _tell(self, transfer: Transfer, seconds: float) -> None:
        fields = transfer_fields(transfer, seconds, self._engine, self._rank)
        log(transfers, logging.INFO if transfer.reason is None else logging.WARNING, fields)
        self._spans.record(transfer, seconds, fields)
