"""Whole engines: KV arrives as prefill goes, and is right whatever happens in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from neuron_pushkv.orders import Ready, StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.faults import FaultyTransport

from .sides import BLOCK_SIZE, BLOCKS, DEADLINE, Side, until

NewSide = Callable[..., Side]
SOURCE = [9, 8, 7, 20, 21, 30, 2, 3]
OTHER = [50, 51, 53, 52, 60, 61, 62, 70]
TARGET = [40, 3, 5, 6, 4, 90, 91, 92]
TOKENS = 8 * BLOCK_SIZE - 3


def compute(sender: Side, tokens: int, blocks: list[int]) -> None:
    """A prefill step: fill the blocks up to there, then say so."""
    used = blocks[: -(-tokens // BLOCK_SIZE)]
    sender.fill(1, used)
    sender.advance("p", tokens, used)


def arrived(receiver: Side) -> int:
    """How many of the target's blocks have come, in order."""
    for count in range(len(TARGET), -1, -1):
        if receiver.holds(1, TARGET[:count]):
            return count
    return 0


@pytest.mark.parametrize("chunk", [7, 16, 40, 64])
def test_blocks_arrive_with_the_step_that_fills_them(sender: Side, receiver: Side, chunk: int) -> None:
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    for tokens in range(chunk, TOKENS, chunk):
        compute(sender, tokens, SOURCE)
        until(lambda full=tokens // BLOCK_SIZE: arrived(receiver) == full, f"{tokens} tokens' full blocks")
        receiver.step()
        assert receiver.finished == []
    compute(sender, TOKENS, SOURCE)
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    assert receiver.others_blank(TARGET)
    assert receiver.stats["bytes"] == {"in": 8 * 4 * 512}


def test_prefix_hits_arrive_before_the_step_ends(sender: Side, receiver: Side) -> None:
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    sender.fill(1, SOURCE[:5])
    sender.engine.begin_step(StepOrders(cached=(Ready("p", 5 * BLOCK_SIZE, (tuple(SOURCE[:5]),)),)))
    until(lambda: arrived(receiver) == 5, "all prefix hits")
    sender.fill(1, SOURCE)
    sender.engine.advance((Ready("p", TOKENS, (tuple(SOURCE),)),))
    sender.engine.end_step()
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    assert receiver.stats["bytes"] == {"in": 8 * 4 * 512}


def test_waiting_for_results_ends_with_the_first_of_them(sender: Side, receiver: Side) -> None:
    assert receiver.engine.take_results(patience=0.01).finished == frozenset()
    sender.prefill("p", 1, TOKENS, SOURCE)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    assert "d" in {*receiver.finished, *receiver.engine.take_results(patience=DEADLINE).finished}


def test_two_thirds_computed_when_the_receiver_comes(sender: Side, receiver: Side) -> None:
    sender.offer("p", 1, TOKENS)
    compute(sender, 40, SOURCE)
    compute(sender, 80, SOURCE)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: arrived(receiver) == 5, "all that was ready")
    compute(sender, TOKENS, SOURCE)
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)


def test_preempted_in_the_middle(new_side: NewSide, new_transport: Callable[[], Transport]) -> None:
    """F28: the blocks are taken back under a write and overwritten; recomputed elsewhere, the prompt arrives whole."""
    sender, receiver = new_side("sender", transport=FaultyTransport(new_transport(), delay=0.2)), new_side("receiver")
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    compute(sender, 50, SOURCE)
    before = time.monotonic()
    sender.step(StepOrders(preempted=("p",)))
    assert time.monotonic() - before < 1.0
    sender.fill(99, SOURCE)
    for tokens in (50, 100, TOKENS):
        compute(sender, tokens, OTHER)
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    assert receiver.others_blank(TARGET)


def test_prefill_that_ends_in_the_middle(sender: Side, receiver: Side) -> None:
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    compute(sender, 80, SOURCE)
    sender.finish("p", kept=False)
    assert not receiver.await_report("d", 2.0)
    receiver.fill(98, TARGET)
    sender.fill(99, list(range(BLOCKS)))
    time.sleep(0.1)
    assert receiver.holds(98, TARGET)


def test_what_is_open_shows_in_gauges(sender: Side, receiver: Side) -> None:
    def gauges(side: Side) -> dict[str, float]:
        return {name: value for name, by_rank in side.gauges.items() for value in by_rank.values()}

    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    for side in (sender, receiver):
        side.step()
    assert (gauges(sender)["open_sends"], gauges(receiver)["open_receives"]) == (1, 1)
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    assert receiver.await_report("d")
    until(lambda: (sender.step(), gauges(sender)["open_sends"] == 0)[1], "the end of the delivery")
    receiver.step()
    assert gauges(receiver)["open_receives"] == 0
