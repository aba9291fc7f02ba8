"""Spans, with OpenTelemetry's own SDK: under which parent, from when to when, saying what."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from neuron_pushkv.telemetry.lines import transfer_fields
from neuron_pushkv.telemetry.spans import Spans
from neuron_pushkv.telemetry.transfer import PHASES, Transfer

from .samples import PARENT, TRACE, failed, received, sent

MICROSECOND = 1000


def spans_of(transfer: Transfer, seconds: float = 0.75) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Spans(provider).record(transfer, seconds, transfer_fields(transfer, seconds, "decode-0", "0.0.1"))
    provider.shutdown()
    return exporter.get_finished_spans()


def split(spans: Sequence[ReadableSpan]) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The transfer's span, and its phases'."""
    (whole,) = [span for span in spans if span.name.count(".") == 1]
    return whole, [span for span in spans if span is not whole]


@pytest.mark.parametrize(("transfer", "name"), [(received(), "pushkv.receive"), (sent(), "pushkv.send")])
def test_a_transfer_is_a_span_of_its_requests_trace(transfer: Transfer, name: str) -> None:
    whole, phases = split(spans_of(transfer))
    assert whole.name == name
    assert whole.parent is not None
    assert (format(whole.parent.trace_id, "032x"), format(whole.parent.span_id, "016x")) == (TRACE, PARENT)
    assert whole.parent.is_remote
    assert whole.status.status_code is StatusCode.UNSET
    assert whole.attributes == {
        "pushkv.request": transfer.request,
        "pushkv.transfer": "t1",
        "pushkv.engine": "decode-0",
        "pushkv.rank": "0.0.1",
        "pushkv.peer": transfer.peer,
        "pushkv.tokens": 128,
        "pushkv.bytes": 8192,
        "pushkv.writes": 4,
    }
    assert [phase.name for phase in phases] == [f"{name}.{phase}" for phase in PHASES[transfer.way]]
    for phase in phases:
        assert phase.parent == whole.context


@pytest.mark.parametrize("transfer", [received(), sent()])
def test_times_are_the_transfers_on_the_walls_clock(transfer: Transfer) -> None:
    before = time.time_ns(), time.monotonic_ns()
    whole, phases = split(spans_of(transfer, 0.875))
    after = time.time_ns(), time.monotonic_ns()
    assert whole.start_time is not None
    assert whole.end_time is not None
    started = int(transfer.started * 1e9)
    assert before[0] - after[1] - MICROSECOND <= whole.start_time - started <= after[0] - before[1] + MICROSECOND
    assert whole.end_time - whole.start_time == pytest.approx(875_000_000, abs=MICROSECOND)
    for span, (begin, end) in zip(phases, transfer.phases.values(), strict=True):
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time - whole.start_time == pytest.approx(begin * 1e9, abs=MICROSECOND)
        assert span.end_time - whole.start_time == pytest.approx(end * 1e9, abs=MICROSECOND)


def test_a_failure_is_an_error_with_its_reason() -> None:
    whole, phases = split(spans_of(failed()))
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.status.description == 'peer_lost: it said "bye"\nand left'
    assert whole.attributes is not None
    assert whole.attributes["pushkv.reason"] == "peer_lost"
    assert [span.name for span in phases] == ["pushkv.receive.connect", "pushkv.receive.register"]


@pytest.mark.parametrize("header", ["", "junk", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"])
def test_a_request_without_a_trace_has_no_spans(header: str) -> None:
    assert not spans_of(received(traceparent=header))


def test_a_trace_that_is_not_sampled_has_no_spans() -> None:
    assert not spans_of(received(traceparent=f"00-{TRACE}-{PARENT}-00"))


def test_without_opentelemetry_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {name: None for name in sys.modules if name.split(".")[0] == "opentelemetry"}
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    spans = Spans()
    assert spans._trace is None
    spans.record(received(), 1.0, {})


GLOBAL = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from neuron_pushkv.telemetry import Telemetry
from tests.telemetry.samples import received

telemetry = Telemetry("tcp", "", engine="decode-0", rank="0.0.0")
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
telemetry.ended(received())
telemetry.close()
print(*[span.name for span in exporter.get_finished_spans()])
"""


def test_the_process_s_own_provider_gets_them() -> None:
    """In a process of its own: the global provider can be set but once."""
    command = [sys.executable, "-W", "error", "-c", GLOBAL]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout.split()[-1] == "pushkv.receive"
    assert len(found.stdout.split()) == 1 + len(PHASES["in"])
