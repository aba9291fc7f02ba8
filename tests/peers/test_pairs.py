"""One connection per pair, whoever opens it, however often and when (F16), and over restarts (F12)."""

from __future__ import annotations

import os
import threading

import pytest

from neuron_pushkv.errors import HandshakeRefused, Reason
from neuron_pushkv.peers import pairs
from neuron_pushkv.peers.handshake import Ours
from neuron_pushkv.peers.link import Link
from neuron_pushkv.wire import Done, Identity, Rank, Refused, Welcome
from tests.peers.party import (
    KEY,
    PATIENCE,
    Discarded,
    Down,
    Party,
    Received,
    Stranger,
    Unreachable,
    Up,
    connect,
    eventually,
    listener,
)

OPENERS = 6
SENDS = 20


@pytest.mark.parametrize("round_", range(50))
def test_simultaneous_opens_make_one_connection(round_: int) -> None:
    names = ("a", "b") if round_ % 2 else ("b", "a")
    with Party(names[0]) as one, Party(names[1]) as two:
        addresses = {one: two.listen(), two: one.listen()}
        together = threading.Barrier(2 * OPENERS)

        def run(party: Party, slot: int) -> None:
            together.wait(PATIENCE)
            party.node.open("worker", *addresses[party])
            connection = party.wait(Up).connection
            for number in range(SENDS):
                assert party.node.send(connection, Done(slot, number))

        threads = [threading.Thread(target=run, args=(party, slot)) for party in (one, two) for slot in range(OPENERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for party in (one, two):
            party.wait(Received, OPENERS * SENDS)
            eventually(lambda party=party: len(answers(party)) == OPENERS)  # type: ignore[misc]
            assert {lost.reason for lost in party.of(Unreachable)} <= {Reason.DUPLICATE}
            assert len(party.of(Up)) == 1
            assert not party.of(Down)
            assert len(party.node._core.links) == 1


def answers(party: Party) -> list[Up | Unreachable]:
    """What its opens were answered with."""
    return [up for up in party.of(Up) if up.opened is not None] + party.of(Unreachable)


def test_the_lower_side_keeps_its_own_connection() -> None:
    """It is proving itself to the higher side, whose own attempt is refused; then the answer comes."""
    higher = Ours("z", 9, Rank(), KEY)
    with Party("a") as a, listener() as theirs:
        address = a.listen()
        a.node.open("worker", *theirs.getsockname())
        with Stranger(theirs.accept()[0]) as first, Stranger.connect(address) as second:
            acceptor = first.challenge(higher)
            acceptor.proof(first.body())
            second.prove(higher)
            refused = second.message()
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.DUPLICATE
            assert not a.of(Up)
            first.send(acceptor.welcome(Identity("z", 9, Rank())))
            assert a.wait(Up).opened == theirs.getsockname()
    assert len(a.of(Up)) == 1


def test_the_higher_side_takes_the_other_connection() -> None:
    """Its own attempt is given up, with the endpoint, and its callers are answered by the connection that came."""
    lower = Ours("a", 9, Rank(), KEY)
    with Party("z") as z, listener() as theirs:
        address = z.listen()
        for _ in range(3):
            z.node.open("worker", *theirs.getsockname())
        with Stranger(theirs.accept()[0]) as first, Stranger.connect(address) as second:
            acceptor = first.challenge(lower)
            acceptor.proof(first.body())
            second.prove(lower)
            assert isinstance(second.message(), Welcome)
            assert z.wait(Up).opened == theirs.getsockname()
            assert [lost.reason for lost in (z.wait(Unreachable, 1), z.wait(Unreachable, 2))] == [Reason.DUPLICATE] * 2
            assert z.wait(Discarded).token == 100
            assert first.ended()
            second.send(Done(3, 3))
            assert z.wait(Received).connection == z.of(Up)[0].connection
    assert len(z.of(Up)) == 1


def test_a_refused_duplicate_waits_for_the_connection_that_stays() -> None:
    lower = Ours("a", 9, Rank(), KEY)
    with Party("z") as z, listener() as theirs:
        address = z.listen()
        z.node.open("worker", *theirs.getsockname())
        with Stranger(theirs.accept()[0]) as first:
            acceptor = first.challenge(lower)
            acceptor.proof(first.body())
            first.send(Refused(Reason.DUPLICATE, "another connection stays"))
            assert first.ended()
        assert not z.of(Unreachable)
        with Stranger.connect(address) as second:
            second.prove(lower)
            assert isinstance(second.message(), Welcome)
            assert z.wait(Up).opened == theirs.getsockname()


def test_a_duplicate_that_never_comes_is_unreachable() -> None:
    lower = Ours("a", 9, Rank(), KEY)
    with Party("z", connect_seconds=0.4) as z, listener() as theirs:
        z.node.open("worker", *theirs.getsockname())
        while not z.of(Unreachable):
            theirs.settimeout(0.1)
            try:
                peer = Stranger(theirs.accept()[0])
            except TimeoutError:
                continue
            with peer:
                acceptor = peer.challenge(lower)
                acceptor.proof(peer.body())
                peer.send(Refused(Reason.DUPLICATE, "another connection stays"))
                peer.ended()
        lost = z.wait(Unreachable)
        assert lost.reason is Reason.UNREACHABLE
        assert "it has not come up within 0.4 s" in lost.detail


def test_opening_what_the_other_side_has_opened() -> None:
    with Party("a") as a, Party("b") as b:
        here, _ = connect(a, b)
        b.node.open("worker", *a.listen())
        assert b.wait(Unreachable).reason is Reason.DUPLICATE
        assert a.node.send(here.connection, Done(1, 1))
        b.wait(Received)
        assert len(a.of(Up)) == len(b.of(Up)) == 1


def test_one_peer_under_two_addresses_is_one_pair() -> None:
    with Party("a") as a, Party("b") as b:
        first, second = b.listen(), b.listen()
        a.node.open("worker", *first)
        a.node.open("worker", *second)
        a.wait(Up)
        assert a.wait(Unreachable).reason is Reason.DUPLICATE
        eventually(lambda: len(b.node._core.links) == 1)
        assert len(a.of(Up)) == 1
        assert not a.of(Down)


def test_ranks_of_one_engine_are_pairs_of_their_own() -> None:
    with Party("a", rank=Rank(tp=0)) as a0, Party("a", rank=Rank(tp=1)) as a1, Party("b") as b:
        address = b.listen()
        a0.node.open("worker", *address)
        a1.node.open("worker", *address)
        a0.wait(Up)
        a1.wait(Up)
        b.wait(Up, 2)
        assert not b.of(Down)


def test_other_roles_have_as_many_connections_as_they_like() -> None:
    with Party("a") as a, Party("b") as b:
        address = b.listen()
        for role in ("lookup", "lookup", "router"):
            a.node.open(role, *address)
        a.wait(Up, 3)
        b.wait(Up, 3)
        assert sorted(up.role for up in b.of(Up)) == ["lookup", "lookup", "router"]


def test_restarts_under_one_name_and_port() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count is all

    with Party("p") as p:
        first = Party("d", incarnation=0)
        host, port = first.listen()
        p.node.open("worker", host, port)
        p.wait(Up)
        eventually(lambda: len(first.node._core.sockets) == 1)
        flat = descriptors()
        d = first
        for life in range(1, 21):
            d.node.close()
            d.check_once_each()
            assert p.wait(Down, life).connection == p.of(Up)[life - 1].connection
            d = Party("d", incarnation=life)
            p.node.open("worker", host, port)
            assert d.node.listen(host, port) == (host, port)
            up = p.wait(Up, life + 1)
            assert up.theirs.incarnation == life
            assert p.node.send(up.connection, Done(life, 1))
            assert d.wait(Received).message == Done(life, 1)
            eventually(lambda: descriptors() == flat)
        d.node.close()
    assert not p.of(Unreachable)


def test_a_new_incarnation_ends_what_is_left_of_the_old_one() -> None:
    """The old process is a corpse whose connection nobody has closed, and there is no way back for it."""
    with Party("a") as a:
        address = a.listen()
        with Stranger.connect(address) as old, Stranger.connect(address) as new, Stranger.connect(address) as late:
            old.prove(Ours("x", 1, Rank(), KEY))
            assert isinstance(old.message(), Welcome)
            before = a.wait(Up)
            new.prove(Ours("x", 2, Rank(), KEY))
            assert isinstance(new.message(), Welcome)
            down = a.wait(Down)
            assert down == (before.connection, Reason.PEER_LOST, "engine x has been restarted")
            assert old.ended()
            late.prove(Ours("x", 1, Rank(), KEY))
            refused = late.message()
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.STALE_INCARNATION
            new.send(Done(1, 1))
            assert a.wait(Received).connection == a.wait(Up, 2).connection
            kinds = [type(event) for event in a.events]
            assert kinds == [Up, Down, Up, Received], "the old one's down comes before the new one's up"


def test_the_same_incarnation_twice_keeps_the_first() -> None:
    with Party("a") as a:
        address = a.listen()
        with Stranger.connect(address) as first, Stranger.connect(address) as second:
            first.prove(Ours("x", 1, Rank(), KEY))
            assert isinstance(first.message(), Welcome)
            second.prove(Ours("x", 1, Rank(), KEY))
            refused = second.message()
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.DUPLICATE
            first.send(Done(1, 1))
            a.wait(Received)


def test_a_lost_connection_can_be_opened_again_at_once() -> None:
    """Even before the acceptor has noticed that the first one is gone: it answers DUPLICATE, and is asked again."""
    with Party("a") as a, Party("b") as b:
        address = b.listen()
        for count in range(1, 31):
            a.node.open("worker", *address)
            here = a.wait(Up, count)
            a.node._loop.call_soon_threadsafe(a.node._core.links[here.connection].end, Reason.PEER_LOST, "cut")
            a.wait(Down, count)
        b.wait(Down, 30)
        assert not a.of(Unreachable)


def test_what_is_remembered_of_incarnations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "MAX_REMEMBERED", 3)
    table = pairs.Pairs(("me", Rank()))
    link: Link = object()  # type: ignore[assignment]
    for incarnation in range(10):
        theirs = Identity("x", incarnation, Rank())
        table.add(theirs, link)
        table.remove(theirs, link)
    with pytest.raises(HandshakeRefused, match="incarnation 8 of engine x was replaced by 9"):
        table.check(("x", Rank()), 8)
    table.check(("x", Rank()), 9)
    table.check(("x", Rank()), 1)
    for number in range(10):
        table.add(Identity(f"y{number}", 1, Rank()), link)
    assert len(table._newest) == len(table._replaced) == 3
