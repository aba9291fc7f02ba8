"""What is counted and measured, and how the time of a transfer divides into phases."""

from __future__ import annotations

import pickle

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.telemetry import PHASES
from neuron_pushkv.telemetry.counts import MAX_SAMPLES, Counts

from .samples import failed, received, sent


def lengths(phases: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {phase: end - begin for phase, (begin, end) in phases.items()}


def counts() -> Counts:
    return Counts("tcp", "libfabric 2.5", "0.0.1")


def test_phases_lie_between_moments() -> None:
    assert lengths(received().phases) == pytest.approx(
        {"connect": 0.1, "register": 0.05, "wait": 0.35, "transfer": 0.125, "report": 0.125}
    )
    assert lengths(sent().phases) == pytest.approx(
        {"match": 0.125, "ready": 0.125, "push": 0.125, "drain": 0.125, "confirm": 0.25}
    )
    assert [list(received().phases), list(sent().phases)] == [list(PHASES["in"]), list(PHASES["out"])]


def test_phases_that_did_not_end_are_not_there() -> None:
    assert failed().phases == {"connect": (0.0, 0.25), "register": (0.25, 0.5)}
    assert failed(moments={}).phases == {}


def test_moments_in_the_other_order_make_a_phase_of_no_length() -> None:
    early = {"matched": 0.0, "first_write": 0.1, "last_write": 0.2, "posted": 0.3, "done": 0.15}
    assert sent(moments=early).phases["drain"] == (0.3, 0.3)
    assert sent(moments=early).phases["confirm"] == (0.2, 0.2)


def test_everything_is_taken_once() -> None:
    ours = counts()
    assert ours.take() == {}
    ours.ended(received(), 1.0)
    ours.ended(received(), 2.0)
    ours.ended(sent(), 0.5)
    ours.ended(failed(), 3.0)
    ours.event("hook_error")
    ours.event("hook_error", 2)
    ours.refused(Reason.WRONG_KEY, 4)
    taken = ours.take()
    assert taken["transfers"] == {"in:completed": 2, "out:completed": 1, "in:failed:peer_lost": 1}
    assert taken["tokens"] == {"in": 256, "out": 128}
    assert taken["writes"] == {"in": 8, "out": 4}
    assert taken["bytes"] == {"in": 16384, "out": 8192}
    assert taken["durations"] == {"in:completed": [1.0, 2.0], "out:completed": [0.5], "in:failed": [3.0]}
    assert taken["phases"]["in:transfer"] == [0.125, 0.125]
    assert taken["phases"]["out:push"] == [0.125]
    assert taken["phases"]["in:connect"] == pytest.approx([0.1, 0.1, 0.25])
    assert taken["events"] == {"hook_error": 3}
    assert taken["refusals"] == {"wrong_key": 4}
    assert (taken["provider"], taken["library"]) == ("tcp", "libfabric 2.5")
    assert pickle.loads(pickle.dumps(taken)) == taken
    assert ours.take() == {}


def test_a_failed_transfer_moves_nothing() -> None:
    ours = counts()
    ours.ended(failed(tokens=128, writes=3, bytes=4096), 1.0)
    assert {"tokens", "writes", "bytes"}.isdisjoint(ours.take())


def test_times_are_kept_up_to_a_bound_and_counts_are_not() -> None:
    ours = counts()
    for _ in range(MAX_SAMPLES + 5):
        ours.ended(received(), 1.0)
    taken = ours.take()
    assert len(taken["phases"]["in:connect"]) == len(taken["durations"]["in:completed"]) == MAX_SAMPLES
    assert taken["transfers"] == {"in:completed": MAX_SAMPLES + 5}


def test_gauges_are_told_when_they_change_and_with_everything_else() -> None:
    ours = counts()
    ours.gauge("parked_bytes", 4096)
    assert ours.take()["gauges"] == {"parked_bytes": {"0.0.1": 4096}}
    ours.gauge("parked_bytes", 4096)
    assert ours.take() == {}
    ours.gauge("open_sends", 0)
    assert ours.take()["gauges"] == {"parked_bytes": {"0.0.1": 4096}, "open_sends": {"0.0.1": 0}}
    ours.event("x")
    assert ours.take()["gauges"] == {"parked_bytes": {"0.0.1": 4096}, "open_sends": {"0.0.1": 0}}
