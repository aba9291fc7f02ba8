"""One engine that sends and receives at once, and engines that find each other from both sides at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.transport.fates import Fail, Stall
from neuron_pushkv.transport.faults import FaultyTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from tests.engine.sides import Side, until

NewSide = Callable[..., Side]
SHORT = {"no_progress_seconds": 1.0, "cancel_seconds": 0.3, "keep_unclaimed_seconds": 0.1, "keep_delivered_seconds": 0}


@pytest.mark.parametrize("ends", ["prefill fails", "sender dies", "request is aborted"])
@pytest.mark.parametrize("sent", ["write fails", "receiver dies", "receiver aborts"])
def test_both_roles_fail_at_once(new_side: NewSide, network: LoopbackNetwork, ends: str, sent: str) -> None:
    """F11: what the engine receives and what it sends fail in ways of their own, each by its own rule; it goes on."""
    stall = Stall()
    faulty = FaultyTransport(network.transport(), stall, *([Fail(5)] if sent == "write fails" else []))
    both = new_side("both", transport=faulty, **SHORT)
    source, target = new_side("source"), new_side("target", **SHORT)
    source.offer("in", 1, 64, "t")
    both.receive("in", 1, 64, [1, 2, 3, 4], source, "t")
    until(lambda: len(source.engine._outbound), "the registration at its sender")
    stall.begin()
    both.prefill("out", 2, 64, [11, 13, 15, 17], "u")
    target.receive("out", 2, 64, [21, 23, 25, 27], both, "u")
    both.finish("out")
    until(lambda: both.engine._outbound.reading("out"), "its own write")
    if ends == "prefill fails":
        source.finish("in", kept=False)
    elif ends == "sender dies":
        source.close()
    else:
        both.withdraw("in")
    if sent == "receiver dies":
        target.close()
    elif sent == "receiver aborts":
        target.withdraw("out")
    stall.end()
    assert not both.await_report("in")
    both.fill(99, [1, 2, 3, 4])
    until(lambda: (both.step(), both.freed == ["out"])[1], "its blocks")
    both.fill(98, [11, 13, 15, 17])
    if sent != "receiver dies":
        assert not target.await_report("out") or target.holds(2, [21, 23, 25, 27])
    assert both.finished == both.failed == ["in"]
    assert (len(both.engine._inbound), len(both.engine._outbound), len(both.engine._outbound.sources)) == (0, 0, 0)
    fresh = new_side("fresh")
    both.prefill("next", 3, 64, [31, 33, 35, 37], "v")
    fresh.prefill("back", 4, 64, [41, 42, 43, 44], "w")
    fresh.receive("next", 3, 64, [1, 2, 3, 4], both, "v")
    both.receive("back", 4, 64, [51, 52, 53, 54], fresh, "w")
    assert fresh.await_report("next")
    assert both.await_report("back")
    assert fresh.holds(3, [1, 2, 3, 4])
    assert both.holds(4, [51, 52, 53, 54])
    assert both.holds(99, [1, 2, 3, 4])
    expected = {"prefill fails": Reason.PREFILL_FAILED, "request is aborted": Reason.ABORTED}
    if ends in expected:
        assert both.stats["transfers"][f"in:failed:{expected[ends]}"] == 1


@pytest.mark.parametrize("round_", range(4))
def test_engines_that_call_each_other_at_once(new_side: NewSide, round_: int) -> None:
    """F16: first requests from both sides at the same moment, several at once: one connection, and all are served."""
    names = ("a", "b") if round_ % 2 else ("b", "a")
    sides = [new_side(name) for name in names]
    for side in sides:
        for number in range(4):
            side.prefill(f"p{number}", number, 16, [number], f"t{number}")
    together = threading.Barrier(2)

    def ask(here: Side, there: Side) -> None:
        together.wait(10)
        for number in range(4):
            here.receive(f"d{number}", number, 16, [10 + number], there, f"t{number}")

    threads = [threading.Thread(target=ask, args=pair) for pair in (sides, sides[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for side in sides:
        for number in range(4):
            assert side.await_report(f"d{number}")
            assert side.holds(number, [10 + number])
    assert [len(side.engine._contacts.links) for side in sides] == [1, 1]
