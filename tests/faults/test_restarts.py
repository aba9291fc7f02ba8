"""Peers that come back under the same name, connections that are cut, clocks that disagree."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.orders import Finish, StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fabric import FabricTransport
from tests.engine.conftest import free_port
from tests.engine.sides import BLOCKS, Side, order, until

from .commands import cut
from .measures import descriptors
from .side_process import RemoteSide

NewSide = Callable[..., Side]
RESTARTS = 20


def receive(side: Side, request: str, prompt: int, blocks: list[int], port: int, transfer: str) -> None:
    """As :meth:`Side.receive`, from an engine in another process."""
    sender = ConnectorSettings(port=port)
    side.step(StepOrders(receives=(order(request, prompt, 16 * len(blocks), blocks, sender, transfer),)))


class Load:
    """Keeps one transfer after another going from ``sender`` to ``receiver``, in a thread of its own."""

    def __init__(self, sender: Side, receiver: Side) -> None:
        self.sender = sender
        self.receiver = receiver
        self.done = 0
        self.failure: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                name = f"load-{self.done}"
                self.sender.prefill(name, self.done, 64, [1, 3, 5, 7], name)
                self.receiver.receive(name, self.done, 64, [2, 4, 6, 8], self.sender, name)
                assert self.receiver.await_report(name)
                assert self.receiver.holds(self.done, [2, 4, 6, 8])
                self.sender.finish(name)
                self.done += 1
                self._end.wait(0.05)
        except BaseException as failure:  # noqa: BLE001 - raised where the test sees it
            self.failure = failure


def test_restarts_under_load(new_process: Callable[..., RemoteSide]) -> None:
    """F12: a peer is killed and comes back 20 times, in turn as sender and as receiver, while others go on."""
    port = free_port()
    # A peer that dies before its DONE is heard leaves a source that nobody has claimed.
    settings = ConnectorSettings(keep_delivered_seconds=0, keep_unclaimed_seconds=1)

    def made(name: str) -> Side:
        return Side(name, FabricTransport(provider="tcp"), settings.model_copy(update={"port": free_port()}))

    with made("steady") as steady, made("a") as a, made("b") as b, Load(a, b) as load:
        counts: list[tuple[int, ...]] = []
        files = 0
        for round_ in range(RESTARTS):
            peer = new_process("peer", port)
            there, here = list(range(10, 18, 2)), list(range(20, 28, 2))
            if round_ % 2:
                steady.prefill(f"p{round_}", round_, 64, here, f"t{round_}")
                peer.do("receive", "d", round_, 64, there, steady.settings.port, f"t{round_}")
                assert peer.do("await_report", "d"), "the first request after the restart"
                assert peer.do("holds", round_, there)
                steady.finish(f"p{round_}")
                steady.offer(f"n{round_}", 500 + round_, 64, f"n{round_}")
                peer.do("receive", "never", 500 + round_, 64, [30, 31, 32, 33], steady.settings.port, f"n{round_}")
            else:
                peer.do("prefill", "p", round_, 64, there, f"t{round_}")
                receive(steady, f"d{round_}", round_, here, port, f"t{round_}")
                assert steady.await_report(f"d{round_}"), "the first request after the restart"
                assert steady.holds(round_, here)
                peer.do("offer", "q", 500 + round_, 64, f"n{round_}")
                receive(steady, f"n{round_}", 500 + round_, [40, 41, 42, 43], port, f"n{round_}")
            peer.kill()
            if round_ % 2:
                steady.step(StepOrders(finished=(Finish(f"n{round_}", kept=False),)))
            else:
                assert not steady.await_report(f"n{round_}", 2.0)
            until(lambda: len(steady.engine._contacts.links) == 0, "the end of the connection")
            extra = steady.transport.counters().extra
            assert (extra["peers"], extra["tickets"]) == (0, 0)
            counts.append((extra["memories"], extra["outstanding"], threading.active_count()))
            if not round_:
                files = descriptors()
            else:
                until(lambda: descriptors() <= files, f"{files} descriptors")  # noqa: B023 - it is called here
        assert len(set(counts)) == 1, counts
        until(lambda: (steady.step(), steady.engine._outbound.sources == [])[1], "letting go of all sources")
        assert (len(steady.engine._inbound), len(steady.engine._outbound)) == (0, 0)
    assert load.done > RESTARTS


@pytest.mark.parametrize("provider", ["loopback", "tcp"])
def test_connections_cut_at_random(new_side: NewSide, provider: str) -> None:
    """F14: control connections are cut under transfers for a while: nothing is lost or wrong, and nothing piles up."""

    def transport() -> dict[str, Transport]:
        return {"transport": FabricTransport(provider="tcp")} if provider == "tcp" else {}

    chance = random.Random(14)
    sender = new_side(
        "sender", **transport(), keep_delivered_seconds=0, keep_unclaimed_seconds=0.01, unreachable_seconds=0
    )
    receiver = new_side("receiver", **transport())
    free = list(range(BLOCKS))
    chance.shuffle(free)
    kept: dict[int, list[int]] = {}
    succeeded = failed = cuts = 0
    sender.prefill("first", 1, 64, free[:4], "first")
    receiver.receive("first", 1, 64, free[:4], sender, "first")
    assert receiver.await_report("first")
    sender.finish("first")
    files = descriptors()
    end = time.monotonic() + 1.5
    number = 0
    while time.monotonic() < end or (min(cuts, succeeded - failed, failed) < 6 and time.monotonic() < end + 10):
        number += 1
        blocks = [free.pop() for _ in range(chance.randrange(1, 8))]
        sender.prefill(f"p{number}", number, 16 * len(blocks), blocks, f"t{number}")
        receiver.receive(f"d{number}", number, 16 * len(blocks), blocks, sender, f"t{number}")
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 0.004))
            cuts += cut(chance.choice([sender, receiver]), chance)
        if receiver.await_report(f"d{number}"):
            succeeded += 1
            assert receiver.holds(number, blocks)
        else:
            failed += 1
            receiver.fill(number, blocks)
        kept[number] = blocks
        sender.finish(f"p{number}")
        if len(free) < 16:
            for prompt, held in kept.items():
                assert receiver.holds(prompt, held), "a write came after the report"
                free += held
            kept.clear()
    assert cuts > 5
    assert succeeded > failed > 0
    until(lambda: (sender.step(), sender.engine._outbound.sources == [])[1], "letting go of all sources")
    until(lambda: (sender.step(), sender.directory.kept() == 0)[1], "letting go at the directory")
    sender.step()
    assert sorted(sender.freed) == sorted(["first", *(f"p{each}" for each in range(1, number + 1))])
    receiver.receive("last", 1, 64, free[:4], sender, "last")
    sender.prefill("last", 1, 64, free[:4], "last")
    assert receiver.await_report("last")
    until(lambda: descriptors() <= files + 2, f"{files} descriptors")


HOUR, YEAR = 3600.0, 365 * 86400.0


def test_clocks_that_disagree(new_process: Callable[..., RemoteSide]) -> None:
    """F8: wall clocks an hour apart, one machine up for nine years and one since a moment: nothing changes."""
    now = time.time()
    settings = {"keep_unclaimed_seconds": 5.0, "keep_delivered_seconds": 0.1, "unknown_source_seconds": 1.0}
    sender = new_process("sender", wall=now + HOUR, monotonic=0.0, **settings)
    receiver = new_process("receiver", wall=now, monotonic=9 * YEAR, **settings)
    (wall, monotonic), (other_wall, other_monotonic) = sender.do("clocks"), receiver.do("clocks")
    assert abs(wall - other_wall - HOUR) < 60
    assert other_monotonic - monotonic > 8 * YEAR
    for here, there, port, transfer in ((sender, receiver, sender.port, "t"), (receiver, sender, receiver.port, "w")):
        here.do("prefill", f"p{transfer}", 1, 64, [1, 2, 3, 4], transfer)
        there.do("receive", f"d{transfer}", 1, 64, [11, 12, 13, 14], port, transfer)
        assert there.do("await_report", f"d{transfer}")
        assert there.do("holds", 1, [11, 12, 13, 14])
        here.do("finish", f"p{transfer}")
        here.do("freed", f"p{transfer}")
    began = time.monotonic()
    receiver.do("receive", "nobody", 2, 64, [21, 22, 23, 24], sender.port, "u")
    assert not receiver.do("await_report", "nobody")
    assert 0.9 < time.monotonic() - began < 5.0, "deadlines are as long as they were"
    sender.do("prefill", "kept", 3, 64, [1, 2, 3, 4], "v")
    sender.do("finish", "kept")
    receiver.do("receive", "late", 3, 64, [31, 32, 33, 34], sender.port, "v")
    assert receiver.do("await_report", "late")
    sender.do("freed", "kept")
    assert sender.do("tables") == receiver.do("tables") == [0, 0, 0, 0]
