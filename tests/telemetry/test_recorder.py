"""Telemetry as an engine uses it: lines for every transfer, and never a wait for whoever reads them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from neuron_pushkv.blocks import BlockPool
from neuron_pushkv.errors import Reason
from neuron_pushkv.telemetry import Telemetry, recorder

from .samples import failed, received, sent

PATIENCE = 20.0


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    ours = Telemetry("tcp", "libfabric 2.5", engine="decode-0", rank="0.0.0")
    yield ours
    ours.close()


class Gate(logging.Handler):
    """A log whose reader is stuck until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE)
        self.lines.append(record.getMessage())


@pytest.fixture
def gate() -> Iterator[Gate]:
    handler, logger = Gate(), recorder.transfers
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield handler
    handler.opened.set()
    logger.removeHandler(handler)
    logger.propagate, logger.level = before


def test_the_staging_buffer_shows_how_it_is_split(telemetry: Telemetry) -> None:
    telemetry.staging(None)
    assert telemetry.take()["gauges"]["staging_bytes"] == {"0.0.0": 0}
    pool = BlockPool(100)
    pool.take(40, "a")
    pool.take(20, "b")
    pool.release("a")
    telemetry.staging(pool)
    gauges = {name: values["0.0.0"] for name, values in telemetry.take()["gauges"].items()}
    assert gauges == {"staging_bytes": 20, "staging_largest_bytes": 40, "staging_fragmentation": 0.5}


def test_every_transfer_is_counted_and_told(telemetry: Telemetry, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="neuron_pushkv.transfers")
    telemetry.ended(received())
    telemetry.ended(sent())
    telemetry.ended(failed())
    telemetry.event("stale_message", 2)
    telemetry.refused(Reason.WRONG_KEY)
    telemetry.gauge("open_sends", 7)
    taken = telemetry.take()
    assert taken["transfers"] == {"in:completed": 1, "out:completed": 1, "in:failed:peer_lost": 1}
    assert (taken["events"], taken["refusals"]) == ({"stale_message": 2}, {"wrong_key": 1})
    assert taken["gauges"] == {"open_sends": {"0.0.0": 7}}
    # Started a second ago, says the sample; so it has taken that long.
    assert 1.0 <= taken["durations"]["in:completed"][0] < 1.0 + PATIENCE
    telemetry.close()
    told = [(record.levelname, record.__dict__["event"]) for record in caplog.records]
    assert told == [("INFO", "kv_received"), ("INFO", "kv_sent"), ("WARNING", "kv_receive_failed")]
    assert caplog.records[0].__dict__["seconds"] == pytest.approx(taken["durations"]["in:completed"][0], abs=1e-6)
    assert {record.threadName for record in caplog.records} == {"pushkv-telemetry"}
    telemetry.close()
    assert not telemetry._thread.is_alive()


def test_a_stuck_log_holds_up_nobody_and_loses_a_known_number(telemetry: Telemetry, gate: Gate) -> None:
    telemetry.ended(received(request="first"))
    assert gate.entered.wait(PATIENCE)
    for number in range(recorder.MAX_WAITING + 10):
        telemetry.ended(received(request=f"r{number}"))
    taken = telemetry.take()
    assert taken["transfers"] == {"in:completed": recorder.MAX_WAITING + 11}
    assert taken["events"] == {"transfer_not_logged": 10}
    gate.opened.set()
    telemetry.close()
    assert len(gate.lines) == recorder.MAX_WAITING + 1
    assert f"request=r{recorder.MAX_WAITING - 1} " in gate.lines[-1]


def test_closing_does_not_wait_for_ever(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CLOSE_SECONDS", 0.01)
    telemetry = Telemetry("tcp", "", engine="e", rank="0.0.0")
    telemetry.ended(received())
    assert gate.entered.wait(PATIENCE)
    telemetry.close()
    assert telemetry._thread.is_alive()
    gate.opened.set()
    telemetry._thread.join(PATIENCE)
    assert len(gate.lines) == 1


def test_a_bug_in_telling_ends_nothing(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="neuron_pushkv")
    calls: list[str] = []

    def once(transfer: object, seconds: float, fields: dict[str, str | int | float]) -> None:
        calls.append(str(fields["request"]))
        if len(calls) == 1:
            raise RuntimeError("odd")

    monkeypatch.setattr(telemetry._spans, "record", once)
    telemetry.ended(received(request="a"))
    telemetry.ended(received(request="b"))
    telemetry.close()
    assert calls == ["a", "b"]
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error.exc_info is not None
