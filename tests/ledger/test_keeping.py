"""How long a source is kept, what may read it, and what bounds the tables."""

from __future__ import annotations

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import Offer

from .pair import BLOCK, CONNECTION, Pair, content, sources, targets


def _until_writing(pair: Pair) -> None:
    pair.offer()
    pair.seal()
    pair.receive()
    pair.flush()


def test_source_outlives_its_lease_while_a_write_reads_it() -> None:
    """F2: no lease ends under a write that is under way."""
    pair = Pair(ConnectorSettings(keep_unclaimed_seconds=2))
    _until_writing(pair)
    pair.finish()
    pair.pass_time(60)
    assert pair.freed == []
    pair.land()
    pair.written()
    pair.flush()
    pair.pass_time(3)
    assert pair.freed == ["p"]
    assert pair.reports == [("d", None)]


def test_write_that_never_ends_is_ended_by_a_fence() -> None:
    pair = Pair()
    _until_writing(pair)
    pair.finish()
    pair.pass_time(200)
    assert pair.drops
    assert pair.reports[0][0] == "d"
    pair.pass_time(31)
    assert pair.freed == ["p"]
    assert pair.quiet()


def test_source_is_kept_for_all_announced_deliveries() -> None:
    pair = Pair()
    pair.offer(deliveries=2)
    pair.seal()
    pair.finish()
    pair.receive("d1")
    pair.push()
    pair.pass_time(20)
    assert pair.freed == []
    pair.receive("d2")
    pair.push()
    pair.pass_time(1.5)
    assert pair.freed == ["p"]
    assert pair.reports == [("d1", None), ("d2", None)]


def test_batch_is_kept_until_all_its_prompts_are_delivered() -> None:
    """Deliveries are announced for the whole transfer: two prompts, one receiver each."""
    pair = Pair()
    for number in (1, 2):
        pair.sender(pair.outbound.offer(Offer(f"p{number}", "t", content(100, number), 2), pair.now))
        pair.seal(f"p{number}")
        pair.finish(f"p{number}")
    pair.receive("d1", first=1)
    pair.push()
    pair.pass_time(20)
    assert pair.freed == []
    pair.receive("d2", first=2)
    pair.push()
    pair.pass_time(1.5)
    assert sorted(pair.freed) == ["p1", "p2"]


def test_release_lets_go_at_once_but_not_under_a_write() -> None:
    pair = Pair()
    _until_writing(pair)
    pair.finish()
    pair.sender(pair.outbound.release("t", 1, pair.now))
    assert pair.freed == []
    pair.push()
    assert pair.freed == ["p"]


def test_preempted_source_fails_its_writes_and_is_served_again_when_recomputed() -> None:
    pair = Pair()
    _until_writing(pair)
    pair.sender(pair.outbound.drain("p"))
    assert pair.outbound.reading("p") == {CONNECTION}
    pair.failed(written=1)
    assert pair.outbound.reading("p") == set()
    pair.flush()
    assert pair.reports == [("d", Reason.PREEMPTED)]
    pair.receive("again")
    pair.flush()
    assert not pair.tickets, "its blocks are not computed any more"
    pair.offer()
    pair.seal()
    pair.push()
    assert pair.reports[-1] == ("again", None)


def test_prefix_hit_at_the_receiver_asks_by_position() -> None:
    pair = Pair()
    pair.offer()
    pair.seal()
    pair.receive(start=2 * BLOCK)
    pair.flush()
    write = pair.tickets[1]
    assert sources(write) == (2, 3)
    assert targets(write) == (10, 11)
    pair.push()
    assert pair.reports == [("d", None)]


def test_inbound_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_pushkv.ledger.inbound.MAX_DELIVERIES", 2)
    pair = Pair()
    for number in range(3):
        pair.receive(f"d{number}")
    assert pair.reports == [("d2", Reason.TABLE_FULL)]
    assert len(pair.inbound) == 2


def test_outbound_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_pushkv.ledger.deliveries.MAX_DELIVERIES", 2)
    pair = Pair()
    for number in range(3):
        pair.receive(f"d{number}")
    pair.flush()
    assert pair.reports == [("d2", Reason.TABLE_FULL)]
