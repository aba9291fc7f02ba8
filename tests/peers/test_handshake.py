"""Who gets a connection, and what both sides hear when one doesn't (F15, F21)."""

from __future__ import annotations

import logging
import socket
import time

import msgspec
import pytest

from neuron_pushkv import wire
from neuron_pushkv.errors import ConfigError, HandshakeRefused, Reason
from neuron_pushkv.peers.handshake import Acceptor, Opener, Ours
from neuron_pushkv.wire import (
    HEADER_BYTES,
    Challenge,
    Done,
    Hello,
    Identity,
    Proof,
    Rank,
    Refused,
    Register,
    Welcome,
    encode,
    proof,
)
from tests.peers.party import HOST, KEY, Discarded, Down, Party, Received, Stranger, Unreachable, Up, connect, listener

STRANGER = Ours("stranger", 7, Rank(), KEY)


def test_both_sides_learn_each_other() -> None:
    with Party("a", incarnation=11, rank=Rank(tp=1)) as a, Party("b", incarnation=22) as b:
        address = b.listen()
        a.node.open("worker", *address)
        here, there = a.wait(Up), b.wait(Up)
        assert (here.role, here.theirs, here.token, here.opened) == ("worker", Identity("b", 22, Rank()), 100, address)
        assert (there.role, there.theirs, there.opened) == ("worker", Identity("a", 11, Rank(tp=1)), None)
        assert a.node.send(here.connection, Done(1, 2))
        assert b.wait(Received) == (there.connection, Done(1, 2))
        assert b.node.send(there.connection, Done(3, 4))
        assert a.wait(Received) == (here.connection, Done(3, 4))
    assert a.of(Down)[0].reason is Reason.SHUTDOWN


def test_without_keys_on_loopback() -> None:
    with Party("a", key=None) as a, Party("b", key=None) as b:
        connect(a, b)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(KEY, b"another"), (KEY, None), (None, KEY)], ids=["wrong", "theirs missing", "ours missing"]
)
def test_unequal_keys_are_refused_on_both_sides(ours: bytes | None, theirs: bytes | None) -> None:
    with Party("a", key=ours) as a, Party("b", key=theirs) as b:
        a.node.open("worker", *b.listen())
        refused = a.wait(Unreachable)
        assert refused.reason is Reason.WRONG_KEY
        assert "fleet_key_file" in refused.detail
        assert a.node.refusals() == {Reason.WRONG_KEY: 1}
        a.node.close()
        b.node.close()
        assert b.node.refusals() == {Reason.WRONG_KEY: 1}
        assert b.node.refusals() == {}, "counts are since the last call"
    assert not b.of(Up)


def test_an_opener_without_the_key_is_refused() -> None:
    """It can't check the acceptor, so it goes on in bad faith."""
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        hello = Hello(wire.PROTOCOL_MAJOR, 0, "worker", "x", 1, Rank(), bytes(32))
        stranger.send(hello)
        assert isinstance(stranger.message(), Challenge)
        stranger.send(Proof(bytes(32), Identity("x", 1, Rank())))
        answer = stranger.message()
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.WRONG_KEY
        assert stranger.ended()
        assert a.node.refusals() == {Reason.WRONG_KEY: 1}
    assert not a.events


def test_the_acceptors_proof_is_no_proof_of_an_opener() -> None:
    """Reflected, or computed for the other side, it is worth nothing."""
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        hello = Hello(wire.PROTOCOL_MAJOR, 0, "worker", "x", 1, Rank(), bytes(32))
        stranger.send(hello)
        challenge = stranger.message()
        assert isinstance(challenge, Challenge)
        assert challenge.proof == proof(KEY, "acceptor", encode(hello)[HEADER_BYTES:], challenge)
        stranger.send(Proof(challenge.proof, Identity("x", 1, Rank())))
        answer = stranger.message()
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.WRONG_KEY


def test_replayed_bytes_get_nowhere() -> None:
    """What an opener sent in a good handshake, byte by byte, sent again."""
    with Party("a") as a:
        address = a.listen()
        opener = Opener(STRANGER, "worker")
        with Stranger.connect(address) as first:
            first.send(opener.hello())
            opener.challenge(first.body())
            proved = opener.proof(Identity("stranger", 7, Rank()))
            first.send(proved)
            assert isinstance(first.message(), Welcome)
            a.wait(Up)
        a.wait(Down)
        with Stranger.connect(address) as second:
            second.send(opener.hello())
            second.body()
            second.send(proved)
            answer = second.message()
            assert isinstance(answer, Refused)
            assert answer.reason is Reason.WRONG_KEY
        with Stranger.connect(address) as third:
            third.send(opener.hello() + proved)
            third.body()
            assert isinstance(third.message(), Refused)
        assert a.node.refusals() == {Reason.WRONG_KEY: 2}
    assert len(a.of(Up)) == 1


def test_a_replayed_acceptor_gets_nowhere() -> None:
    """A challenge recorded from the real side doesn't fit the opener's new nonce."""
    with Party("a") as a, Party("b") as b, listener() as fake:
        with Stranger.connect(b.listen()) as curious:
            curious.send(Opener(STRANGER, "worker").hello())
            recorded = curious.body()
        a.node.open("worker", *fake.getsockname())
        with Stranger(fake.accept()[0]) as impostor:
            impostor.body()
            impostor.send(len(recorded).to_bytes(4, "big") + recorded)
            answer = impostor.message()
            assert isinstance(answer, Refused)
            assert answer.reason is Reason.WRONG_KEY
        assert a.wait(Unreachable).reason is Reason.WRONG_KEY


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_listener_without_a_key_is_for_loopback_only(host: str) -> None:
    with Party("a", key=None) as a, pytest.raises(ConfigError, match=f"host {host} can be .* set fleet_key_file"):
        a.node.listen(host, 0)


def test_with_a_key_it_may_listen_anywhere() -> None:
    with Party("a") as a:
        assert a.node.listen("0.0.0.0", 0)[1] > 0


def test_a_taken_port_is_one_sentence() -> None:
    with Party("a") as a, listener() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            a.node.listen(HOST, port)
        assert str(error.value) == f"port {port} on {HOST} is taken by another process; configure a free one"


def test_a_host_that_is_not_ours_is_one_sentence() -> None:
    with Party("a") as a, pytest.raises(ConfigError, match=r"^can't listen on 192\.0\.2\.1:0: Cannot assign"):
        a.node.listen("192.0.2.1", 0)


def test_another_major_version_is_refused_with_both_named() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.send(Hello(9, 3, "worker", "x", 1, Rank(), bytes(32)))
        answer = stranger.message()
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.VERSION_MISMATCH
        assert f"version 9 was offered, {wire.PROTOCOL_MAJOR} is spoken here" in answer.detail
        assert a.node.refusals() == {Reason.VERSION_MISMATCH: 1}


def test_the_opener_hears_of_another_major_version() -> None:
    with Party("a") as a, listener() as other:
        a.node.open("worker", *other.getsockname())
        with Stranger(other.accept()[0]) as newer:
            assert isinstance(newer.message(), Hello)
            newer.send(Refused(Reason.VERSION_MISMATCH, "protocol version 1 was offered, 2 is spoken here"))
            refused = a.wait(Unreachable)
    assert refused.reason is Reason.VERSION_MISMATCH
    assert "version 1 was offered, 2 is spoken here" in refused.detail


def test_a_later_minor_version_may_add_fields() -> None:
    """Also to the Hello, which the proofs cover."""

    class LaterHello(Hello, frozen=True, tag="Hello"):
        colour: str

    with Party("a") as a, Stranger.connect(a.listen()) as later:
        hello = encode(LaterHello(wire.PROTOCOL_MAJOR, 5, "worker", "x", 3, Rank(), bytes(32), "green"))
        later.send(hello)
        challenge = later.message()
        assert isinstance(challenge, Challenge)
        later.send(Proof(proof(KEY, "opener", hello[HEADER_BYTES:], challenge), Identity("x", 3, Rank())))
        welcome = later.message()
        assert isinstance(welcome, Welcome)
        assert welcome.minor == 0
        assert a.wait(Up).theirs.engine_id == "x"


@pytest.mark.parametrize("refuser", ["acceptor", "opener"])
def test_a_refusal_by_check_reaches_both_sides(refuser: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    why = HandshakeRefused(Reason.MODEL_MISMATCH, "model differs: llama here, qwen there")
    by_opener = refuser == "opener"
    with Party("a", refuse=why if by_opener else None) as a, Party("b", refuse=None if by_opener else why) as b:
        a.node.open("worker", *b.listen())
        refused = a.wait(Unreachable)
        assert refused.reason is Reason.MODEL_MISMATCH
        assert "llama here, qwen there" in refused.detail
        assert a.wait(Discarded).token == 100
        a.node.close()
        b.node.close()
        assert a.node.refusals() == {Reason.MODEL_MISMATCH: 1}
        if by_opener:
            # The acceptor had nothing against it, so it was up for a moment.
            assert b.of(Down)[0].reason is Reason.MODEL_MISMATCH
            assert "llama here, qwen there" in b.of(Down)[0].detail
        else:
            assert b.node.refusals() == {Reason.MODEL_MISMATCH: 1}
            assert not b.events
    assert sum("llama here, qwen there" in record.getMessage() for record in caplog.records) >= 1


def test_a_peer_must_be_who_it_proved_to_be() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        opener = Opener(STRANGER, "worker")
        stranger.send(opener.hello())
        opener.challenge(stranger.body())
        stranger.send(opener.proof(Identity("somebody else", 7, Rank())))
        answer = stranger.message()
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.BAD_FRAME
        assert "stranger" in answer.detail
        assert "somebody else" in answer.detail
    assert not a.of(Up)


def test_an_engine_does_not_connect_to_itself() -> None:
    with Party("a") as a:
        a.node.open("worker", *a.listen())
        refused = a.wait(Unreachable)
        assert refused.reason is Reason.REFUSED
        assert "give each engine its own engine_id" in refused.detail


@pytest.mark.parametrize("method", ["identity", "check"])
@pytest.mark.parametrize("side", ["opener", "acceptor"])
def test_a_bug_in_the_handler_ends_that_handshake_only(
    method: str, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Party("a") as a, Party("b") as b, Party("c") as c:
        _, there = connect(a, b)
        buggy = a if side == "opener" else b
        buggy.raising.add(method)
        opener, acceptor = (a, c) if side == "opener" else (c, b)
        opener.node.open("worker", *acceptor.listen())
        assert opener.wait(Unreachable).reason is Reason.INTERNAL
        assert buggy.node.refusals() == {Reason.INTERNAL: 1}
        assert f"RuntimeError: a bug in {method}" in caplog.text
        buggy.raising.clear()
        assert b.node.send(there.connection, Done(1, 1))
        a.wait(Received)
        buggy.raising.add(method)


@pytest.mark.parametrize("method", ["up", "received", "down", "unreachable"])
def test_a_bug_in_the_handler_ends_that_connection_only(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with Party("a") as a, Party("b", connect_seconds=0.2) as b, Party("c") as c:
        connect(c, b)
        b.raising.add(method)
        a.node.open("worker", *b.listen())
        here = a.wait(Up)
        a.node.send(here.connection, Done(1, 1))
        match method:
            case "down":
                a.node.drop(here.connection, Reason.SHUTDOWN, "enough")
                b.wait(Down)
            case "unreachable":
                b.node.open("worker", HOST, closed_port())
                b.wait(Unreachable)
            case _:
                assert a.wait(Down).reason is Reason.INTERNAL
                assert b.wait(Down).reason is Reason.INTERNAL
        b.raising.clear()
        there = b.of(Up)[0]
        assert b.node.send(there.connection, Done(2, 2))
        assert c.wait(Received).message == Done(2, 2)
        assert b.node.refusals()[Reason.INTERNAL] == 1
    assert f"RuntimeError: a bug in {method}" in caplog.text


def closed_port() -> int:
    """One that nobody listens on."""
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


def test_nothing_but_hello_comes_first() -> None:
    message = Register("t", 1, 1, 0, 16, b"", b"", (bytes(4),))
    with Party("a") as a:
        address = a.listen()
        for first in (message, Done(1, 1), Refused(Reason.SHUTDOWN, "")):
            with Stranger.connect(address) as stranger:
                stranger.send(first)
                assert stranger.ended()
        assert not a.events
        assert a.node.refusals() == {Reason.BAD_FRAME: 2, Reason.SHUTDOWN: 1}


def test_messages_between_hello_and_welcome_are_refused() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.send(Opener(STRANGER, "worker").hello())
        assert isinstance(stranger.message(), Challenge)
        stranger.send(Done(1, 1))
        answer = stranger.message()
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.BAD_FRAME
        assert "Done came where Proof was due" in answer.detail


def test_a_second_handshake_on_one_connection_ends_it() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.prove(STRANGER)
        assert isinstance(stranger.message(), Welcome)
        stranger.send(Opener(STRANGER, "worker").hello())
        assert a.wait(Down).reason is Reason.BAD_FRAME


def test_a_handshake_that_stops_half_way_is_ended_in_time() -> None:
    with Party("a", connect_seconds=0.3) as a, Stranger.connect(a.listen()) as stranger:
        began = time.monotonic()
        stranger.send(Opener(STRANGER, "worker").hello())
        assert isinstance(stranger.message(), Challenge)
        answer = stranger.message()
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.TIMEOUT
        assert 0.2 < time.monotonic() - began < 5
        assert a.node.refusals() == {Reason.TIMEOUT: 1}


def test_sides_of_the_handshake_agree_without_sockets() -> None:
    ours, theirs = Ours("a", 1, Rank(), KEY), Ours("b", 2, Rank(tp=3), KEY)
    opener, acceptor = Opener(ours, "lookup"), Acceptor(theirs)
    hello, challenge = acceptor.hello(opener.hello()[HEADER_BYTES:])
    assert hello.role == "lookup"
    assert opener.challenge(challenge[HEADER_BYTES:]).rank == Rank(tp=3)
    identity = Identity("a", 1, Rank(), model="m")
    assert acceptor.proof(opener.proof(identity)[HEADER_BYTES:]) == identity
    answer = msgspec.structs.replace(identity, engine_id="b", incarnation=2, rank=Rank(tp=3))
    assert opener.welcome(acceptor.welcome(answer)[HEADER_BYTES:]) == answer
