"""Which look-ups and connections a worker's requests cause, in every order of answers."""

from __future__ import annotations

from neuron_pushkv.contacts.routes import Found, Routes
from neuron_pushkv.errors import LayoutError, Reason
from neuron_pushkv.wire import Identity, Rank

DIRECTORY = ("10.0.0.1", 14600)
OTHER = ("10.0.0.2", 14600)
WORKER = ("10.0.0.1", 40001)
SECOND = ("10.0.0.1", 40002)
NOW = 100.0
PATIENCE = 2.0
TP0, TP1 = Rank(tp=0), Rank(tp=1)


def routes_to(*wanted: Rank) -> Routes:
    """To an engine of which those ranks hold what we need."""
    return Routes(lambda ranks: wanted or (TP0,), PATIENCE)


def engine(name: str = "p", ready: bool = True, ranks: int = 1) -> Identity:
    """A directory's answer."""
    workers = ((TP0, *WORKER), (TP1, *SECOND))[:ranks]
    return Identity(name, 1, Rank(), ranks=workers, ready=ready)


def worker(name: str = "p", rank: Rank = TP0) -> Identity:
    return Identity(name, 1, rank)


def goes_on(found: Found | None) -> tuple[dict[Rank, int], list[str]]:
    assert found is not None
    return dict(found.connections), found.connected


def test_one_look_up_and_one_connection_for_many_requests() -> None:
    routes = routes_to()
    assert routes.want(DIRECTORY, "a", NOW) is None
    assert routes.must_look_up(DIRECTORY)
    assert routes.want(DIRECTORY, "b", NOW) is None
    assert not routes.must_look_up(DIRECTORY)
    found = routes.looked_up(DIRECTORY, engine(), NOW)
    assert (found.open_workers, found.connected, found.failed) == ([WORKER], [], [])
    (found,) = routes.up(3, worker(), WORKER)
    assert goes_on(found) == ({TP0: 3}, ["a", "b"])
    assert found.ranks == (TP0,)
    assert goes_on(routes.want(DIRECTORY, "c", NOW)) == ({TP0: 3}, ["c"])


def test_request_goes_on_when_all_ranks_that_hold_a_share_are_connected() -> None:
    routes = routes_to(TP0, TP1)
    routes.want(DIRECTORY, "a", NOW)
    assert routes.looked_up(DIRECTORY, engine(ranks=2), NOW).open_workers == [WORKER, SECOND]
    assert routes.up(3, worker(rank=TP1), SECOND) == []
    (found,) = routes.up(4, worker(rank=TP0), WORKER)
    assert goes_on(found) == ({TP0: 4, TP1: 3}, ["a"])


def test_only_the_ranks_that_are_not_connected_are_called() -> None:
    routes = routes_to(TP0, TP1)
    routes.up(3, worker(rank=TP0), None)
    routes.want(DIRECTORY, "a", NOW)
    assert routes.looked_up(DIRECTORY, engine(ranks=2), NOW).open_workers == [SECOND]


def test_end_of_one_rank_while_another_is_called_starts_over_for_those_that_wait() -> None:
    routes = routes_to(TP0, TP1)
    routes.want(DIRECTORY, "a", NOW)
    routes.looked_up(DIRECTORY, engine(ranks=2), NOW)
    routes.up(3, worker(rank=TP0), WORKER)
    routes.down(3)
    assert routes.due(NOW) == [DIRECTORY]
    assert routes.looked_up(DIRECTORY, engine(ranks=2), NOW).open_workers == [WORKER], "the other is being called"
    routes.up(4, worker(rank=TP0), WORKER)
    (found,) = routes.up(5, worker(rank=TP1), SECOND)
    assert goes_on(found) == ({TP0: 4, TP1: 5}, ["a"])


def test_second_connection_for_a_pair_fails_nobody() -> None:
    """The other side was quicker; its connection's up is, or was, what serves."""
    routes = routes_to(TP0, TP1)
    routes.want(DIRECTORY, "a", NOW)
    routes.looked_up(DIRECTORY, engine(ranks=2), NOW)
    routes.up(3, worker(rank=TP0), None)
    assert routes.unreachable("worker", WORKER, Reason.DUPLICATE, "") == Found()
    (found,) = routes.up(4, worker(rank=TP1), SECOND)
    assert found.connected == ["a"]


def test_two_names_of_one_engine_share_its_connection() -> None:
    routes = routes_to()
    routes.want(DIRECTORY, "a", NOW)
    routes.want(OTHER, "b", NOW)
    assert routes.looked_up(DIRECTORY, engine(), NOW).open_workers == [WORKER]
    assert routes.looked_up(OTHER, engine(), NOW).open_workers == [], "it is being opened already"
    assert sorted(request for found in routes.up(3, worker(), WORKER) for request in found.connected) == ["a", "b"]


def test_connection_that_the_peer_opened_is_used() -> None:
    routes = routes_to()
    routes.up(4, worker(), None)
    routes.want(DIRECTORY, "a", NOW)
    found = routes.looked_up(DIRECTORY, engine(), NOW)
    assert (goes_on(found), found.open_workers) == (({TP0: 4}, ["a"]), [])


def test_after_a_connection_has_ended_the_directory_is_asked_again() -> None:
    routes = routes_to()
    routes.want(DIRECTORY, "a", NOW)
    routes.looked_up(DIRECTORY, engine(), NOW)
    routes.up(3, worker(), WORKER)
    routes.down(3)
    assert routes.want(DIRECTORY, "b", NOW) is None
    assert routes.must_look_up(DIRECTORY)


def test_late_end_of_an_old_connection_does_not_touch_the_new_one() -> None:
    routes = routes_to()
    routes.want(DIRECTORY, "a", NOW)
    routes.looked_up(DIRECTORY, engine(), NOW)
    routes.up(3, worker(), WORKER)
    routes.up(5, worker(), None)
    routes.down(3)
    assert goes_on(routes.want(DIRECTORY, "b", NOW)) == ({TP0: 5}, ["b"])


def test_failures_end_all_that_wait_and_nothing_else() -> None:
    routes = routes_to()
    for directory, request in ((DIRECTORY, "a"), (DIRECTORY, "b"), (OTHER, "c")):
        routes.want(directory, request, NOW)
    found = routes.unreachable("lookup", DIRECTORY, Reason.UNREACHABLE, "refused")
    assert (found.failed, found.reason, found.detail) == (["a", "b"], Reason.UNREACHABLE, "refused")
    routes.looked_up(OTHER, engine("q"), NOW)
    assert routes.unreachable("worker", WORKER, Reason.REFUSED, "no").failed == ["c"]
    assert routes.want(OTHER, "d", NOW) is None
    assert routes.must_look_up(OTHER)


def test_addresses_where_nobody_answers_are_not_remembered() -> None:
    """They come with requests, so whoever may send these could make us remember any number."""
    routes = routes_to()
    for port in range(1000):
        routes.want(("10.0.0.9", 20000 + port), "a", NOW)
        routes.unreachable("lookup", ("10.0.0.9", 20000 + port), Reason.UNREACHABLE, "refused")
    assert not routes._places


def test_engine_whose_sizes_do_not_fit_ours() -> None:
    def choose(ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
        raise LayoutError(f"8 KV heads can't be split over {len(ranks)} ranks")

    routes = Routes(choose, PATIENCE)
    routes.want(DIRECTORY, "a", NOW)
    found = routes.looked_up(DIRECTORY, engine(ranks=2), NOW)
    assert (found.failed, found.reason) == (["a"], Reason.LAYOUT_MISMATCH)
    assert "over 2 ranks" in found.detail


def test_engine_that_lacks_a_rank_that_we_need() -> None:
    routes = routes_to(TP1)
    routes.want(DIRECTORY, "a", NOW)
    found = routes.looked_up(DIRECTORY, engine(), NOW)
    assert found.failed == ["a"]
    assert "engine p" in found.detail


def test_engine_that_is_starting_is_asked_again_for_a_while() -> None:
    routes = routes_to()
    routes.want(DIRECTORY, "a", NOW)
    now = NOW
    while now < NOW + PATIENCE:
        found = routes.looked_up(DIRECTORY, engine(ready=False), now)
        assert (found.failed, found.open_workers) == ([], [])
        assert routes.due(now) == []
        now += 0.25
        assert routes.due(now) == [DIRECTORY]
        assert routes.due(now) == []
    assert routes.looked_up(DIRECTORY, engine(ready=False), now).failed == ["a"]
    assert routes.due(now + 10) == []
    routes.want(DIRECTORY, "b", now)
    assert routes.looked_up(DIRECTORY, engine(), now).open_workers == [WORKER]
