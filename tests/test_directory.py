"""An engine's directory, asked by its own workers, other engines' workers and routers over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from neuron_pushkv import __version__, versions
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.directory import Directory, query_status
from neuron_pushkv.errors import ConfigError, HandshakeRefused, Reason
from neuron_pushkv.wire import Done, EngineStatus, Freed, Identity, Listening, Message, Rank, Status
from tests.peers.party import HOST, PATIENCE, Down, Party, Received, Stranger, Unreachable, Up, eventually, listener

KEY = "shared"
RELEASES = (__version__, versions.vllm()[1])
TP0, TP1 = Rank(tp=0), Rank(tp=1)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


def make(port: int = 0, ranks: int = 2, **more: float) -> Directory:
    settings = ConnectorSettings(provider="tcp", fleet_key=KEY)
    return Directory(settings, engine_id="engine", incarnation=42, port=port, ranks=ranks, **more)


@pytest.fixture
def directory() -> Iterator[Directory]:
    made = make()
    yield made
    made.close()


class Worker(Party):
    """A worker of the engine that has come to its directory."""

    def __init__(self, rank: Rank, directory: Directory, incarnation: int = 1, engine: str = "engine") -> None:
        super().__init__(engine, rank=rank, incarnation=incarnation, key=KEY.encode())
        self.rank = rank
        self.come(directory)

    def come(self, directory: Directory) -> None:
        count = len(self.of(Up)) + 1
        self.node.open("rank", *directory.address)
        self.connection = self.wait(Up, count).connection

    def say(self, message: Message) -> None:
        assert self.node.send(self.connection, message)

    def listening(self, port: int = 4000) -> None:
        self.say(Listening(self.rank, HOST, port + self.rank.tp, "tcp", "libfabric 2.5"))

    def freed(self, *requests: str, asked: int = 0) -> None:
        self.say(Freed(self.rank, tuple((request, asked) for request in requests)))


def look_up(directory: Directory) -> Identity:
    with Party("other", key=KEY.encode()) as other:
        other.node.open("lookup", *directory.address)
        up: Up = other.wait(Up)
    return up.theirs


def ask(directory: Directory) -> EngineStatus:
    return asyncio.run(query_status(*directory.address, KEY.encode(), 5))


def collect(directory: Directory, count: int) -> list[str]:
    """Take what has been freed until it is that many."""
    taken: list[str] = []

    def enough() -> bool:
        taken.extend(directory.take_freed())
        return len(taken) >= count

    eventually(enough)
    return taken


def test_before_during_and_after_the_ranks_have_come(directory: Directory) -> None:
    assert look_up(directory) == Identity("engine", 42, Rank(), ranks=(), ready=False)
    with Worker(TP0, directory) as first:
        assert not look_up(directory).ranks, "it has come, but has not said where it listens"
        first.listening()
        eventually(lambda: look_up(directory).ranks == ((TP0, HOST, 4000),))
        assert not look_up(directory).ready
        with Worker(TP1, directory) as second:
            second.listening()
            eventually(lambda: look_up(directory).ready)
            assert look_up(directory).ranks == ((TP0, HOST, 4000), (TP1, HOST, 4001))
        eventually(lambda: not look_up(directory).ready)
        assert look_up(directory).ranks == ((TP0, HOST, 4000),)


def test_status(directory: Directory) -> None:
    assert ask(directory) == EngineStatus("engine", 42, False, 2, "", "", 0, *RELEASES)
    with Worker(TP0, directory) as first, Worker(TP1, directory) as second:
        first.listening()
        second.listening()
        directory.keep("r")
        eventually(lambda: ask(directory).ready)
        assert ask(directory) == EngineStatus("engine", 42, True, 2, "tcp", "libfabric 2.5", 1, *RELEASES)


def test_a_request_is_freed_once_every_rank_has_said_so(directory: Directory) -> None:
    with Worker(TP0, directory) as first, Worker(TP1, directory) as second:
        for request in ("r1", "r2", "r3"):
            directory.keep(request)
        first.freed("r1", "r2")
        first.freed("r1")
        first.freed("unheard of")
        second.freed("r2")
        assert collect(directory, 1) == ["r2"]
        assert directory.kept() == 2
        second.freed("r1", "r3")
        assert collect(directory, 1) == ["r1"]
        first.freed("r3")
        assert collect(directory, 1) == ["r3"]
        assert directory.take_freed() == []
        assert directory.kept() == 0


def test_keeping_twice_is_keeping_once(directory: Directory) -> None:
    with Worker(TP0, directory) as first, Worker(TP1, directory) as second:
        directory.keep("r")
        first.freed("r", "unheard of")
        second.freed("probe")
        directory.keep("r")
        second.freed("r")
        assert collect(directory, 1) == ["r"]
        assert directory.take_freed() == []


def test_a_rank_that_dies_holds_nothing_for_ever() -> None:
    directory = make(gone_seconds=0.5)
    try:
        with Worker(TP0, directory) as first:
            with Worker(TP1, directory):
                directory.keep("r1")
                directory.keep("r2")
                first.freed("r1")
            died = time.monotonic()
            assert collect(directory, 1) == ["r1"]
            assert time.monotonic() - died >= 0.4, "a rank that comes back in time is not dead"
            directory.keep("r3")
            first.freed("r3", "r2")
            assert sorted(collect(directory, 2)) == ["r2", "r3"]
            assert directory.kept() == 0
    finally:
        directory.close()


def test_a_rank_that_comes_back_still_holds_its_requests() -> None:
    directory = make(gone_seconds=0.5, ranks=1)
    try:
        with Worker(TP0, directory) as worker:
            directory.keep("r")
            worker.node.drop(worker.connection, Reason.SHUTDOWN, "a hiccup")
            worker.wait(Down)
            worker.come(directory)
            time.sleep(0.6)  # Nothing is to happen in this time.
            assert directory.take_freed() == []
            worker.freed("r")
            assert collect(directory, 1) == ["r"]
    finally:
        directory.close()


def test_a_restarted_rank_has_let_go_of_everything(directory: Directory) -> None:
    with Worker(TP0, directory) as first:
        directory.keep("r")
        first.freed("r")
        with Worker(TP1, directory, incarnation=1), Worker(TP1, directory, incarnation=2) as reborn:
            assert collect(directory, 1) == ["r"]
            directory.keep("later")
            first.freed("later")
            reborn.listening()
            first.listening()
            eventually(lambda: look_up(directory).ready)
            assert directory.take_freed() == []
            reborn.freed("later")
            assert collect(directory, 1) == ["later"]


def test_many_requests_from_many_threads() -> None:
    directory = make(ranks=2)
    try:
        with Worker(TP0, directory) as first, Worker(TP1, directory) as second:
            requests = [f"r{number}" for number in range(2000)]

            def free(worker: Worker, order: list[str]) -> None:
                for request in order:
                    worker.freed(request)

            for request in requests:
                directory.keep(request)
            threads = [
                threading.Thread(target=free, args=(first, requests)),
                threading.Thread(target=free, args=(second, requests[::-1])),
            ]
            for thread in threads:
                thread.start()
            taken = collect(directory, len(requests))
            for thread in threads:
                thread.join(PATIENCE)
            assert sorted(taken) == sorted(requests)
            assert directory.take_freed() == []
    finally:
        directory.close()


def test_a_worker_of_another_engine_is_refused(directory: Directory) -> None:
    with Party("stray", key=KEY.encode(), connect_seconds=0.3) as stray:
        stray.node.open("rank", *directory.address)
        refused = stray.wait(Unreachable)
    assert refused.reason is Reason.REFUSED
    assert "a worker of engine stray has come to the directory of engine engine" in refused.detail


def test_one_rank_too_many_is_refused(directory: Directory) -> None:
    with (
        Worker(TP0, directory),
        Worker(TP1, directory),
        Party("engine", rank=Rank(tp=2), key=KEY.encode(), connect_seconds=0.3) as third,
    ):
        third.node.open("rank", *directory.address)
        refused = third.wait(Unreachable)
        assert refused.reason is Reason.TABLE_FULL
        assert "has its 2 ranks already" in refused.detail


def test_workers_do_not_exchange_kv_with_a_directory(directory: Directory) -> None:
    with Party("other", key=KEY.encode()) as other:
        other.node.open("worker", *directory.address)
        refused = other.wait(Unreachable)
    assert refused.reason is Reason.REFUSED
    assert "this is the directory of engine engine" in refused.detail


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("lookup", Freed(TP0, (("r", 0),))),
        ("router", Freed(TP0, (("r", 0),))),
        ("router", Listening(TP0, HOST, 1, "tcp", "")),
        ("rank", Status()),
        ("rank", Freed(TP1, (("r", 0),))),
        ("rank", Done(1, 1)),
    ],
)
def test_nobody_says_what_is_not_his_to_say(directory: Directory, role: str, message: Message) -> None:
    directory.keep("r")
    with Worker(TP1, directory) as other, Party("engine", key=KEY.encode()) as party:
        other.freed("r")
        party.node.open(role, *directory.address)
        party.node.send(party.wait(Up).connection, message)
        assert party.wait(Down).reason is Reason.BAD_FRAME
        assert directory.take_freed() == []
        assert directory.kept() == 1


def test_a_router_may_stay_and_ask_again(directory: Directory) -> None:
    with Party("router", key=KEY.encode()) as router:
        router.node.open("router", *directory.address)
        connection = router.wait(Up).connection
        for count in (1, 2):
            router.node.send(connection, Status())
            assert router.wait(Received, count).message.ranks == 2


def test_a_taken_port_is_one_sentence_and_leaves_nothing(directory: Directory) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError) as error:
        make(port=directory.address[1])
    assert (
        str(error.value) == f"port {directory.address[1]} on {HOST} is taken by another process; configure a free one"
    )
    eventually(lambda: threading.active_count() == threads)


def test_it_listens_on_the_port_it_was_given() -> None:
    port = free_port()
    directory = make(port=port)
    assert directory.address == (HOST, port)
    directory.close()
    directory.close()


def refusal(address: tuple[str, int], key: bytes | None, seconds: float = 5) -> HandshakeRefused:
    with pytest.raises(HandshakeRefused) as error:
        asyncio.run(query_status(*address, key, seconds))
    assert f"{address[0]}:{address[1]}" in str(error.value)
    return error.value


def test_a_status_that_can_not_be_had(directory: Directory) -> None:
    assert refusal(directory.address, b"wrong").reason is Reason.WRONG_KEY
    assert refusal(directory.address, None).reason is Reason.WRONG_KEY
    assert refusal((HOST, free_port()), None).reason is Reason.UNREACHABLE
    with listener() as silent:
        began = time.monotonic()
        lost = refusal(silent.getsockname(), None, seconds=0.3)
        assert lost.reason is Reason.TIMEOUT
        assert time.monotonic() - began < 3


def test_a_status_asked_of_what_is_no_directory() -> None:
    def serve(listening: socket.socket, answer: Callable[[Stranger], None]) -> None:
        with Stranger(listening.accept()[0]) as peer:
            answer(peer)

    for answer, reason in (
        (lambda peer: peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Reason.BAD_FRAME),
        (lambda peer: None, Reason.UNREACHABLE),
    ):
        with listener() as listening:
            thread = threading.Thread(target=serve, args=(listening, answer))
            thread.start()
            assert refusal(listening.getsockname(), None).reason is reason
            thread.join(PATIENCE)
