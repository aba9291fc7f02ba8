"""A transport whose target reads the sender's memory itself, and may still do so after the sender's fence."""

from __future__ import annotations

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.wire import Commit

from .pair import Pair


def _committed(pair: Pair) -> list[Commit]:
    return [message for message in pair.to_receiver if isinstance(message, Commit)]


def _posted(late: bool = True) -> Pair:
    """Two steps' writes are under way, and there are no more to come."""
    pair = Pair(late=late)
    pair.offer()
    pair.receive()
    pair.flush()
    pair.seal(tokens=64)
    pair.seal(tokens=100)
    return pair


def test_commit_waits_for_the_last_ticket() -> None:
    pair = _posted()
    first, last = pair.tickets
    assert not _committed(pair)
    pair.written(last)
    assert not _committed(pair)
    pair.written(first)
    (commit,) = _committed(pair)
    assert commit.writes == 2 * pair.writes


def test_elsewhere_it_does_not() -> None:
    pair = _posted(late=False)
    assert len(_committed(pair)) == 1


@pytest.mark.parametrize("first", ["arrival", "completion"])
def test_all_goes_well(first: str) -> None:
    pair = _posted()
    tickets = list(pair.tickets)
    if first == "arrival":
        for ticket in tickets:
            pair.land(ticket)
    for ticket in tickets:
        if first == "completion":
            pair.land(ticket)
        pair.written(ticket)
    pair.flush()
    pair.finish()
    assert pair.reports == [("d", None)]
    assert pair.sent == [None]
    pair.pass_time(60)
    assert pair.freed == ["p"]
    assert pair.quiet()


def test_what_is_read_after_the_fence_completes_nothing() -> None:
    """The sender gives up and its blocks are vLLM's again; then the receiver reads them, and counts every write."""
    pair = _posted()
    under_way = list(pair.tickets)
    pair.sender(pair.outbound.peer_down(pair.connection, Reason.PEER_LOST, "cut", pair.now))
    for ticket in under_way:
        pair.land(ticket)
        pair.sender(pair.outbound.ticket_failed(ticket, 0, pair.writes, "fenced", pair.now))
    pair.finish(kept=False)
    pair.flush()
    assert pair.reports == []
    pair.receiver(pair.inbound.peer_down(pair.connection, Reason.PEER_LOST, "cut", pair.now))
    assert pair.reports == [("d", Reason.PEER_LOST)]


def test_blocks_taken_back_when_all_was_posted() -> None:
    """What was under way is written all the same: nothing needs to be pushed again, and COMMIT still comes."""
    pair = _posted()
    pair.sender(pair.outbound.drain("p"))
    assert pair.cancelled_tickets == list(pair.tickets)
    for ticket in list(pair.tickets):
        pair.land(ticket)
        pair.written(ticket)
    pair.flush()
    assert pair.reports == [("d", None)]


def test_blocks_taken_back_before_all_was_written() -> None:
    pair = _posted()
    pair.sender(pair.outbound.drain("p"))
    first, last = pair.tickets
    pair.land(first)
    pair.written(first)
    pair.failed(written=0)
    assert not _committed(pair)
    pair.seal(tokens=100)
    (again,) = pair.tickets
    assert pair.all_writes[again].first == pair.all_writes[last].first
    pair.land(again)
    pair.written(again)
    pair.flush()
    assert pair.reports == [("d", None)]
