"""One delivery, both ledgers: every order of events, every end, each reported once."""

from __future__ import annotations

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import Offer
from neuron_pushkv.wire import Commit, Fail, Register

from .pair import Pair, content, packed


def test_registration_before_prefill_ends() -> None:
    pair = Pair()
    pair.offer()
    pair.receive()
    pair.flush()
    assert not pair.tickets, "nothing moves before the prompt is computed"
    pair.seal()
    pair.push()
    pair.finish()
    assert pair.reports == [("d", None)]
    assert pair.sent == [None]
    assert pair.freed == [], "kept for a second delivery for a moment"
    pair.pass_time(1.1)
    assert pair.freed == ["p"]
    assert pair.quiet()


@pytest.mark.parametrize("order", ["offer-receive-seal", "receive-offer-seal", "offer-seal-receive"])
def test_any_order(order: str) -> None:
    pair = Pair()
    for step in order.split("-"):
        {"offer": pair.offer, "receive": pair.receive, "seal": pair.seal}[step]()
        pair.flush()
    pair.push()
    pair.finish()
    pair.pass_time(2)
    assert (pair.reports, pair.freed) == ([("d", None)], ["p"])
    assert pair.quiet()


def test_late_registration_is_served_after_the_request_has_finished() -> None:
    pair = Pair()
    pair.offer()
    pair.seal()
    pair.finish()
    pair.pass_time(29)
    pair.receive()
    pair.push()
    pair.pass_time(2)
    assert pair.reports == [("d", None)]
    assert pair.freed == ["p"]


def test_unclaimed_source_is_let_go_and_a_later_registration_is_told_at_once() -> None:
    pair = Pair()
    pair.offer()
    pair.seal()
    pair.finish()
    pair.pass_time(31)
    assert pair.freed == ["p"]
    pair.receive()
    pair.flush()
    assert pair.reports == [("d", Reason.GONE)]


def test_only_the_count_of_arrivals_completes_a_delivery() -> None:
    """F35, guarantee 10: the sender's own completion proves nothing."""
    pair = Pair()
    pair.offer()
    pair.seal()
    pair.receive()
    pair.flush()
    pair.land(writes=2)
    pair.written()
    pair.flush()
    assert pair.reports == []
    pair.pass_time(125)
    assert pair.reports == [("d", Reason.TIMEOUT)]
    assert pair.drops, "it says that three were written and two have come: only a fence makes that quiet"


def test_arrivals_before_commit() -> None:
    pair = Pair()
    pair.offer()
    pair.seal()
    pair.receive()
    pair.at_sender(pair.to_sender.popleft())
    pair.land()
    pair.written()
    assert pair.reports == []
    pair.flush()
    assert pair.reports == [("d", None)]


def test_stale_epoch_is_never_credited() -> None:
    pair = Pair()
    pair.offer()
    pair.receive()
    pair.flush()
    for wrong in (Commit(0, 9, 1, 100), Commit(5, 1, 1, 100), Fail(0, 0, 0, 0, Reason.GONE, "")):
        pair.at_receiver(wrong)
    assert pair.reports == []
    assert pair.events == ["stale_message"] * 3


@pytest.mark.parametrize("tokens", [99, 101, 0])
def test_commit_of_another_number_of_tokens_ends_the_peer(tokens: int) -> None:
    pair = Pair()
    pair.offer()
    pair.receive()
    pair.flush()
    pair.at_receiver(Commit(0, 1, 3, tokens))
    assert pair.drops
    assert pair.reports == [("d", Reason.PEER_LOST)]


# What the sender refuses.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start_token": 100}, Reason.BAD_RANGE),
        ({"start_token": -32}, Reason.BAD_RANGE),
        ({"start_token": 5}, Reason.BAD_RANGE),
        ({"blocks": ()}, Reason.BAD_BLOCKS),
        ({"blocks": (packed(1, 2, 3, 4), packed(5, 6, 7, 8))}, Reason.BAD_BLOCKS),
        ({"blocks": (packed(1, 2, 3),)}, Reason.BAD_BLOCKS),
        ({"blocks": (packed(1, 2, 3, 4)[:-1],)}, Reason.BAD_BLOCKS),
        ({"blocks": (packed(1, 2, 3, 3),)}, Reason.BAD_BLOCKS),
        ({"blocks": (packed(1, 2, 3, 64),)}, Reason.BAD_BLOCKS),
        ({"blocks": (packed(1, 2, 3, (1 << 32) - 1),)}, Reason.BAD_BLOCKS),
        ({"end_content": b"x" * 16}, Reason.CONTENT_MISMATCH),
        ({"start_content": b""}, Reason.CONTENT_MISMATCH),
        ({"end_token": 97}, Reason.CONTENT_MISMATCH),
        ({"end_token": 128}, Reason.CONTENT_MISMATCH),
    ],
)
def test_bad_registration_is_rejected_and_hurts_nobody_else(change: dict[str, object], reason: Reason) -> None:
    """F19: foreign blocks, ranges and contents amid good traffic."""
    pair = Pair()
    pair.offer()
    pair.seal()
    pair.receive("good")
    good = pair.to_sender.popleft()
    assert isinstance(good, Register)
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | {"slot": 9} | change
    bad = Register(**fields)
    pair.at_sender(bad)
    answer = pair.to_receiver.pop()
    assert (type(answer).__name__, getattr(answer, "reason", None)) == ("Rejected", reason)
    pair.to_sender.append(good)
    pair.push()
    assert pair.reports == [("good", None)]


def test_prompts_of_equal_transfer_and_other_content_are_never_paired() -> None:
    pair = Pair()
    pair.offer()
    pair.seal()
    pair.receive(first=2)
    pair.flush()
    assert pair.reports == [("d", Reason.CONTENT_MISMATCH)]
    assert not pair.tickets


def test_batch_of_prompts_under_one_transfer() -> None:
    """Two prompts, two receivers, each gets its own, though the second prompt appears late."""
    pair = Pair()
    pair.sender(pair.outbound.offer(Offer("p1", "t", content(100, 1), 2), pair.now))
    pair.receive("d2", first=2)
    pair.receive("d1", first=1)
    pair.flush()
    pair.sender(pair.outbound.offer(Offer("p2", "t", content(100, 2), 2), pair.now))
    for request in ("p1", "p2"):
        pair.seal(request)
    pair.flush()
    for ticket in list(pair.tickets):
        pair.land(ticket)
        pair.written(ticket)
    pair.flush()
    assert sorted(pair.reports) == [("d1", None), ("d2", None)]


def test_pairing_by_content_takes_the_oldest_with_the_fewest_deliveries() -> None:
    """An old proxy names no transfer. Equal contents are served one each, whatever their transfer ids."""
    pair = Pair()
    pair.offer("p1", "")
    pair.offer("p2", "some")
    pair.seal("p1")
    pair.seal("p2")
    pair.receive("d1", "")
    pair.receive("d2", "")
    pair.push()
    pair.land()
    pair.written()
    pair.flush()
    assert pair.reports == [("d2", None), ("d1", None)]
    for request in ("p1", "p2"):
        pair.finish(request)
    pair.pass_time(2)
    assert sorted(pair.freed) == ["p1", "p2"], "each had one delivery"


def test_retry_is_a_new_transfer() -> None:
    """F6: the first leg is lost; a retry with the same prompt and another id gets its own blocks and count."""
    pair = Pair()
    pair.receive("first", "t1")
    pair.receive("again", "t2")
    pair.flush()
    pair.offer("p2", "t2")
    pair.seal("p2")
    pair.push()
    assert pair.reports == [("again", None)]
    pair.pass_time(11)
    assert pair.reports == [("again", None), ("first", Reason.UNKNOWN_SOURCE)]
    pair.finish("p2")
    pair.pass_time(2)
    assert pair.quiet()
    assert pair.outbound.sources == []


# Patience with a sender that does not know the source.


def test_unknown_source_fails_after_the_patience_of_an_idle_sender() -> None:
    pair = Pair()
    pair.receive()
    pair.pass_time(9.5)
    assert pair.reports == []
    pair.pass_time(1)
    assert pair.reports == [("d", Reason.UNKNOWN_SOURCE)]
    assert pair.quiet()


def test_long_step_is_no_fault_of_the_request() -> None:
    """Requests enter vLLM between steps; a step of half a minute must not fail those that wait for its end."""
    pair = Pair()
    pair.outbound.begin_step()
    pair.receive()
    pair.pass_time(30)
    assert pair.reports == []
    pair.outbound.end_step()
    pair.outbound.begin_step()
    pair.pass_time(5)
    assert pair.reports == []
    pair.offer()
    pair.outbound.end_step()
    pair.seal()
    pair.push()
    assert pair.reports == [("d", None)]


def test_long_queue_at_the_sender_with_steps_going_on() -> None:
    """A receiver's deadline is for a sender without progress, not for a slow one."""
    pair = Pair()
    pair.offer()
    pair.receive()
    for _ in range(60):
        pair.outbound.begin_step()
        pair.outbound.end_step()
        pair.pass_time(10)
    assert pair.reports == []
    pair.pass_time(130)
    assert pair.reports == [("d", Reason.TIMEOUT)]
