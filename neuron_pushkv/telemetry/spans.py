"""OpenTelemetry spans of transfers, under the trace of their request.

Only OpenTelemetry's API is used, and its global tracer provider: where the process's owner has set one up (vLLM does in
each of its processes with ``--otlp-traces-endpoint``), spans go where its own go, and are exported by the provider's
own thread. Where there is none, or OpenTelemetry isn't installed, there are no spans.
"""

from __future__ import annotations

import time
from typing import Any

from neuron_pushkv.telemetry.lines import Fields
from neuron_pushkv.telemetry.transfer import Transfer

_NAMES = {"in": "pushkv.receive", "out": "pushkv.send"}
_ATTRIBUTES = ("request", "transfer", "engine", "rank", "peer", "tokens", "bytes", "writes", "reason", "detail")


class Spans:
    """Makes spans out of transfers that have ended. ``provider`` is the global one unless given."""

    def __init__(self, provider: Any = None) -> None:
        self._trace: Any = None
        try:
            from opentelemetry import trace
            from opentelemetry.context import Context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            return
        self._trace = trace
        self._nowhere = Context()
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("neuron_pushkv", tracer_provider=provider)  # The global one may be set later.

    def record(self, transfer: Transfer, seconds: float, fields: Fields) -> None:
        """One span of ``seconds`` with one child for each phase, if the request is part of a trace."""
        if self._trace is None or not transfer.traceparent:
            return
        parent = self._propagator.extract({"traceparent": transfer.traceparent}, self._nowhere)
        if not self._trace.get_current_span(parent).get_span_context().is_valid:
            return
        # The two clocks are compared now and not at the start of the process: the wall's may have been set since.
        started = time.time() - time.monotonic() + transfer.started
        name = _NAMES[transfer.way]
        span = self._tracer.start_span(
            name,
            context=parent,
            attributes={f"pushkv.{key}": fields[key] for key in _ATTRIBUTES if key in fields},
            start_time=_nanoseconds(started),
        )
        inside = self._trace.set_span_in_context(span, parent)
        for phase, (begin, end) in transfer.phases.items():
            child = self._tracer.start_span(f"{name}.{phase}", context=inside, start_time=_nanoseconds(started + begin))
            child.end(_nanoseconds(started + end))
        if transfer.reason is not None:
            text = f"{transfer.reason}: {transfer.detail}"
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text))
        span.end(_nanoseconds(started + seconds))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
