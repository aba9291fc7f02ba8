"""How connections end: by death, by silence, by a full queue, by being told to; and that idle ones stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuron_pushkv.errors import Reason, WireError
from neuron_pushkv.peers import link
from neuron_pushkv.peers.handshake import Ours
from neuron_pushkv.wire import Bye, Done, Freed, Rank, Welcome
from tests.peers.party import KEY, PATIENCE, Down, Party, Received, Stranger, Up, connect, eventually

STRANGER = Ours("stranger", 7, Rank(), KEY)


@contextlib.contextmanager
def process(address: tuple[str, int]) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that connects to ``address``."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.peers.peer_process", "other", address[0], str(address[1])]
    with subprocess.Popen(command, cwd=root) as other:
        try:
            yield other
        finally:
            other.kill()


def test_a_killed_peer_is_noticed_at_once() -> None:
    with Party("a") as a, process(a.listen()) as other:
        connection = a.wait(Up).connection
        a.node.send(connection, Done(1, 2))
        assert a.wait(Received).message == Done(1, 2)
        killed = time.monotonic()
        other.send_signal(signal.SIGKILL)
        down = a.wait(Down)
        assert time.monotonic() - killed < 1
        assert down.reason is Reason.PEER_LOST
        assert not a.node.send(connection, Done(1, 2))


def test_a_stopped_peer_is_ended_by_its_silence() -> None:
    with Party("a", silence_seconds=0.6, ping_seconds=0.1) as a, process(a.listen()) as other:
        a.wait(Up)
        stopped = time.monotonic()
        other.send_signal(signal.SIGSTOP)
        down = a.wait(Down)
        assert 0.4 < time.monotonic() - stopped < 3
        assert down.reason is Reason.PEER_LOST
        assert "nothing has come from 127.0.0.1:" in down.detail
        assert "for 0.6 s" in down.detail


def test_our_own_standstill_is_not_taken_for_the_peers_silence() -> None:
    """A node whose thread was held up, by a long GIL hold or SIGSTOP, has to look before it judges."""
    with Party("a", silence_seconds=0.6, ping_seconds=0.1) as a, Party("b", ping_seconds=0.1) as b:
        connect(a, b)
        a.node._loop.call_soon_threadsafe(time.sleep, 1.5)
        here = a.of(Up)[0]
        assert a.node.send(here.connection, Done(1, 1))
        b.wait(Received)
        with pytest.raises(AssertionError, match="no Down"):
            a.wait(Down, seconds=0.4)


def test_an_idle_connection_stays() -> None:
    times = {"silence_seconds": 0.4, "ping_seconds": 0.1}
    with Party("a", **times) as a, Party("b", **times) as b:
        here, _ = connect(a, b)
        with pytest.raises(AssertionError, match="no Down"):
            a.wait(Down, seconds=1.2)
        assert a.node.send(here.connection, Done(1, 1))
        b.wait(Received)


def test_drop_sends_what_is_queued_and_then_says_why() -> None:
    with Party("a") as a, Party("b") as b:
        here, there = connect(a, b)
        for number in range(1000):
            assert a.node.send(here.connection, Done(number, 1))
        a.node.drop(here.connection, Reason.MODEL_MISMATCH, "enough")
        assert a.wait(Down) == (here.connection, Reason.MODEL_MISMATCH, "enough")
        down = b.wait(Down)
        assert (down.connection, down.reason) == (there.connection, Reason.MODEL_MISMATCH)
        assert [each.message.slot for each in b.of(Received)] == list(range(1000))
        assert not a.node.send(here.connection, Done(1, 1))
        a.node.drop(here.connection, Reason.SHUTDOWN, "again")
        a.node.drop(999, Reason.SHUTDOWN, "never heard of")


def test_each_threads_order_is_kept() -> None:
    with Party("a") as a, Party("b") as b:
        here, _ = connect(a, b)

        def send(slot: int) -> None:
            for number in range(500):
                assert a.node.send(here.connection, Done(slot, number))

        threads = [threading.Thread(target=send, args=(slot,)) for slot in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        b.wait(Received, 4000)
        for slot in range(8):
            epochs = [each.message.epoch for each in b.of(Received) if each.message.slot == slot]
            assert epochs == list(range(500))


def test_sending_from_up_and_received() -> None:
    """The handler may answer from within."""
    with Party("a") as a, Party("b") as b:

        def up(*arguments: object) -> None:
            event = Up(*arguments)  # type: ignore[arg-type]
            b._note(event)
            assert b.node.send(event.connection, Done(7, 7))

        b.up = up  # type: ignore[method-assign]
        connect(a, b)
        assert a.wait(Received).message == Done(7, 7)


def test_a_peer_that_does_not_read_costs_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_QUEUE_BYTES", 1 << 20)
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.prove(STRANGER)
        assert isinstance(stranger.message(), Welcome)
        connection = a.wait(Up).connection
        message = Freed(Rank(), (("x" * 100_000, 0),))
        sent = 0
        while a.node.send(connection, message):
            sent += 1
            assert sent < 1000, "64 MiB and more are never in the kernel's buffers alone"
            eventually(lambda: a.of(Down) or not a.node._core.links[connection]._flush_due)
        down = a.wait(Down)
        assert down.reason is Reason.TABLE_FULL
        assert "doesn't read" in down.detail
        assert not a.node.send(connection, Done(1, 1))


def test_a_peer_that_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_QUEUE_BYTES", 64 << 20)
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.prove(STRANGER)
        stranger.message()
        connection = a.wait(Up).connection
        for number in range(200):
            assert a.node.send(connection, Freed(Rank(tp=number), (("x" * 100_000, 0),)))
        for number in range(200):
            got = stranger.message()
            assert isinstance(got, Freed)
            assert got.rank == Rank(tp=number)


def test_a_message_that_no_peer_would_take_is_the_senders_error() -> None:
    with Party("a") as a, Party("b") as b:
        here, _ = connect(a, b)
        with pytest.raises(WireError, match=r"Freed takes 170000\d\d bytes; the limit is 16777216"):
            a.node.send(here.connection, Freed(Rank(), (("x" * 17_000_000, 0),)))
        assert a.node.send(here.connection, Done(1, 1))
        b.wait(Received)


def test_close_says_bye_and_ends_everything_once() -> None:
    with Party("a") as a, Party("b") as b, Party("c") as c:
        connect(a, b)
        connect(c, a)
        closers = [threading.Thread(target=a.node.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(PATIENCE)
        assert not a.node._thread.is_alive()
        assert len(a.of(Down)) == 2
        assert "said goodbye" in b.wait(Down).detail
        assert "said goodbye" in c.wait(Down).detail
        for thing in (lambda: a.node.send(1, Done(1, 1)), lambda: a.node.send(2, Done(1, 1))):
            assert thing() is False


def test_close_tells_its_reason() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.prove(STRANGER)
        stranger.message()
        a.wait(Up)
        a.node.close(Reason.REVOKED)
        assert stranger.message() == Bye(Reason.REVOKED)
        assert stranger.ended()


def test_close_does_not_wait_for_a_peer_that_does_not_answer() -> None:
    with Party("a") as a, process(a.listen()) as other:
        a.wait(Up)
        other.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        a.node.close()
        assert time.monotonic() - began < 3


def test_the_handler_may_close_the_node() -> None:
    with Party("a") as a, Party("b") as b:

        def received(*_: object) -> None:
            b.node.close()

        b.received = received  # type: ignore[method-assign]
        here, _ = connect(a, b)
        a.node.send(here.connection, Done(1, 1))
        b.node._thread.join(PATIENCE)
        assert not b.node._thread.is_alive()
        assert a.wait(Down).reason is Reason.SHUTDOWN


def test_nodes_leave_no_descriptors_and_threads() -> None:
    def measure() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208 - a count is all

    before = measure()
    for _ in range(5):
        with Party("a") as a, Party("b") as b:
            connect(a, b)
    eventually(lambda: measure() == before)
