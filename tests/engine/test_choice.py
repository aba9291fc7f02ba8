"""A receiver may be chosen before, during or after prefill: what is kept for it, how long, and who may replace it."""

from __future__ import annotations

import time

import pytest

from neuron_pushkv.orders import Ready, StepOrders
from tests.engine.conftest import NewEngine
from tests.engine.ranks import Engine, ranks, table
from tests.engine.sides import until

TOKENS = 75
SOURCE, TARGET = table(TOKENS, 16, 1), table(TOKENS, 16, 2)


def computed(sender: Engine) -> None:
    sender.offer("p", 1, TOKENS)
    sender.compute("p", 1, TOKENS, [SOURCE])
    sender.finish("p")


def known(sender: Engine, deliveries: int = 1) -> None:
    until(lambda: all(len(one._outbound) == deliveries for one in sender.ranks.values()), "what the receiver says")


def pause(engine: Engine, seconds: float) -> None:
    """Steps that find nothing to do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.step()
        time.sleep(0.02)


# F4: a long queue at the receiver.


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_intended_for_is_kept_while_its_receiver_lives(new_engine: NewEngine, when: str) -> None:
    sender = new_engine("sender", ranks(2, heads=4), keep_unclaimed_seconds=0.3)
    receiver = new_engine("receiver", ranks(1, heads=4))
    if when == "before":
        receiver.intend("d", 1, TOKENS, sender)
        known(sender)
    computed(sender)
    if when == "after":
        receiver.intend("d", 1, TOKENS, sender)
        known(sender)
    pause(sender, 1.0)
    assert sender.freed == []
    receiver.receive("d", 1, TOKENS, [TARGET], sender)
    assert receiver.received("d")
    receiver.check(1, 0, TOKENS, [TARGET])


def test_what_is_intended_for_returns_at_once_when_its_receiver_dies(new_engine: NewEngine) -> None:
    sender = new_engine("sender", ranks(2, heads=4), keep_unclaimed_seconds=0.3)
    receiver = new_engine("receiver", ranks(1, heads=4))
    computed(sender)
    receiver.intend("d", 1, TOKENS, sender)
    known(sender)
    receiver.close()
    until(lambda: (sender.step(), sender.freed == ["p"])[1], "the sender's blocks", 2.0)


def test_intent_that_is_withdrawn_is_never_reported(new_engine: NewEngine) -> None:
    sender = new_engine("sender", ranks(1), keep_unclaimed_seconds=0.3)
    receiver = new_engine("receiver", ranks(1))
    computed(sender)
    receiver.intend("d", 1, TOKENS, sender)
    known(sender)
    receiver.step(StepOrders(withdrawn=("d",)))
    until(lambda: (sender.step(), sender.freed == ["p"])[1], "the sender's blocks", 2.0)
    receiver.step()
    assert receiver.reports == {}
    assert all(len(one._inbound) == 0 for one in receiver.ranks.values())


def test_intent_whose_sender_is_gone_finds_it_again(new_engine: NewEngine) -> None:
    """Nothing was promised to vLLM yet: the request starts over, and is served by the sender's next process."""
    sender = new_engine("sender", ranks(1))
    receiver = new_engine("receiver", ranks(1))
    receiver.intend("d", 1, TOKENS, sender)
    known(sender)
    port = sender.settings.port
    sender.close()
    until(lambda: all(len(one._inbound) == 0 for one in receiver.ranks.values()), "the end of the intent")
    again = new_engine("sender", ranks(1), port=port)
    computed(again)
    receiver.receive("d", 1, TOKENS, [TARGET], again)
    assert receiver.received("d")
    receiver.check(1, 0, TOKENS, [TARGET])


# F9: nobody will ask.


@pytest.mark.parametrize("when", ["after", "during", "before"])
def test_released_transfer_is_let_go_at_once(new_engine: NewEngine, when: str) -> None:
    """A receiver that rejects the request says so, whether its sender has computed the prompt, or not even heard."""
    sender, receiver = new_engine("sender", ranks(2, heads=4)), new_engine("receiver", ranks(1, heads=4))
    receiver.intend("other", 2, 16, sender, "u")
    known(sender)
    if when == "before":
        receiver.release(sender)
        receiver.step(StepOrders(withdrawn=("other",)))  # Over the same connection, so heard after it.
        known(sender, 0)
    sender.offer("p", 1, TOKENS)
    if when == "during":
        receiver.release(sender)
    sender.compute("p", 1, TOKENS, [SOURCE])
    sender.finish("p")
    if when == "after":
        receiver.release(sender)
    until(lambda: (sender.step(), sender.freed == ["p"])[1], "the sender's blocks", 1.0)


# The cap on what is kept.


def test_evicted_prompt_is_gone_for_who_only_meant_to_ask(new_engine: NewEngine) -> None:
    sender, receiver = new_engine("sender", ranks(1)), new_engine("receiver", ranks(1))
    computed(sender)
    receiver.intend("d", 1, TOKENS, sender)
    known(sender)
    sender.step(StepOrders(evicted=("p",)))
    until(lambda: (sender.step(), sender.freed == ["p"])[1], "the sender's blocks", 1.0)
    receiver.receive("d", 1, TOKENS, [TARGET], sender)
    assert not receiver.received("d", 2.0)


# Another receiver.


def test_receiver_that_gives_up_is_replaced(new_engine: NewEngine) -> None:
    sender = new_engine("sender", ranks(2, heads=4))
    first, second = new_engine("first", ranks(1, heads=4)), new_engine("second", ranks(4, heads=4))
    sender.offer("p", 1, TOKENS)
    first.receive("d", 1, TOKENS, [TARGET], sender)
    sender.compute("p", 1, TOKENS // 2, [SOURCE])
    first.step(StepOrders(withdrawn=("d",)))
    assert not first.received("d")
    sender.compute("p", 1, TOKENS, [SOURCE])
    sender.finish("p")
    second.receive("d", 1, TOKENS, [TARGET], sender)
    assert second.received("d")
    second.check(1, 0, TOKENS, [TARGET])


def test_siblings_of_unlike_sizes_are_all_served(new_engine: NewEngine) -> None:
    """n = 2: the KV is let go when both have it, however many ranks each of them is."""
    sender = new_engine("sender", ranks(1, heads=4))
    receivers = [new_engine("first", ranks(4, heads=4)), new_engine("second", ranks(2, heads=4))]
    sender.offer("p", 1, TOKENS, deliveries=2)
    sender.compute("p", 1, TOKENS, [SOURCE])
    sender.finish("p")
    receivers[0].receive("d", 1, TOKENS, [TARGET], sender)
    assert receivers[0].received("d")
    pause(sender, 1.5)
    assert sender.freed == [], "the other one has not asked yet"
    receivers[1].receive("d", 1, TOKENS, [TARGET], sender)
    assert receivers[1].received("d")
    until(lambda: (sender.step(), sender.freed == ["p"])[1], "the sender's blocks", 4.0)


# Layer by layer.


@pytest.mark.parametrize("called", [["layers.0", "layers.1"], ["layers.0"], []])
def test_layers_move_ahead_of_their_step(new_engine: NewEngine, called: list[str]) -> None:
    """Whichever layers vLLM's hook is called for: what it has not pushed, the step's end does, and all of it once."""
    sender, receiver = new_engine("sender", ranks(1, blocks=16)), new_engine("receiver", ranks(1, blocks=16))
    source = table(TOKENS, 16, 0, 2)
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, [TARGET], sender)
    known(sender)
    for done in (25, 51, TOKENS):
        sender.compute("p", 1, done, [source], layers=called)
    sender.finish("p")
    assert receiver.received("d")
    receiver.check(1, 0, TOKENS, [TARGET])
    until(lambda: (sender.step(), sender.freed == ["p"])[1], "its end at the sender", 4.0)
    assert sender.writes == 5 * 2 * 2, "blocks, layers, K and V"


def test_whoever_comes_between_two_layers_gets_both(new_engine: NewEngine) -> None:
    sender, receiver = new_engine("sender", ranks(1)), new_engine("receiver", ranks(1))
    other = new_engine("other", ranks(1))
    sender.offer("p", 1, TOKENS)
    other.receive("o", 1, TOKENS, [TARGET], sender)
    known(sender)
    (engine,) = sender.ranks.values()
    sender.fill(1, TOKENS, [SOURCE])
    ready = (Ready("p", TOKENS, (tuple(SOURCE),)),)
    engine.begin_step(StepOrders())
    engine.advance_layer("layers.0", ready)
    receiver.receive("d", 1, TOKENS, [TARGET], sender)
    known(sender, 2)
    engine.advance_layer("layers.1", ready)
    engine.advance(ready)
    engine.end_step()
    assert receiver.received("d")
    assert other.received("o")
    receiver.check(1, 0, TOKENS, [TARGET])
    other.check(1, 0, TOKENS, [TARGET])
