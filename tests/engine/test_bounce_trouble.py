"""The bounce path in trouble: blocks are taken back under it, requests are aborted, and the device fails."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable

import pytest

from neuron_pushkv.device.base import Copies
from neuron_pushkv.errors import DeviceError
from neuron_pushkv.orders import Finish, StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fates import Stall
from neuron_pushkv.transport.faults import FaultyTransport
from tests.engine.bouncing import FRAME, OTHER, SOURCE, TARGET, TOKENS, NewSide, blocks_of, compute, idle, logged, taken
from tests.engine.hidden import Gate, HiddenAccelerator
from tests.engine.sides import BLOCK_SIZE, until

# Blocks that are taken back.


@pytest.mark.parametrize("stage", ["computing", "copying", "writing"])
def test_preempted_in_the_middle(
    new_side: NewSide, new_transport: Callable[[], Transport], stepping: HiddenAccelerator, stage: str
) -> None:
    """Nobody waits for a copy or a write, though both stand still here; what they have read of the old blocks is
    either right or of no account."""
    transport, gate = FaultyTransport(new_transport(), delay=0.3), Gate()
    sender, receiver = new_side("sender", transport=transport, hidden=stepping), new_side("receiver")
    if stage == "copying":
        stepping.on_read = gate
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    compute(sender, 50, SOURCE)
    if stage != "computing":
        stepping.finish_step()
    if stage == "copying":
        assert gate.reached.wait(10)
    if stage == "writing":
        until(lambda: sender.engine._outbound._deliveries._by_ticket, "the write")
    sender.step(StepOrders(preempted=("p",)))
    sender.fill(99, SOURCE)
    if stage == "copying":
        assert taken(sender) == 3 * FRAME, "what is being written to is not given out again"
    if stage == "computing":
        stepping.finish_step()
    for tokens in (50, 100, TOKENS):
        compute(sender, tokens, OTHER)
        stepping.finish_step()
    gate.open()
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    assert receiver.others_blank(TARGET)
    idle(sender, receiver)


def test_what_has_been_copied_outlives_its_blocks(
    new_side: NewSide, new_transport: Callable[[], Transport], device: HiddenAccelerator
) -> None:
    """All of it is announced and its writes stand still when vLLM takes the blocks back: it arrives all the same."""
    stall = Stall()
    sender = new_side("sender", transport=FaultyTransport(new_transport(), stall), hidden=device)
    receiver = new_side("receiver")
    stall.begin()
    sender.prefill("p", 1, TOKENS, SOURCE)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: any(one.committed for one in sender.engine._outbound._deliveries), "COMMIT")
    sender.step(StepOrders(preempted=("p",)))
    sender.fill(99, SOURCE)
    stall.end()
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    idle(sender, receiver)


def test_abort_while_its_sender_copies(new_side: NewSide, device: HiddenAccelerator) -> None:
    """The receiver is told at once; the sender's room is free again when the copy has ended, not before."""
    sender, receiver = new_side("sender", hidden=device), new_side("receiver")
    device.on_read = gate = Gate()
    sender.prefill("p", 1, TOKENS, SOURCE)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    assert gate.reached.wait(10)
    receiver.withdraw("d")
    assert not receiver.await_report("d")
    until(lambda: not len(sender.engine._outbound), "the end of the delivery")
    assert taken(sender) == len(SOURCE) * FRAME
    gate.open()
    idle(sender, receiver)
    assert receiver.blank(TARGET)
    receiver.receive("e", 1, TOKENS, TARGET, sender)
    assert receiver.await_report("e")
    assert receiver.holds(1, TARGET)


def test_reported_when_the_device_has_it(new_side: NewSide, device: HiddenAccelerator) -> None:
    """Not before, whatever the ledger says; an abort meanwhile changes nothing."""
    sender, receiver = new_side("sender"), new_side("receiver", hidden=device)
    device.on_write = gate = Gate()
    sender.prefill("p", 1, TOKENS, SOURCE)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    assert gate.reached.wait(10)
    assert len(receiver.engine._inbound) == 0
    receiver.withdraw("d")
    assert receiver.finished == []
    gate.open()
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    idle(sender, receiver)


# The device fails.


def fail(copies: Copies) -> None:
    """As a device does whose runtime has been closed."""
    raise DeviceError("the device has been closed")


def break_down(copies: Copies) -> None:
    """As an accelerator does that has a bug."""
    raise RuntimeError("no such tensor")


@pytest.mark.parametrize("failure", [fail, break_down])
@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_copy_that_fails(
    new_side: NewSide,
    device: HiddenAccelerator,
    other: HiddenAccelerator,
    caplog: pytest.LogCaptureFixture,
    way: str,
    failure: Callable[[Copies], None],
) -> None:
    """That delivery fails with the reason; nothing else suffers, and all room is free again."""
    sender, receiver = new_side("sender", hidden=device), new_side("receiver", hidden=other)
    if way == "read":
        device.on_read = failure
    else:
        other.on_write = failure
    sender.prefill("p", 1, TOKENS, SOURCE)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    assert not receiver.await_report("d")
    line = logged(caplog, "d")
    assert "reason=device_failed" in line
    assert ("the device has been closed" if failure is fail else "no such tensor") in line
    assert receiver.blank(TARGET)
    device.on_read = other.on_write = lambda copies: None
    sender.prefill("q", 2, TOKENS, OTHER, "u")
    receiver.receive("e", 2, TOKENS, TARGET, sender, "u")
    assert receiver.await_report("e")
    assert receiver.holds(2, TARGET)
    idle(sender, receiver)


@pytest.mark.parametrize("when", ["under way", "at the next step"])
def test_step_that_never_ends(
    new_side: NewSide, stepping: HiddenAccelerator, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Whoever waits for KV that it was to compute hears so at once, and nothing is kept for anybody."""
    sender, receiver = new_side("sender", hidden=stepping), new_side("receiver")
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    if when == "under way":
        compute(sender, 50, SOURCE)
    stepping.failed = "the device is gone"
    if when == "at the next step":
        compute(sender, 50, SOURCE)
    assert not receiver.await_report("d")
    line = logged(caplog, "d")
    assert "reason=device_failed" in line
    assert "the device is gone" in line
    assert not sender.engine._steps, "nobody looks for its end any more"
    sender.step(StepOrders(finished=(Finish("p", kept=True),)))
    until(lambda: sender.engine._outbound.sources == [], "letting go of its blocks")
    idle(sender, receiver)


def failing(*numbers: int) -> Callable[[Copies], None]:
    """Copies with these numbers fail."""
    counted = itertools.count()

    def now_and_then(copies: Copies) -> None:
        if next(counted) in numbers:
            raise DeviceError("by chance")

    return now_and_then


@pytest.mark.parametrize("seed", range(3))
def test_random_failures(new_side: NewSide, device: HiddenAccelerator, other: HiddenAccelerator, seed: int) -> None:
    """Copies fail now and then, through little room: each transfer is right or has failed, and none is lost."""
    chance = random.Random(seed)
    device.on_read, other.on_write = failing(*chance.sample(range(40), 3)), failing(*chance.sample(range(8), 2))
    sender = new_side("sender", hidden=device, bounce_bytes=24 * FRAME)
    receiver = new_side("receiver", hidden=other, bounce_bytes=40 * FRAME)
    for number in range(16):
        sender.prefill(f"p{number}", number, 8 * BLOCK_SIZE, blocks_of(number), f"t{number}")
    for number in range(16):
        receiver.receive(f"d{number}", number, 8 * BLOCK_SIZE, blocks_of(15 - number), sender, f"t{number}")
    until(lambda: (receiver.step(), len(receiver.finished) == 16)[1], "all reports", 20)
    for number in range(16):
        if f"d{number}" not in receiver.failed:
            assert receiver.holds(number, blocks_of(15 - number))
    assert 2 <= len(receiver.failed) <= 5
    idle(sender, receiver)


def test_closing_during_a_copy(new_side: NewSide, device: HiddenAccelerator) -> None:
    """What is being copied is waited for, so that nothing touches the memory afterwards; the rest is left."""
    sender, receiver = new_side("sender", hidden=device), new_side("receiver")
    device.on_read = gate = Gate()
    sender.prefill("p", 1, TOKENS, SOURCE)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    assert gate.reached.wait(10)
    closing = threading.Thread(target=sender.close)
    closing.start()
    assert not receiver.await_report("d")
    assert closing.is_alive()
    gate.open()
    closing.join(10)
    assert not closing.is_alive()
    assert device.copied == len(SOURCE) * FRAME
    assert receiver.blank(TARGET)
