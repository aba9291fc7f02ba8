"""Writes that are late, lost, doubled, out of order or held back: a success with the right bytes or a failure."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.transport.base import Written
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.fates import Delay, Depth, Drop, Duplicate, Fail, Fault, Reorder, Stall
from neuron_pushkv.transport.faults import FaultyTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from tests.engine import sides
from tests.engine.sides import BLOCK_BYTES, LAYERS, Side, until

NewSide = Callable[..., Side]
SHORT = {"no_progress_seconds": 0.4, "cancel_seconds": 0.2, "keep_unclaimed_seconds": 0.1, "keep_delivered_seconds": 0}


def scattered(count: int, first: int) -> list[int]:
    """Blocks of which no two lie together, so that each is a write per layer."""
    return [first + 2 * index for index in range(count)]


def freed(side: Side, request: str) -> None:
    until(lambda: (side.step(), request in side.freed)[1], f"letting go of {request}")


def nothing_left(*sides_: Side) -> bool:
    return all(
        (
            len(side.engine._inbound),
            len(side.engine._outbound),
            len(side.engine._outbound.sources),
            side.directory.kept(),
        )
        == (0, 0, 0, 0)
        for side in sides_
    )


# F31


HARMLESS: dict[str, list[Fault]] = {
    "late": [Delay(0, 0.02)],
    "out of order": [Reorder(), Delay(0, 0.01, share=0.5)],
    "queue of 8": [Depth(8)],
    "queue of 1": [Depth(1), Reorder()],
}


@pytest.mark.parametrize("blocks", [1, 5, 16])
@pytest.mark.parametrize("trouble", HARMLESS)
def test_slow_and_disorderly_writes_all_arrive(
    new_side: NewSide, network: LoopbackNetwork, trouble: str, blocks: int
) -> None:
    """F31: 4, 20 and 64 writes, late, in any order, a few at a time: all bytes, and exactly that count."""
    faulty = FaultyTransport(network.transport(), *HARMLESS[trouble], seed=blocks)
    sender, receiver = new_side("sender", transport=faulty, **SHORT), new_side("receiver")
    target = scattered(blocks, 40)
    sender.prefill("p", 1, 16 * blocks, scattered(blocks, 1))
    receiver.receive("d", 1, 16 * blocks, target, sender)
    assert receiver.await_report("d")
    assert receiver.holds(1, target)
    assert receiver.others_blank(target)
    assert receiver.stats["writes"]["in"] == blocks * LAYERS
    sender.finish("p")
    freed(sender, "p")
    assert nothing_left(sender, receiver)


@pytest.mark.parametrize("rails", [1, 2, 3, 4])
@pytest.mark.parametrize("trouble", HARMLESS)
def test_writes_over_several_rails(new_side: NewSide, trouble: str, rails: int) -> None:
    """F31: 1 to 64 writes over 1 to 4 rails of libfabric's tcp, late, in any order, a few at a time."""
    faulty = FaultyTransport(FabricTransport(provider="tcp", rails=rails), *HARMLESS[trouble], seed=rails)
    sender = new_side("sender", transport=faulty)
    receiver = new_side("receiver", transport=FabricTransport(provider="tcp", rails=rails))
    for count, first in ((16, 40), (5, 72), (1, 82)):
        source, target, name = scattered(count, 1), scattered(count, first), f"{count}"
        sender.prefill(name, count, 16 * count, source, name)
        receiver.receive(name, count, 16 * count, target, sender, name)
        assert receiver.await_report(name)
        assert receiver.holds(count, target)
    assert receiver.others_blank(scattered(22, 40))
    assert receiver.stats["writes"]["in"] == 22 * LAYERS
    assert receiver.transport.counters().arrivals == 22 * LAYERS


@pytest.mark.parametrize("rails", [1, 4])
@pytest.mark.parametrize("trouble", [Drop, Fail])
def test_lost_and_failed_writes_over_several_rails(new_side: NewSide, trouble: type[Drop | Fail], rails: int) -> None:
    """F31: the same end, and the other rails' writes are quiet when it is told."""
    faulty = FaultyTransport(FabricTransport(provider="tcp", rails=rails), trouble(31))
    sender = new_side("sender", transport=faulty, **SHORT)
    receiver = new_side("receiver", transport=FabricTransport(provider="tcp", rails=rails), **SHORT)
    sender.prefill("p", 1, 256, scattered(16, 1))
    receiver.receive("d", 1, 256, scattered(16, 40), sender)
    assert not receiver.await_report("d", 5.0)
    receiver.fill(99, scattered(16, 40))
    sender.finish("p")
    freed(sender, "p")
    sender.prefill("q", 2, 256, scattered(16, 2), "u")
    receiver.receive("next", 2, 256, scattered(16, 41), sender, "u")
    assert receiver.await_report("next")
    assert receiver.holds(2, scattered(16, 41))
    assert receiver.holds(99, scattered(16, 40))


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_doubled_writes_show(new_side: NewSide, network: LoopbackNetwork, share: float) -> None:
    """F31: a network that doubles writes breaks its contract; at least it is seen: a failure, or a count of arrivals
    that nobody expected."""
    faulty = FaultyTransport(network.transport(), Duplicate(share), seed=3)
    sender, receiver = new_side("sender", transport=faulty, **SHORT), new_side("receiver", **SHORT)
    sender.prefill("p", 1, 256, scattered(16, 1))
    receiver.receive("d", 1, 256, scattered(16, 40), sender)
    receiver.await_report("d")

    def seen() -> bool:
        receiver.step()
        return bool(receiver.failed) or receiver.stats.get("events", {}).get("stale_arrival", 0) > 0

    until(seen, "a sign of it")


@pytest.mark.parametrize(("blocks", "number"), [(1, 0), (5, 7), (16, 0), (16, 31), (16, 63)])
@pytest.mark.parametrize("trouble", [Drop, Fail])
def test_lost_and_failed_writes_end_in_a_failure(
    new_side: NewSide, network: LoopbackNetwork, trouble: type[Drop | Fail], blocks: int, number: int
) -> None:
    """F31: whichever write is lost or fails, in silence or aloud: told in bounded time, and the next goes through."""
    faulty = FaultyTransport(network.transport(), trouble(number), Depth(8))
    sender, receiver = new_side("sender", transport=faulty, **SHORT), new_side("receiver", **SHORT)
    sender.prefill("p", 1, 16 * blocks, scattered(blocks, 1))
    began = time.monotonic()
    receiver.receive("d", 1, 16 * blocks, scattered(blocks, 40), sender)
    assert not receiver.await_report("d", 5.0)
    assert time.monotonic() - began < 3.0
    receiver.fill(99, scattered(blocks, 40))
    sender.finish("p")
    freed(sender, "p")
    sender.fill(98, scattered(blocks, 1))
    sender.prefill("q", 2, 16 * blocks, scattered(blocks, 2), "u")
    receiver.receive("next", 2, 16 * blocks, scattered(blocks, 41), sender, "u")
    assert receiver.await_report("next")
    assert receiver.holds(2, scattered(blocks, 41))
    assert receiver.holds(99, scattered(blocks, 40)), "the blocks' next owner keeps what is its own"
    assert sum(receiver.stats["transfers"].values()) == 2


class Liar(FaultyTransport):
    """Says of one write that it is in place, and it never was: completion that is local, on a link that drops."""

    def _post_one(self, task, write):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        if not write.fate.dropped:
            return super()._post_one(task, write)
        task.written += 1
        self._settle(task)
        return bool(task.left)


@pytest.mark.parametrize("number", [0, 9, 19])
def test_senders_word_is_not_believed(new_side: NewSide, network: LoopbackNetwork, number: int) -> None:
    """F35: the sender's transport reports success and a write never lands: the receiver fails it, in bounded time."""
    liar = Liar(network.transport(), Drop(number))
    sender, receiver = new_side("sender", transport=liar), new_side("receiver", **SHORT)
    told: list[object] = []
    heard = sender.engine._happened
    sender.engine._happened = lambda event, now: (told.append(event), heard(event, now))[1]  # type: ignore[method-assign]
    sender.prefill("p", 1, 80, scattered(5, 1))
    receiver.receive("d", 1, 80, scattered(5, 40), sender)
    until(
        lambda: any(isinstance(event, Written) for event in told), "the sender's transport saying that all is written"
    )
    assert not receiver.await_report("d", 5.0)
    assert receiver.stats["transfers"] == {f"in:failed:{Reason.TIMEOUT}": 1}
    assert "bytes" not in receiver.stats or not receiver.stats["bytes"].get("in")


# F2


@pytest.mark.parametrize("trouble", ["held back", "lost on the way"])
def test_write_beyond_every_lease_reads_no_reused_memory(
    new_side: NewSide, network: LoopbackNetwork, trouble: str
) -> None:
    """F2: all leases run out while writes are due; the refilled source never reaches a receiver that gave up."""
    stall = Stall()
    faulty = FaultyTransport(network.transport(), stall, *([Drop(5)] if trouble == "lost on the way" else []))
    sender, receiver = new_side("sender", transport=faulty, **SHORT), new_side("receiver", **SHORT)
    if trouble == "held back":
        stall.begin()
    sender.prefill("p", 1, 80, scattered(5, 1))
    receiver.receive("d", 1, 80, scattered(5, 40), sender)
    sender.finish("p")
    until(lambda: sender.engine._outbound.reading("p"), "the write")
    until(lambda: (receiver.step(), sender.step(), "p" in sender.freed)[2], "letting go of p")
    assert not sender.engine._outbound.reading("p")
    sender.fill(66, scattered(5, 1))
    assert not receiver.await_report("d")
    receiver.fill(99, scattered(5, 40))
    stall.end()
    sender.prefill("q", 2, 80, scattered(5, 2), "u")
    receiver.receive("next", 2, 80, scattered(5, 41), sender, "u")
    assert receiver.await_report("next")
    assert receiver.holds(2, scattered(5, 41))
    assert receiver.holds(99, scattered(5, 40))
    assert len(sender.freed) == 1


# F32


def test_flood_behind_a_short_queue(
    new_side: NewSide, network: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F32: 512 requests at once over a queue of 16: all wait their turn, all finish, each with its own bytes."""
    monkeypatch.setattr(sides, "BLOCKS", 512)
    faulty = FaultyTransport(network.transport(), Depth(16))
    sender, receiver = new_side("sender", transport=faulty), new_side("receiver")
    for number in range(512):
        receiver.receive(f"d{number}", number, 16, [number], sender, f"t{number}")
    for number in range(512):
        sender.prefill(f"p{number}", number, 16, [(number * 37) % 512], f"t{number}")
        sender.finish(f"p{number}")

    def all_reported() -> bool:
        receiver.step()
        return len(receiver.finished) == 512

    until(all_reported, "512 reports", 30.0)
    assert receiver.failed == []
    assert all(receiver.holds(number, [number]) for number in range(512))
    assert receiver.stats["bytes"]["in"] == 512 * LAYERS * BLOCK_BYTES
    until(lambda: (sender.step(), len(sender.freed) == 512)[1], "letting go of all sources")
    assert nothing_left(sender, receiver)
