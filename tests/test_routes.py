"""Which look-ups and connections a worker's requests cause, in every order of answers."""

from __future__ import annotations

from neuron_pushkv.errors import Reason
from neuron_pushkv.routes import Routes
from neuron_pushkv.wire import Identity, Rank

DIRECTORY = ("10.0.0.1", 14600)
WORKER = ("10.0.0.1", 40001)


def engine(name: str = "p", ready: bool = True, rank: Rank | None = None) -> Identity:
    return Identity(name, 1, Rank(), ranks=((rank or Rank(), *WORKER),), ready=ready)


def test_one_look_up_and_one_connection_for_many_requests() -> None:
    routes = Routes(Rank())
    assert routes.want(DIRECTORY, "a") is None
    assert routes.must_look_up(DIRECTORY)
    assert routes.want(DIRECTORY, "b") is None
    assert not routes.must_look_up(DIRECTORY)
    found = routes.looked_up(DIRECTORY, engine())
    assert (found.open_worker, found.connected, found.failed) == (WORKER, [], [])
    found = routes.up(3, engine(), WORKER)
    assert (found.connection, found.connected) == (3, ["a", "b"])
    assert routes.want(DIRECTORY, "c") == 3


def test_two_names_of_one_engine_share_its_connection() -> None:
    routes = Routes(Rank())
    other = ("10.0.0.2", 14600)
    routes.want(DIRECTORY, "a")
    routes.want(other, "b")
    assert routes.looked_up(DIRECTORY, engine()).open_worker == WORKER
    assert routes.looked_up(other, engine()).open_worker is None, "it is being opened already"
    assert sorted(routes.up(3, engine(), WORKER).connected) == ["a", "b"]


def test_connection_that_the_peer_opened_is_used() -> None:
    routes = Routes(Rank())
    routes.up(4, engine(), None)
    routes.want(DIRECTORY, "a")
    found = routes.looked_up(DIRECTORY, engine())
    assert (found.connection, found.connected, found.open_worker) == (4, ["a"], None)


def test_after_a_connection_has_ended_the_directory_is_asked_again() -> None:
    routes = Routes(Rank())
    routes.want(DIRECTORY, "a")
    routes.looked_up(DIRECTORY, engine())
    routes.up(3, engine(), WORKER)
    routes.down(3)
    assert routes.want(DIRECTORY, "b") is None
    assert routes.must_look_up(DIRECTORY)


def test_late_end_of_an_old_connection_does_not_touch_the_new_one() -> None:
    routes = Routes(Rank())
    routes.want(DIRECTORY, "a")
    routes.looked_up(DIRECTORY, engine())
    routes.up(3, engine(), WORKER)
    routes.up(5, engine(), None)
    routes.down(3)
    assert routes.want(DIRECTORY, "b") == 5


def test_failures_end_all_that_wait_and_nothing_else() -> None:
    routes = Routes(Rank())
    other = ("10.0.0.2", 14600)
    for directory, request in ((DIRECTORY, "a"), (DIRECTORY, "b"), (other, "c")):
        routes.want(directory, request)
    found = routes.unreachable("lookup", DIRECTORY, Reason.UNREACHABLE, "refused")
    assert (found.failed, found.reason, found.detail) == (["a", "b"], Reason.UNREACHABLE, "refused")
    routes.looked_up(other, engine("q"))
    assert routes.unreachable("worker", WORKER, Reason.REFUSED, "no").failed == ["c"]
    assert routes.want(other, "d") is None
    assert routes.must_look_up(other)


def test_engine_that_is_not_ready_or_lacks_our_rank() -> None:
    routes = Routes(Rank(tp=1))
    for answer in (engine(ready=False, rank=Rank(tp=1)), engine()):
        routes.want(DIRECTORY, "a")
        found = routes.looked_up(DIRECTORY, answer)
        assert found.failed == ["a"]
        assert "engine p" in found.detail
