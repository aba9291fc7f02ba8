"""Whole engines, real control connections: bytes end where they belong, and vLLM hears of it once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.faults import FaultyTransport

from .conftest import free_port
from .sides import BLOCK_BYTES, LAYERS, Side, order, until

NewSide = Callable[..., Side]


def test_push_to_a_waiting_receiver(sender: Side, receiver: Side) -> None:
    source, target = [9, 8, 7, 20, 21], [40, 3, 5, 6, 4]
    sender.offer("p", 1, 75)
    receiver.receive("d", 1, 75, target, sender)
    sender.seal("p", 1, source)
    assert receiver.await_report("d")
    assert receiver.holds(1, target)
    assert receiver.others_blank(target)
    assert receiver.stats["bytes"]["in"] == 5 * LAYERS * BLOCK_BYTES
    assert receiver.stats["tokens"]["in"] == 75
    sender.finish("p")
    until(lambda: (sender.step(), sender.freed)[1] == ["p"], "letting go of the source")
    until(lambda: sender.stats.get("transfers") == {"out:completed": 1}, "the sender's account")
    assert sender.stats["bytes"]["out"] == receiver.stats["bytes"]["in"]
    assert sender.stats["writes"]["out"] == receiver.stats["writes"]["in"]


def test_registration_long_after_prefill_reaches_a_sleeping_engine(sender: Side, receiver: Side) -> None:
    """F18: the sender's engine makes no further step; its worker serves the registration alone."""
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    sender.finish("p")
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    assert receiver.await_report("d")
    assert receiver.holds(1, [11, 12, 13, 14])


def test_prefix_hit_moves_only_the_tail(sender: Side, receiver: Side) -> None:
    sender.prefill("p", 1, 70, [1, 2, 3, 4, 5])
    receiver.receive("d", 1, 70, [30, 31], sender, start=48)
    assert receiver.await_report("d")
    assert receiver.holds(1, [30, 31], first=3)
    assert receiver.others_blank([30, 31])


def test_many_requests_both_ways_in_random_order(sender: Side, receiver: Side) -> None:
    """F11: each engine sends and receives at the same time; every block holds its own prompt's bytes."""
    chance = random.Random(5)
    blocks = {side.name: random.Random(7).sample(range(128), 120) for side in (sender, receiver)}
    taken = {"sender": 0, "receiver": 0}

    def take(side: Side, count: int) -> list[int]:
        first = taken[side.name]
        taken[side.name] += count
        return blocks[side.name][first : first + count]

    expected: list[tuple[Side, str, int, list[int]]] = []
    actions: list[Callable[[], None]] = []
    for prompt in range(1, 21):
        here, there = (sender, receiver) if prompt % 2 else (receiver, sender)
        tokens = chance.randrange(1, 90)
        count = -(-tokens // 16)
        source, target = take(here, count), take(there, count)
        name = f"r{prompt}"
        expected.append((there, name, prompt, target))
        actions.append(
            lambda here=here, name=name, prompt=prompt, tokens=tokens, source=source: here.prefill(
                f"{name}-p", prompt, tokens, source, name
            )
        )
        actions.append(
            lambda here=here, there=there, name=name, prompt=prompt, tokens=tokens, target=target: there.receive(
                name, prompt, tokens, target, here, name
            )
        )
    chance.shuffle(actions)
    for action in actions:
        action()
    for side, name, prompt, target in expected:
        assert side.await_report(name), name
        assert side.holds(prompt, target), name
    for side in (sender, receiver):
        assert side.stats["transfers"]["in:completed"] == 10


# F1, F7: the receiver's engine aborts.


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.005, 0.05])
@pytest.mark.parametrize("sealed", [False, True])
def test_abort_while_waiting(sender: Side, receiver: Side, delay: float, sealed: bool) -> None:
    """Whatever stage the transfer is in, one report follows, and nothing is written after it."""
    sender.offer("p", 1, 64)
    if sealed:
        sender.seal("p", 1, [1, 2, 3, 4])
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    time.sleep(delay)
    receiver.withdraw("d")
    receiver.await_report("d")
    receiver.fill(99, [11, 12, 13, 14])  # The blocks belong to another request now.
    if not sealed:
        sender.seal("p", 1, [1, 2, 3, 4])
    receiver.receive("next", 2, 32, [21, 22], sender, "u")
    sender.prefill("q", 2, 32, [5, 6], "u")
    assert receiver.await_report("next")
    assert receiver.holds(99, [11, 12, 13, 14])
    assert receiver.holds(2, [21, 22])
    for request in ("p", "q"):
        sender.finish(request)


def test_abort_repeated_unknown_and_late(sender: Side, receiver: Side) -> None:
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    assert receiver.await_report("d")
    for request in ("d", "d", "never heard of"):
        receiver.withdraw(request)
    for _ in range(5):
        receiver.step()
    assert receiver.finished == ["d"]


# F3: a post fails.


@pytest.mark.parametrize("blocks", [[1], [1, 3, 5, 7]])
def test_failing_write_is_told_within_a_second_and_harms_nobody(
    new_side: NewSide, new_transport: Callable[[], Transport], blocks: list[int]
) -> None:
    """The first write fails, or the third of four."""
    faulty = FaultyTransport(new_transport(), fail_batches={0})
    sender, receiver = new_side("sender", transport=faulty), new_side("receiver")
    tokens, first, second = 16 * len(blocks), [11, 12, 13, 14][: len(blocks)], [21, 22, 23, 24][: len(blocks)]
    sender.prefill("p", 1, tokens, blocks)
    before = time.monotonic()
    receiver.receive("d", 1, tokens, first, sender)
    assert not receiver.await_report("d")
    assert time.monotonic() - before < 1.0
    assert receiver.stats["transfers"] == {f"in:failed:{Reason.WRITE_FAILED}": 1}
    receiver.fill(99, first)
    receiver.receive("again", 1, tokens, second, sender)
    assert receiver.await_report("again")
    assert receiver.holds(1, second)
    assert receiver.holds(99, first)


# F5: the sender says no.


def test_prefill_that_fails(sender: Side, receiver: Side) -> None:
    sender.offer("p", 1, 64)
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    sender.finish("p", kept=False)
    assert not receiver.await_report("d", 1.0)
    assert receiver.blank([11, 12, 13, 14])
    assert receiver.stats["transfers"] == {f"in:failed:{Reason.PREFILL_FAILED}": 1}


def test_nobody_listens(receiver: Side, sender: Side) -> None:
    """An unreachable peer fails in bounded time, and the next transfer is not delayed by it."""
    dead = sender.settings.model_copy(update={"port": free_port()})
    before = time.monotonic()
    receiver.step(StepOrders(receives=(order("d", 1, 64, [11, 12, 13, 14], dead, "t"),)))
    sender.prefill("q", 2, 32, [5, 6], "u")
    receiver.receive("good", 2, 32, [21, 22], sender, "u")
    assert receiver.await_report("good", 1.0)
    assert not receiver.await_report("d", 5.0)
    assert time.monotonic() - before < 4.0
    assert receiver.stats["transfers"] == {"in:completed": 1, f"in:failed:{Reason.UNREACHABLE}": 1}


def test_unknown_source(new_side: NewSide, receiver: Side) -> None:
    sender = new_side("sender", unknown_source_seconds=0.5)
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    assert not receiver.await_report("d", 3.0)
    assert receiver.stats["transfers"] == {f"in:failed:{Reason.UNKNOWN_SOURCE}": 1}


# F15: engines that don't fit are refused at connect, in words.


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"model": "another-model"}, Reason.MODEL_MISMATCH), ({"layout": "other-kernel"}, Reason.LAYOUT_MISMATCH)],
)
def test_mismatch_is_refused_with_both_values(
    new_side: NewSide, receiver: Side, other: dict[str, str], reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    sender = new_side("sender", **other)
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    assert not receiver.await_report("d")
    assert receiver.blank([11, 12, 13, 14])
    assert receiver.stats["transfers"] == {f"in:failed:{reason}": 1}
    (value,) = other.values()
    said = until(
        lambda: [line for line in (record.getMessage() for record in caplog.records) if "request=d " in line],
        "a line about it",
    )
    assert len(said) == 1
    assert value in said[0]
    assert ("test-model" if reason is Reason.MODEL_MISMATCH else "test") in said[0]


# Restart under the same name and port.


def test_restarted_sender_is_found_again(new_side: NewSide, receiver: Side) -> None:
    port = free_port()
    for round_ in range(1, 4):
        sender = new_side("sender", port=port)
        sender.prefill("p", round_, 64, [1, 2, 3, 4])
        target = [10 * round_ + index for index in range(4)]
        receiver.receive(f"d{round_}", round_, 64, target, sender)
        assert receiver.await_report(f"d{round_}")
        assert receiver.holds(round_, target)
        sender.close()


# Taking back memory.


def test_preempted_source_is_not_read_any_more(new_side: NewSide, new_transport: Callable[[], Transport]) -> None:
    """Guarantee 9: the blocks are overwritten at once; the receiver gets the old bytes or a failure, no mixture."""
    sender, receiver = new_side("sender", transport=FaultyTransport(new_transport(), delay=0.3)), new_side("receiver")
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    until(lambda: sender.engine._outbound.reading("p"), "the write")
    before = time.monotonic()
    sender.step(StepOrders(preempted=("p",)))
    assert time.monotonic() - before < 1.0
    sender.fill(99, [1, 2, 3, 4])
    if receiver.await_report("d"):
        assert receiver.holds(1, [11, 12, 13, 14])
    receiver.fill(98, [11, 12, 13, 14])
    time.sleep(0.5)
    assert receiver.holds(98, [11, 12, 13, 14])
    sender.prefill("q", 2, 32, [5, 6], "u")
    receiver.receive("next", 2, 32, [21, 22], sender, "u")
    assert receiver.await_report("next")
    assert receiver.holds(2, [21, 22])


def test_source_is_not_freed_under_a_write(new_side: NewSide, new_transport: Callable[[], Transport]) -> None:
    """F2: the write is slower than every lease; the blocks stay until it has ended."""
    sender = new_side(
        "sender",
        transport=FaultyTransport(new_transport(), delay=0.6),
        keep_unclaimed_seconds=0.1,
        keep_delivered_seconds=0,
    )
    receiver = new_side("receiver")
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    until(lambda: sender.engine._outbound.reading("p"), "the write")
    sender.finish("p")
    while sender.engine._outbound.reading("p"):
        sender.step()
        assert sender.freed == [] or not sender.engine._outbound.reading("p")
        time.sleep(0.01)
    assert receiver.await_report("d")
    assert receiver.holds(1, [11, 12, 13, 14])
    until(lambda: (sender.step(), sender.freed)[1] == ["p"], "letting go of the source")


def test_closing_an_engine_tells_its_peers_at_once(sender: Side, receiver: Side) -> None:
    sender.offer("p", 1, 64)
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    sender.close()
    assert not receiver.await_report("d", 1.0)
    sender.close()
