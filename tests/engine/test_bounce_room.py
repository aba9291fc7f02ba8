"""The bounce path with little room: who waits, for how long, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from neuron_pushkv.bounce.cache import StagingCache
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.orders import Intent, Remote, StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fates import Stall
from neuron_pushkv.transport.faults import FaultyTransport
from tests.engine.bouncing import FRAME, TOKENS, NewSide, blocks_of, crowd, idle, logged, taken
from tests.engine.hidden import Gate, HiddenAccelerator
from tests.engine.sides import BLOCK_SIZE, BLOCKS, content, until


def test_receives_take_turns(new_side: NewSide, device: HiddenAccelerator) -> None:
    """Room for one and a half: the others wait in order, and their sender keeps what they wait for."""
    sender = new_side("sender", keep_unclaimed_seconds=0.1)
    receiver = new_side("receiver", hidden=device, bounce_bytes=16 * FRAME)
    crowd(sender, receiver, 4)
    assert receiver.stats["events"] == {"receive_waits_for_staging": 3}
    for number in (3, 2, 1):
        until(lambda: len(sender.engine._outbound) == 4, "a registration and three intents")
        sender.seal(f"p{number}", number, blocks_of(number), TOKENS)
        sender.finish(f"p{number}")
        receiver.step()
        assert receiver.finished == []
    sender.seal("p0", 0, blocks_of(0), TOKENS)
    for number in range(4):
        assert f"d{number}" in receiver.finished or receiver.await_report(f"d{number}")
        assert receiver.holds(number, blocks_of(number))
    assert receiver.failed == []
    idle(sender, receiver)


def test_abort_while_it_waits_for_room(new_side: NewSide, device: HiddenAccelerator) -> None:
    """Told at once, its sender too; whoever is behind it moves up."""
    sender, receiver = new_side("sender"), new_side("receiver", hidden=device, bounce_bytes=16 * FRAME)
    crowd(sender, receiver, 3)
    until(lambda: len(sender.engine._outbound) == 3, "a registration and two intents")
    receiver.withdraw("d1")
    assert receiver.finished == receiver.failed == ["d1"]
    until(lambda: len(sender.engine._outbound) == 2, "the end of the intent")
    receiver.withdraw("d1")
    for number in (0, 2):
        sender.seal(f"p{number}", number, blocks_of(number), TOKENS)
    for number in (0, 2):
        assert f"d{number}" in receiver.finished or receiver.await_report(f"d{number}")
        assert receiver.holds(number, blocks_of(number))
    assert receiver.blank(blocks_of(1))
    idle(sender, receiver)


def test_abort_of_one_that_has_room_lets_the_next_one_in(new_side: NewSide, device: HiddenAccelerator) -> None:
    sender, receiver = new_side("sender"), new_side("receiver", hidden=device, bounce_bytes=16 * FRAME)
    crowd(sender, receiver, 2)
    until(lambda: len(sender.engine._outbound) == 2, "a registration and an intent")
    receiver.withdraw("d0")
    assert not receiver.await_report("d0")
    sender.seal("p1", 1, blocks_of(1), TOKENS)
    assert receiver.await_report("d1")
    assert receiver.holds(1, blocks_of(1))
    assert receiver.blank(blocks_of(0))


def test_no_room_in_time(new_side: NewSide, device: HiddenAccelerator, caplog: pytest.LogCaptureFixture) -> None:
    """The room is taken by one that is being written to the device, which takes for ever."""
    sender = new_side("sender")
    receiver = new_side("receiver", hidden=device, bounce_bytes=16 * FRAME, no_progress_seconds=1.0)
    device.on_write = gate = Gate()
    sender.prefill("p0", 0, TOKENS, blocks_of(0), "t0")
    receiver.receive("d0", 0, TOKENS, blocks_of(0), sender, "t0")
    assert gate.reached.wait(10)
    receiver.receive("d1", 1, TOKENS, blocks_of(1), sender, "t1")
    assert not receiver.await_report("d1")
    assert "reason=timeout" in (line := logged(caplog, "d1"))
    assert "raise bounce_bytes" in line
    gate.open()
    assert receiver.await_report("d0")
    assert receiver.holds(0, blocks_of(0))


def test_receive_that_never_can_have_room(
    new_side: NewSide, device: HiddenAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails at once with the reason, and stands in nobody's way."""
    sender, receiver = new_side("sender"), new_side("receiver", hidden=device, bounce_bytes=16 * FRAME)
    text, remote = content(1, 13 * BLOCK_SIZE), Remote(sender.settings.host, sender.settings.port)
    receiver.step(StepOrders(intents=(Intent("d", "t", remote, text.length, text.at(text.length)),)))
    until(lambda: len(sender.engine._outbound), "the intent")
    receiver.receive("d", 1, 13 * BLOCK_SIZE, list(range(13)), sender)
    assert receiver.finished == receiver.failed == ["d"]
    line = logged(caplog, "d")
    assert "reason=table_full" in line
    assert f"13 blocks ({13 * FRAME} bytes)" in line
    assert "has 12 for it; raise bounce_bytes" in line
    until(lambda: not len(sender.engine._outbound), "the end of the intent")
    sender.prefill("q", 2, 12 * BLOCK_SIZE, list(range(12)), "u")
    receiver.receive("e", 2, 12 * BLOCK_SIZE, list(range(20, 32)), sender, "u")
    assert receiver.await_report("e")
    assert receiver.holds(2, list(range(20, 32)))


def test_too_little_room_for_anything(new_side: NewSide, device: HiddenAccelerator) -> None:
    small = new_side("small", hidden=device, bounce_bytes=4 * FRAME)
    assert small.engine._bounce is not None
    layout = small.engine._bounce.cache.layout
    with pytest.raises(LayoutError, match=f"3 blocks of this KV cache, and 4 are needed; set at least {4 * FRAME}"):
        StagingCache(layout, 4 * FRAME - 1, small.transport)


def test_copies_go_on_while_the_network_stands_still(
    new_side: NewSide, new_transport: Callable[[], Transport], device: HiddenAccelerator
) -> None:
    """As far as there is room; and on from there when something has been written."""
    stall = Stall()
    transport = FaultyTransport(new_transport(), stall)
    sender = new_side("sender", transport=transport, hidden=device, bounce_bytes=32 * FRAME)
    receiver = new_side("receiver")
    stall.begin()
    sender.prefill("p", 1, 20 * BLOCK_SIZE, list(range(20)))
    receiver.receive("d", 1, 20 * BLOCK_SIZE, list(range(50, 70)), sender)
    until(lambda: device.copied == 8 * FRAME, "all room to be used")
    assert taken(sender) == 8 * FRAME
    assert receiver.blank(list(range(BLOCKS)))
    stall.end()
    assert receiver.await_report("d")
    assert receiver.holds(1, list(range(50, 70)))
    assert device.copied == 20 * FRAME
    idle(sender, receiver)
