"""Which look-ups and connections a worker's requests cause, in every order of answers."""

from __future__ import annotations

from neuron_pushkv.errors import Reason
from neuron_pushkv.routes import Routes
from neuron_pushkv.wire import Identity, Rank

DIRECTORY = ("10.0.0.1", 14600)
WORKER = ("10.0.0.1", 40001)
NOW = 100.0
PATIENCE = 2.0


def engine(name: str = "p", ready: bool = True, rank: Rank | None = None) -> Identity:
    return Identity(name, 1, Rank(), ranks=((rank or Rank(), *WORKER),), ready=ready)


def test_one_look_up_and_one_connection_for_many_requests() -> None:
    routes = Routes(Rank(), PATIENCE)
    assert routes.want(DIRECTORY, "a", NOW) is None
    assert routes.must_look_up(DIRECTORY)
    assert routes.want(DIRECTORY, "b", NOW) is None
    assert not routes.must_look_up(DIRECTORY)
    found = routes.looked_up(DIRECTORY, engine(), NOW)
    assert (found.open_worker, found.connected, found.failed) == (WORKER, [], [])
    found = routes.up(3, engine(), WORKER)
    assert (found.connection, found.connected) == (3, ["a", "b"])
    assert routes.want(DIRECTORY, "c", NOW) == 3


def test_two_names_of_one_engine_share_its_connection() -> None:
    routes = Routes(Rank(), PATIENCE)
    other = ("10.0.0.2", 14600)
    routes.want(DIRECTORY, "a", NOW)
    routes.want(other, "b", NOW)
    assert routes.looked_up(DIRECTORY, engine(), NOW).open_worker == WORKER
    assert routes.looked_up(other, engine(), NOW).open_worker is None, "it is being opened already"
    assert sorted(routes.up(3, engine(), WORKER).connected) == ["a", "b"]


def test_connection_that_the_peer_opened_is_used() -> None:
    routes = Routes(Rank(), PATIENCE)
    routes.up(4, engine(), None)
    routes.want(DIRECTORY, "a", NOW)
    found = routes.looked_up(DIRECTORY, engine(), NOW)
    assert (found.connection, found.connected, found.open_worker) == (4, ["a"], None)


def test_after_a_connection_has_ended_the_directory_is_asked_again() -> None:
    routes = Routes(Rank(), PATIENCE)
    routes.want(DIRECTORY, "a", NOW)
    routes.looked_up(DIRECTORY, engine(), NOW)
    routes.up(3, engine(), WORKER)
    routes.down(3)
    assert routes.want(DIRECTORY, "b", NOW) is None
    assert routes.must_look_up(DIRECTORY)


def test_late_end_of_an_old_connection_does_not_touch_the_new_one() -> None:
    routes = Routes(Rank(), PATIENCE)
    routes.want(DIRECTORY, "a", NOW)
    routes.looked_up(DIRECTORY, engine(), NOW)
    routes.up(3, engine(), WORKER)
    routes.up(5, engine(), None)
    routes.down(3)
    assert routes.want(DIRECTORY, "b", NOW) == 5


def test_failures_end_all_that_wait_and_nothing_else() -> None:
    routes = Routes(Rank(), PATIENCE)
    other = ("10.0.0.2", 14600)
    for directory, request in ((DIRECTORY, "a"), (DIRECTORY, "b"), (other, "c")):
        routes.want(directory, request, NOW)
    found = routes.unreachable("lookup", DIRECTORY, Reason.UNREACHABLE, "refused")
    assert (found.failed, found.reason, found.detail) == (["a", "b"], Reason.UNREACHABLE, "refused")
    routes.looked_up(other, engine("q"), NOW)
    assert routes.unreachable("worker", WORKER, Reason.REFUSED, "no").failed == ["c"]
    assert routes.want(other, "d", NOW) is None
    assert routes.must_look_up(other)


def test_data_parallel_rank_is_no_part_of_the_shard() -> None:
    """Each data parallel rank is an engine of its own, with its own directory: any of them may serve any other."""
    routes = Routes(Rank(dp=0, tp=1), PATIENCE)
    routes.want(DIRECTORY, "a", NOW)
    assert routes.looked_up(DIRECTORY, engine(rank=Rank(dp=3, tp=1)), NOW).open_worker == WORKER


def test_engine_that_lacks_our_rank() -> None:
    routes = Routes(Rank(tp=1), PATIENCE)
    routes.want(DIRECTORY, "a", NOW)
    found = routes.looked_up(DIRECTORY, engine(), NOW)
    assert found.failed == ["a"]
    assert "engine p" in found.detail


def test_engine_that_is_starting_is_asked_again_for_a_while() -> None:
    routes = Routes(Rank(), PATIENCE)
    routes.want(DIRECTORY, "a", NOW)
    now = NOW
    while now < NOW + PATIENCE:
        found = routes.looked_up(DIRECTORY, engine(ready=False), now)
        assert (found.failed, found.open_worker) == ([], None)
        assert routes.due(now) == []
        now += 0.25
        assert routes.due(now) == [DIRECTORY]
        assert routes.due(now) == []
    assert routes.looked_up(DIRECTORY, engine(ready=False), now).failed == ["a"]
    assert routes.due(now + 10) == []
    routes.want(DIRECTORY, "b", now)
    assert routes.looked_up(DIRECTORY, engine(), now).open_worker == WORKER
