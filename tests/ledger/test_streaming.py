"""KV that moves while prefill goes on: what is pushed when, and what comes of it when a side changes its mind."""

from __future__ import annotations

import numpy as np
import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Group
from neuron_pushkv.ledger.registration import Receiver
from neuron_pushkv.ledger.tracks import tracks
from neuron_pushkv.orders import Ready
from neuron_pushkv.wire import Commit, Register

from .pair import BLOCK, BLOCKS, Pair, packed, sources, targets

TOKENS = 8 * BLOCK + 5
TABLE = tuple(range(20, 29))


def advance(pair: Pair, tokens: int, table: tuple[int, ...] = TABLE) -> None:
    """The sender has computed that many tokens of its prompt."""
    order = Ready("p", tokens, (table[: -(-tokens // BLOCK)],))
    pair.sender(pair.outbound.advance(order, pair.now))


def waiting() -> Pair:
    """A long prompt is offered, and its receiver has registered."""
    pair = Pair()
    pair.offer(tokens=TOKENS)
    pair.receive(end=TOKENS)
    pair.flush()
    return pair


def pushed(pair: Pair) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(sources(write), targets(write)) for write in pair.all_writes.values()]


def land_and_write(pair: Pair) -> None:
    for ticket in sorted(pair.tickets):
        pair.land(ticket)
        pair.written(ticket)
    pair.flush()


def test_each_step_pushes_the_blocks_that_it_fills() -> None:
    """Chunks of 50 tokens don't divide blocks of 32: a block moves with the step that fills it, the last one partly."""
    pair = waiting()
    done = 0
    for tokens in (50, 100, 150, 200, 250, TOKENS):
        advance(pair, tokens)
        full = tokens // BLOCK if tokens < TOKENS else 9
        assert pushed(pair)[-1] == (TABLE[done:full], tuple(range(10 + done, 10 + full)))
        done = full
        assert [type(message).__name__ for message in pair.to_receiver] == (["Commit"] if tokens == TOKENS else [])
        land_and_write(pair)
        assert pair.reports == ([("d", None)] if tokens == TOKENS else [])
    assert len(pair.all_writes) == 6
    pair.finish()
    pair.pass_time(2)
    assert pair.quiet()


def test_step_that_fills_no_block_pushes_nothing() -> None:
    pair = waiting()
    for tokens in (10, 20, BLOCK - 1):
        advance(pair, tokens)
    assert pushed(pair) == []
    advance(pair, BLOCK)
    assert pushed(pair) == [(TABLE[:1], (10,))]


def test_late_registration_gets_all_that_is_ready_at_once() -> None:
    pair = Pair()
    pair.offer(tokens=TOKENS)
    advance(pair, 100)
    advance(pair, 200)
    pair.receive(end=TOKENS)
    pair.flush()
    assert pushed(pair) == [(TABLE[:6], tuple(range(10, 16)))]
    advance(pair, TOKENS)
    assert pushed(pair)[1:] == [(TABLE[6:], tuple(range(16, 19)))]


def test_prefix_hit_beyond_what_is_computed_waits_for_it() -> None:
    pair = Pair()
    pair.offer(tokens=TOKENS)
    pair.receive(start=4 * BLOCK, end=TOKENS)
    pair.flush()
    advance(pair, 3 * BLOCK)
    assert pushed(pair) == []
    advance(pair, 6 * BLOCK)
    assert pushed(pair) == [(TABLE[4:6], (10, 11))]
    advance(pair, TOKENS)
    assert pushed(pair)[1:] == [(TABLE[6:], (12, 13, 14))]


def test_commit_counts_the_writes_of_all_steps() -> None:
    pair = waiting()
    advance(pair, 100)
    pair.land()
    pair.written()
    advance(pair, TOKENS)
    (commit,) = pair.to_receiver
    assert commit == Commit(0, 1, 2 * pair.writes, TOKENS)


def test_preempted_in_the_middle_goes_on_where_it_was() -> None:
    """Guarantee 9: what was cut off is pushed again from the new blocks, what had arrived is not."""
    pair = waiting()
    advance(pair, 2 * BLOCK)
    land_and_write(pair)
    advance(pair, 4 * BLOCK)
    pair.sender(pair.outbound.drain("p"))
    assert pair.outbound.reading("p")
    pair.failed(written=1)
    assert not pair.outbound.reading("p")
    other = tuple(range(40, 49))
    for tokens in (BLOCK, 2 * BLOCK):
        advance(pair, tokens, other)
    assert len(pair.all_writes) == 2, "those two blocks are there"
    advance(pair, TOKENS, other)
    assert pushed(pair)[2:] == [(other[2:], tuple(range(12, 19)))]
    (commit,) = pair.to_receiver
    assert isinstance(commit, Commit)
    assert commit.writes == 3 + 1 + 3, "whatever arrives is counted, also what is pushed twice"
    land_and_write(pair)
    assert pair.reports == [("d", None)]


def test_registration_while_the_sender_is_preempted_waits() -> None:
    pair = Pair()
    pair.offer(tokens=TOKENS)
    advance(pair, 100)
    pair.receive("d1", end=TOKENS)
    pair.flush()
    pair.sender(pair.outbound.drain("p"))
    pair.receive("d2", end=TOKENS)
    pair.flush()
    assert len(pair.all_writes) == 1, "its blocks are vLLM's again, though a write still has to end"


@pytest.mark.parametrize("landed", [0, 1, 3])
def test_prefill_that_ends_in_the_middle(landed: int) -> None:
    """The receiver hears how many writes there were, and waits for the last of them before it gives its blocks back."""
    pair = waiting()
    advance(pair, 100)
    pair.land(writes=landed)
    pair.written()
    pair.finish(kept=False)
    pair.flush()
    assert pair.reports == ([("d", Reason.PREFILL_FAILED)] if landed == 3 else [])
    pair.land_rest()
    assert pair.reports == [("d", Reason.PREFILL_FAILED)]
    assert not pair.drops
    assert pair.quiet()


def test_write_that_fails_in_the_middle_ends_the_others_first() -> None:
    pair = waiting()
    advance(pair, 100)
    advance(pair, 200)
    pair.failed(written=0)
    assert pair.cancelled_tickets == [1]
    assert not pair.to_receiver, "a ticket is open, so nothing can be said of it"
    pair.land(1, 2)
    del pair.tickets[1]
    pair.sender(pair.outbound.ticket_failed(1, 2, 0, "cancelled", pair.now))
    pair.flush()
    assert pair.reports == [("d", Reason.WRITE_FAILED)]
    assert not pair.drops


def test_abort_between_two_steps() -> None:
    pair = waiting()
    advance(pair, 100)
    land_and_write(pair)
    pair.receiver(pair.inbound.withdraw("d", pair.now))
    pair.flush()
    assert pair.reports == [("d", Reason.ABORTED)]
    advance(pair, TOKENS)
    assert len(pair.all_writes) == 1, "nothing is pushed after CANCELLED"


def test_two_receivers_of_one_stream() -> None:
    """The second one comes in the middle, and the first one leaves: each gets what it asked for, or an end."""
    pair = Pair()
    pair.offer(tokens=TOKENS, deliveries=2)
    pair.receive("d1", end=TOKENS)
    pair.flush()
    advance(pair, 100)
    pair.receive("d2", end=TOKENS)
    pair.flush()
    pair.receiver(pair.inbound.withdraw("d1", pair.now))
    pair.flush()
    land_and_write(pair)
    advance(pair, TOKENS)
    land_and_write(pair)
    assert pair.reports == [("d1", Reason.ABORTED), ("d2", None)]


def test_window_in_larger_blocks_needs_no_more_than_a_sender_keeps() -> None:
    """The receiver's block begins with tokens that its window doesn't see any more; the sender has let go of them."""
    register = Register("t", 1, 1, 0, 150, b"", b"", (packed(7, 8),))
    receiver = Receiver(BLOCKS, (Group(2 * BLOCK, window=40),), (BLOCK,), (np.array([7, 8], dtype=np.uint32),))
    (track,) = tracks(register, receiver)
    assert (track.first, track.next, track.end) == (96, 96, 150)
    (move,) = track.moves([(-1, -1, -1, 3, 4)], receiver, 150)
    assert (move.first, move.target_start) == (96, 64)
