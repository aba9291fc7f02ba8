"""What a bad peer sends hurts nobody but itself (F19)."""

from __future__ import annotations

import random
import struct

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_pushkv.errors import Reason
from neuron_pushkv.peers import accepting
from neuron_pushkv.peers.handshake import Opener, Ours
from neuron_pushkv.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    Bye,
    Done,
    Rank,
    Refused,
    Register,
    Status,
    Welcome,
    encode,
)
from tests.peers.party import KEY, Down, Party, Received, Stranger, Up, connect, eventually

STRANGER = Ours("stranger", 7, Rank(), KEY)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


GOOD = encode(Register("t", 1, 1, 0, 16, b"s", b"e", (bytes(8),)))[HEADER_BYTES:]


def changed(**fields: object) -> bytes:
    """A registration with some fields replaced by others."""
    return frame(msgspec.msgpack.encode({**msgspec.msgpack.decode(GOOD), **fields}))


POISON = {
    "garbage": frame(b"\xc1garbage"),
    "empty": frame(b""),
    "truncated": frame(GOOD[:-3]),
    "trailing": frame(GOOD + b"\x00"),
    "oversized": struct.pack(">I", MAX_FRAME_BYTES + 1),
    "huge": b"\xff\xff\xff\xff",
    "not tagged": frame(msgspec.msgpack.encode({"slot": 1})),
    "unknown tag": changed(type="Surprise"),
    "wrong type": changed(slot="one"),
    "slot too wide": changed(slot=1 << 20),
    "negative slot": changed(slot=-1),
    "epoch too wide": changed(epoch=1 << 12),
    "endless name": changed(transfer="t" * 513),
    "blocks no tuple": changed(blocks=7),
    "claims a huge array": frame(GOOD[:-1].replace(b"\x91\x92\x01\x02", b"\xdd\xff\xff\xff\xff")),
    "deeply nested": frame(b"\x82\xa4type\xa4Ping\xa1z" + b"\x91" * 200_000 + b"\xc0"),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_a_bad_frame_ends_its_connection_and_no_other(poison: bytes) -> None:
    with Party("a") as a, Party("b") as b:
        here, there = connect(b, a)
        with Stranger.connect(a.listen()) as stranger:
            stranger.prove(STRANGER)
            assert isinstance(stranger.message(), Welcome)
            stranger.send(encode(Done(5, 5)) + poison)
            assert a.wait(Received).message == Done(5, 5), "what came before it counts"
            assert stranger.message() == Bye(Reason.BAD_FRAME)
            assert stranger.ended()
        assert a.wait(Down).reason is Reason.BAD_FRAME
        assert a.node.refusals() == {Reason.BAD_FRAME: 1}
        assert b.node.send(here.connection, Done(1, 2))
        assert a.wait(Received, 2) == (there.connection, Done(1, 2))
        assert len(a.of(Down)) == 1


def test_a_frame_that_never_ends_delivers_nothing() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.prove(STRANGER)
        stranger.message()
        stranger.send(frame(GOOD)[:-1])
        stranger.socket.close()
        assert a.wait(Down).reason is Reason.PEER_LOST
    assert not a.of(Received)


def test_frames_may_come_byte_by_byte() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.prove(STRANGER)
        stranger.message()
        for byte in encode(Done(1, 2)) + encode(Status()):
            stranger.send(bytes([byte]))
        assert a.wait(Received, 2).message == Status()
        assert a.of(Received)[0].message == Done(1, 2)


def test_before_the_handshake_only_short_frames_are_read() -> None:
    with Party("a") as a, Stranger.connect(a.listen()) as stranger:
        stranger.send(struct.pack(">I", MAX_HELLO_BYTES + 1))
        answer = stranger.message()
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.BAD_FRAME
        assert "over the limit of 4096" in answer.detail


def test_the_largest_frame_arrives() -> None:
    with Party("a") as a, Party("b") as b:
        here, _ = connect(a, b)
        blocks = (bytes(15 << 20),)
        message = Register("t", 1, 1, 0, 16, b"", b"", blocks)
        assert len(encode(message)) > MAX_FRAME_BYTES // 2
        assert a.node.send(here.connection, message)
        arrived = b.wait(Received).message == message  # A failure must not print all of it.
        assert arrived


def test_strangers_beyond_the_limit_cost_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "MAX_STRANGERS", 4)
    with Party("a") as a, Party("b") as b:
        address = a.listen()
        strangers = [Stranger.connect(address) for _ in range(10)]
        for stranger in strangers[:6]:
            assert stranger.ended()
        b.node.open("worker", *address)
        b.wait(Up)
        assert strangers[6].ended()
        assert a.node.refusals() == {Reason.TABLE_FULL: 7}
        for stranger in strangers:
            stranger.socket.close()


@pytest.fixture(scope="module")
def besieged() -> tuple[Party, Party, Up, tuple[str, int]]:
    """A node that random bytes are sent to, and a good peer of it."""
    a, b = Party("a"), Party("b")
    here, _ = connect(b, a)
    yield a, b, here, a.listen()
    b.node.close()
    a.node.close()
    a.check_once_each()


# One example sends 40 strings over as many connections: thousands in all.
@settings(max_examples=75, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), after=st.sampled_from(["nothing", "hello", "proof"]), framed=st.booleans())
def test_random_bytes_hurt_nobody(
    besieged: tuple[Party, Party, Up, tuple[str, int]], seed: int, after: str, framed: bool
) -> None:
    a, b, here, address = besieged
    chance = random.Random(seed)
    received = len(a.of(Received))
    strangers = []
    for number in range(40):
        stranger = Stranger.connect(address)
        strangers.append(stranger)
        if after == "hello":
            stranger.send(Opener(STRANGER, "worker").hello())
        elif after == "proof":
            stranger.prove(Ours(f"stranger {seed} {number}", 1, Rank(), KEY))
        junk = chance.randbytes(chance.randrange(1, 200))
        stranger.send(frame(junk) if framed else junk)
        stranger.socket.shutdown(1)
    assert b.node.send(here.connection, Done(seed % 1000, 1))
    a.wait(Received, received + 1)
    for stranger in strangers:
        assert stranger.ended()
        stranger.socket.close()
    with a._changed:
        a.events = [event for event in a.events if not isinstance(event, Received)]
    assert not b.of(Down)


def test_nobody_is_left_over_after_a_siege() -> None:
    with Party("a") as a, Party("b") as b:
        address = a.listen()
        for _ in range(50):
            Stranger.connect(address).socket.close()
        b.node.open("worker", *address)
        b.wait(Up)
        core = a.node._core
        eventually(lambda: len(core.sockets) == 1 and not a.node._strangers._accepting)
        assert a.node.refusals() == {}
