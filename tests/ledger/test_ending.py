"""One delivery that ends badly, at every stage: reported once, and only when its memory is quiet."""

from __future__ import annotations

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger.inbound import Share
from neuron_pushkv.orders import Receive
from neuron_pushkv.wire import Cancel, Cancelled, Commit, Done

from .pair import CONNECTION, REMOTE, Pair, content

# The receiver gives up (F1, F7).


def _until_registered(pair: Pair) -> None:
    pair.receive()


def _until_accepted(pair: Pair) -> None:
    pair.receive()
    pair.flush()


def _until_waiting(pair: Pair) -> None:
    pair.offer()
    pair.receive()
    pair.flush()


def _until_writing(pair: Pair) -> None:
    pair.offer()
    pair.seal()
    pair.receive()
    pair.flush()


def _until_partly_landed(pair: Pair) -> None:
    _until_writing(pair)
    pair.land(writes=1)


def _until_written(pair: Pair) -> None:
    _until_writing(pair)
    pair.written()


STAGES = [
    _until_registered,
    _until_accepted,
    _until_waiting,
    _until_writing,
    _until_partly_landed,
    _until_written,
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("times", [1, 3])
def test_abort_at_every_stage(stage: object, times: int) -> None:
    """Reported once, and only when nothing of the delivery can land any more."""
    pair = Pair()
    assert callable(stage)
    stage(pair)
    for _ in range(times):
        pair.receiver(pair.inbound.withdraw("d", pair.now))
    pair.flush()
    for ticket in list(pair.tickets):
        assert pair.reports == [], "a write is under way: the blocks are not vLLM's yet"
        assert pair.cancelled_tickets == [ticket]
        landed = next(iter(pair.counts.values()))
        pair.land(ticket, pair.writes - landed)
        pair.written(ticket)
    pair.flush()
    if not pair.reports:
        pair.land_rest()
    assert pair.reports == [("d", Reason.ABORTED)]
    assert not pair.drops
    pair.offer("later", "x")
    pair.pass_time(31)
    assert len(pair.inbound) == 0
    assert len(pair.outbound) == 0
    assert not pair.expected


def test_abort_before_the_peer_is_connected_is_reported_at_once() -> None:
    pair = Pair()
    prompt = content(64)
    order = Receive("d", "t", REMOTE, 0, 64, prompt.at(0), prompt.at(64), ((1, 2),))
    pair.receiver(pair.inbound.receive(order, pair.now))
    pair.receiver(pair.inbound.withdraw("d", pair.now))
    pair.receiver(pair.inbound.connected("d", [Share(CONNECTION)], pair.now))
    pair.receiver(pair.inbound.unreachable("d", Reason.UNREACHABLE, ""))
    assert pair.reports == [("d", Reason.ABORTED)]
    assert not pair.to_sender


def test_abort_with_a_sender_that_never_answers_ends_with_a_fence() -> None:
    pair = Pair(ConnectorSettings(cancel_seconds=2))
    _until_writing(pair)
    pair.receiver(pair.inbound.withdraw("d", pair.now))
    pair.to_sender.clear()
    pair.pass_time(1.5)
    assert pair.reports == []
    pair.pass_time(1)
    assert pair.drops
    assert pair.reports == [("d", Reason.ABORTED)]


def test_cancelled_count_that_never_arrives_ends_with_a_fence() -> None:
    pair = Pair()
    _until_writing(pair)
    pair.receiver(pair.inbound.withdraw("d", pair.now))
    pair.flush()
    pair.written()
    pair.flush()
    assert pair.reports == [], "CANCELLED said three writes, none has come"
    pair.pass_time(2.5)
    assert pair.drops
    assert pair.reports == [("d", Reason.ABORTED)]


def test_cancel_that_crosses_commit_and_done() -> None:
    pair = Pair()
    _until_writing(pair)
    pair.receiver(pair.inbound.withdraw("d", pair.now))
    pair.land()
    pair.at_receiver(Commit(0, 1, 3, 100))
    pair.written()
    pair.flush()
    assert pair.reports == [("d", Reason.ABORTED)]
    pair.at_sender(Done(0, 1))
    pair.at_sender(Cancel(0, 1))
    pair.at_receiver(Cancelled(0, 1, 3))
    assert pair.events == ["stale_message"] * 3
    assert len(pair.reports) == 1


# The sender fails (F3, F5).


def test_failed_post_is_told_at_once_and_others_go_on() -> None:
    pair = Pair()
    _until_waiting(pair)
    pair.offer("q", "u")
    pair.receive("e", "u")
    pair.flush()
    pair.seal()
    pair.failed(written=0)
    pair.flush()
    assert pair.reports == [("d", Reason.WRITE_FAILED)]
    pair.seal("q")
    pair.push()
    assert pair.reports == [("d", Reason.WRITE_FAILED), ("e", None)]
    assert not pair.drops


def test_failed_in_the_middle_waits_for_the_writes_that_were_made() -> None:
    pair = Pair()
    _until_writing(pair)
    pair.failed(written=2)
    pair.flush()
    assert pair.reports == [("d", Reason.WRITE_FAILED)]
    assert not pair.drops


def test_failed_with_writes_in_doubt_ends_the_peer_before_vllm_hears() -> None:
    pair = Pair()
    _until_writing(pair)
    pair.failed(written=1, in_doubt=1)
    pair.flush()
    assert pair.drops
    assert pair.reports == [("d", Reason.WRITE_FAILED)]


def test_prefill_that_fails_is_told_at_once() -> None:
    pair = Pair()
    _until_waiting(pair)
    pair.finish(kept=False)
    pair.flush()
    assert pair.reports == [("d", Reason.PREFILL_FAILED)]
    assert pair.quiet()
    assert pair.freed == [], "vLLM has freed the blocks itself"
    pair.receive("late")
    pair.flush()
    assert pair.reports[-1] == ("late", Reason.GONE)


@pytest.mark.parametrize("stage", STAGES)
def test_connection_that_ends_at_every_stage(stage: object) -> None:
    pair = Pair()
    assert callable(stage)
    stage(pair)
    pair.cut()
    assert pair.reports == [("d", Reason.PEER_LOST)]
    pair.pass_time(60)
    assert pair.reports == [("d", Reason.PEER_LOST)]
    assert pair.quiet()


def test_quarantine_after_a_fence_that_is_not_final() -> None:
    pair = Pair(quarantine=5.0)
    _until_writing(pair)
    pair.cut()
    pair.pass_time(4.5)
    assert pair.reports == []
    pair.pass_time(1)
    assert pair.reports == [("d", Reason.PEER_LOST)]


# A network that breaks the transports' contract.


def test_more_arrivals_than_writes_are_not_believed() -> None:
    """F31: one of them was counted for another, whose bytes may be missing."""
    pair = Pair()
    _until_writing(pair)
    while len(pair.to_receiver) > 1:
        pair.to_one_side()
    pair.land(writes=pair.writes + 1)
    pair.flush()
    assert pair.drops == [f"protocol violation: {pair.writes + 1} writes arrived where {pair.writes} were made"]
    assert pair.reports == [("d", Reason.PEER_LOST)]
    assert pair.quiet()
