"""Peers that can't be reached: bounded, remembered, and nobody else waits for them (F13)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.peers.handshake import Ours
from neuron_pushkv.wire import Hello, Identity, Rank
from tests.peers.party import HOST, KEY, PATIENCE, Discarded, Party, Stranger, Unreachable, Up, listener

CONNECT_SECONDS = 0.5
SLACK = 1.5
"""Seconds that a busy machine may add."""


@contextlib.contextmanager
def silent() -> Iterator[tuple[str, int]]:
    """Accepts connections and never says a word."""
    with listener() as listening:
        yield listening.getsockname()


@contextlib.contextmanager
def full() -> Iterator[tuple[str, int]]:
    """Has a full queue, so that the kernel drops every further SYN."""
    with listener(backlog=0) as listening, contextlib.ExitStack() as stack:
        for _ in range(64):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        probe = stack.enter_context(socket.socket())
        probe.settimeout(0.1)
        with pytest.raises(TimeoutError):
            probe.connect(listening.getsockname())
        yield listening.getsockname()


@contextlib.contextmanager
def half() -> Iterator[tuple[str, int]]:
    """Answers the Hello with a good challenge, and then says no more."""
    with listener() as listening:

        def serve() -> None:
            with contextlib.suppress(OSError), Stranger(listening.accept()[0]) as peer:
                peer.challenge(Ours("half", 1, Rank(), KEY))
                peer.ended()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("hole", [silent, full, half], ids=["never answers", "drops SYNs", "stops half-way"])
def test_a_black_hole_is_bounded_and_delays_nobody(hole: contextlib.AbstractContextManager[tuple[str, int]]) -> None:
    with hole() as address, Party("a", connect_seconds=CONNECT_SECONDS) as a, Party("b") as b:
        began = time.monotonic()
        a.node.open("worker", *address)
        listening = b.listen()
        a.node.open("worker", *listening)
        a.wait(Up)
        assert time.monotonic() - began < CONNECT_SECONDS, "the good peer did not wait for the bad one"
        lost = a.wait(Unreachable)
        assert CONNECT_SECONDS <= time.monotonic() - began < CONNECT_SECONDS + SLACK
        assert lost == ("worker", *address, Reason.UNREACHABLE, lost.detail)
        assert f"{address[0]}:{address[1]} did not answer within 0.5 s" in lost.detail


def test_a_failure_is_remembered_for_a_while() -> None:
    with silent() as address, Party("a", connect_seconds=0.2, unreachable_seconds=0.6) as a:
        a.node.open("worker", *address)
        first = a.wait(Unreachable)
        failed = time.monotonic()
        for count in range(2, 102):
            a.node.open("worker", *address)
            assert a.wait(Unreachable, count) == first
        assert time.monotonic() - failed < 0.6, "a hundred requests were told at once, from memory"
        while time.monotonic() - failed < 0.6 + 0.01:
            a.node.open("worker", *address)
            time.sleep(0.01)
        seen = len(a.of(Unreachable))
        began = time.monotonic()
        a.node.open("worker", *address)
        a.wait(Unreachable, seen + 1)
        assert time.monotonic() - began >= 0.19, "afterwards it is tried anew"


def test_a_refused_connection_is_tried_again_until_the_peer_is_there() -> None:
    with Party("a", connect_seconds=PATIENCE) as a, Party("b") as b:
        with socket.create_server((HOST, 0)) as reserved:
            port = reserved.getsockname()[1]
        a.node.open("worker", HOST, port)
        tries = a.node._openings
        deadline = time.monotonic() + PATIENCE
        while not tries._all and time.monotonic() < deadline:
            time.sleep(0.001)
        b.node.listen(HOST, port)
        assert a.wait(Up).opened == (HOST, port)
        assert not a.of(Unreachable)


def test_nobody_there_is_reported_in_words() -> None:
    with socket.create_server((HOST, 0)) as reserved:
        port = reserved.getsockname()[1]
    with Party("a", connect_seconds=0.3) as a:
        began = time.monotonic()
        a.node.open("lookup", HOST, port)
        lost = a.wait(Unreachable)
        assert 0.29 <= time.monotonic() - began < 0.3 + SLACK
        assert lost == ("lookup", HOST, port, Reason.UNREACHABLE, f"{HOST}:{port} can't be reached: Connection refused")


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("no such host", 1, "no such host isn't a name that can be resolved"),
        ("nul\0l", 1, r"'nul\x00l', port 1, isn't an address"),
        ("a" * 300, 1, ", port 1, isn't an address"),
        (HOST, 70_000, "'127.0.0.1', port 70000, isn't an address"),
        (HOST, -1, "'127.0.0.1', port -1, isn't an address"),
    ],
)
def test_what_is_no_address_is_answered_too(host: str, port: int, said: str) -> None:
    with Party("a", connect_seconds=5) as a:
        a.node.open("lookup", host, port)
        lost = a.wait(Unreachable)
        assert a.node.refusals() == {}
    assert lost.reason is Reason.UNREACHABLE
    assert said in lost.detail


def test_a_peer_that_hangs_up_during_the_handshake_is_tried_again() -> None:
    with Party("a", connect_seconds=PATIENCE) as a, Party("b") as b, listener() as flaky:
        a.node.open("worker", *flaky.getsockname())
        for _ in range(2):
            with Stranger(flaky.accept()[0]) as peer:
                assert isinstance(peer.message(), Hello)
        with Stranger(flaky.accept()[0]) as peer:
            acceptor = peer.challenge(Ours("steady", 1, Rank(), KEY))
            acceptor.proof(peer.body())
            peer.send(acceptor.welcome(Identity("steady", 1, Rank())))
            assert a.wait(Up).theirs.engine_id == "steady"
        del b


def test_what_is_no_peer_at_all_is_named_at_once() -> None:
    with Party("a", connect_seconds=PATIENCE) as a, listener() as web:
        a.node.open("worker", *web.getsockname())
        with Stranger(web.accept()[0]) as peer:
            peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            lost = a.wait(Unreachable)
    assert lost.reason is Reason.BAD_FRAME


def test_many_opens_of_one_peer_make_one_connection_and_one_answer_each() -> None:
    with Party("a", connect_seconds=0.3) as a, silent() as address, Party("b") as b:
        for _ in range(20):
            a.node.open("worker", *address)
        a.wait(Unreachable, 20)
        assert len(a.of(Discarded)) == 0
        listening = b.listen()
        for _ in range(20):
            a.node.open("worker", *listening)
        a.wait(Unreachable, 39)
        assert [lost.reason for lost in a.of(Unreachable)[20:]] == [Reason.DUPLICATE] * 19
        a.node.open("worker", *listening)
        assert a.wait(Unreachable, 40).reason is Reason.DUPLICATE
        assert len(a.of(Up)) == len(b.of(Up)) == 1


def test_a_worker_goes_on_trying_its_directory() -> None:
    """It is started first, and even a refusal may end: that of a directory which is still being replaced."""
    with Party("a", connect_seconds=0.3) as a, Party("b", key=b"another") as b:
        address = b.listen()
        for count in range(1, 3):
            began = time.monotonic()
            a.node.open("rank", *address)
            assert a.wait(Unreachable, count).reason is Reason.WRONG_KEY
            assert time.monotonic() - began >= 0.29
        assert a.node.refusals()[Reason.WRONG_KEY] > 2


def test_an_answer_that_comes_with_the_end_is_too_late() -> None:
    """The node closes, and the peer's welcome is in the same turn of the loop: one answer, not two."""
    name = Ours("late", 1, Rank(), KEY)
    with Party("a") as a, listener() as listening:
        a.node.open("worker", *listening.getsockname())
        with Stranger(listening.accept()[0]) as peer:
            acceptor = peer.challenge(name)
            acceptor.proof(peer.body())
            (link,) = a.node._core.sockets
            welcome = acceptor.welcome(Identity("late", 1, Rank()))

            def both() -> None:
                a.node._openings.close()
                link.data_received(welcome)

            a.node._loop.call_soon_threadsafe(both)
            assert a.wait(Unreachable).reason is Reason.SHUTDOWN
            assert a.wait(Discarded).token == 100
            assert peer.ended()
        assert not a.of(Up)


def test_closing_answers_what_is_being_opened() -> None:
    with silent() as address, Party("a", connect_seconds=PATIENCE) as a:
        a.node.open("worker", *address)
        a.node.open("lookup", *address)
        began = time.monotonic()
        a.node.close()
        assert time.monotonic() - began < 5
        assert [lost.reason for lost in a.of(Unreachable)] == [Reason.SHUTDOWN] * 2
        a.node.open("worker", *address)
        a.node.close()
        assert len(a.of(Unreachable)) == 2
