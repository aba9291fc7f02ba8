"""The worker side: orders once, reports once, and only of what vLLM waits for."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_pushkv.connector.metadata import PushKVMetadata, Refused
from neuron_pushkv.connector.worker import WorkerSide
from neuron_pushkv.orders import Intent, Ready, Receive, Remote, StepOrders
from tests.connector.harness import EngineDouble

REMOTE = Remote("127.0.0.1", 1)


def receive(request: str, *blocks: int) -> Receive:
    return Receive(request, "t", REMOTE, 0, 32 * len(blocks), b"", b"", (blocks,))


def intent(request: str) -> Intent:
    return Intent(request, "t", REMOTE, 32, b"")


def side(*, leads: bool = True) -> tuple[WorkerSide, EngineDouble]:
    engine = EngineDouble()
    return WorkerSide(engine, leads=leads, about={"provider": "tcp", "library": "libfabric 2.5"}), engine


def step(number: int, refused: tuple[Refused, ...] = (), **orders: Any) -> PushKVMetadata:
    return PushKVMetadata(number, StepOrders(**orders), refused)


def test_what_is_measured_once_is_told_once_for_each_rank() -> None:
    engine = EngineDouble()
    worker = WorkerSide(engine, leads=False, about={}, measured={"slab_bytes": {"0.0.1": 4096}})
    engine.stats = {"gauges": {"open_sends": {"0.0.1": 2}}}
    assert worker.take_stats() == {"gauges": {"open_sends": {"0.0.1": 2}, "slab_bytes": {"0.0.1": 4096}}}
    engine.stats = {}
    assert worker.take_stats() == {}


def test_a_step_is_carried_out_once_whichever_hook_comes_first() -> None:
    worker, engine = side()
    metadata = step(1, receives=(receive("a", 1, 2),))
    worker.begin(metadata)
    worker.begin(metadata)
    worker.begin(step(2))
    assert [len(orders.receives) for orders in engine.steps] == [1, 0]


def test_an_empty_step_still_begins_and_ends() -> None:
    worker, engine = side()
    worker.begin(step(1))
    worker.advance(step(1))
    worker.end()
    assert engine.calls == ["begin_step", "end_step"]


def test_what_is_ready_is_handed_on_after_the_forward_pass() -> None:
    worker, engine = side()
    metadata = step(1, ready=(Ready("a", 7, ((1,),)),))
    worker.begin(metadata)
    assert not engine.ready
    worker.advance(metadata)
    assert engine.ready == [Ready("a", 7, ((1,),))]


@pytest.mark.parametrize(
    ("empty", "loads", "refused", "patient"),
    [
        (True, ("a",), (), True),
        (False, ("a",), (), False),
        (True, (), (), False),
        (True, ("a",), (Refused("b", ((3,),)),), False),
    ],
)
def test_only_a_step_without_work_waits_for_loads(
    empty: bool, loads: tuple[str, ...], refused: tuple[Refused, ...], patient: bool
) -> None:
    worker, engine = side()
    orders = StepOrders(receives=tuple(receive(name, 1) for name in loads))
    worker.begin(PushKVMetadata(1, orders, refused, empty=empty))
    worker.take_results()
    assert (engine.patience > 0) == patient


def test_a_load_is_reported_once() -> None:
    worker, engine = side()
    worker.begin(step(1, receives=(receive("a", 1), receive("b", 2))))
    engine.finished, engine.failed = {"a", "b"}, {"b"}
    assert worker.take_results() == ({"a", "b"}, {"b"})
    engine.finished, engine.failed = {"a", "b"}, {"a", "b"}
    assert worker.take_results() == (set(), set())
    assert worker.take_stats()["events"] == {"unexpected_result": 2}


def test_a_report_that_nobody_waits_for_is_kept_back() -> None:
    worker, engine = side()
    engine.finished = {"stranger"}
    assert worker.take_results() == (set(), set())


def test_failed_loads_name_their_blocks_once() -> None:
    worker, engine = side()
    worker.begin(step(1, receives=(receive("a", 1, 2), receive("b", 3))))
    engine.finished = engine.failed = {"a"}
    worker.take_results()
    assert worker.take_bad_blocks() == {1, 2}
    assert worker.take_bad_blocks() == set()


def test_a_refused_load_fails_without_the_engine_hearing_of_it() -> None:
    worker, engine = side()
    worker.begin(step(1, (Refused("a", ((7, 8),)),)))
    assert engine.steps == [StepOrders()]
    assert worker.take_results() == ({"a"}, {"a"})
    assert worker.take_bad_blocks() == {7, 8}
    assert worker.take_results() == (set(), set())


def test_a_withdrawal_that_crosses_the_report_is_dropped() -> None:
    worker, engine = side()
    worker.begin(step(1, receives=(receive("a", 1), receive("b", 2))))
    engine.finished = {"a"}
    worker.take_results()
    worker.begin(step(2, withdrawn=("a", "b")))
    assert engine.steps[-1].withdrawn == ("b",)


def test_a_withdrawn_intent_is_handed_on_once_and_never_reported() -> None:
    worker, engine = side()
    worker.begin(step(1, intents=(intent("a"), intent("b"))))
    worker.begin(step(2, withdrawn=("a",), receives=(receive("b", 1),)))
    assert engine.steps[-1].withdrawn == ("a",)
    engine.finished = {"a", "b"}
    assert worker.take_results() == ({"b"}, set())
    worker.begin(step(3, withdrawn=("a", "b")))
    assert engine.steps[-1].withdrawn == ()


def test_an_intent_whose_load_is_refused_is_withdrawn_and_the_load_reported() -> None:
    worker, engine = side()
    worker.begin(step(1, intents=(intent("a"),)))
    worker.begin(step(2, (Refused("a", ((7,),)),), withdrawn=("a",)))
    assert engine.steps[-1].withdrawn == ("a",)
    assert worker.take_results() == ({"a"}, {"a"})


def test_what_a_layer_makes_ready_is_handed_on_with_its_name() -> None:
    worker, engine = side()
    metadata = step(1, ready=(Ready("a", 7, ((1,),)),))
    worker.begin(metadata)
    worker.advance_layer("layers.3", metadata)
    worker.advance_layer("layers.4", step(2))
    assert engine.layers == [("layers.3", 7)]
    assert not engine.ready


def test_what_the_scheduler_measures_is_reported_once_by_one_rank() -> None:
    for leads in (True, False):
        worker, engine = side(leads=leads)
        worker.take_stats()
        worker.begin(PushKVMetadata(1, StepOrders(), gauges={"parked_bytes": 5}))
        worker.begin(PushKVMetadata(2, StepOrders(), gauges={"parked_bytes": 7}))
        assert worker.take_stats() == ({"gauges": {"parked_bytes": {"engine": 7}}} if leads else {})
        assert worker.take_stats() == {}
        worker.begin(PushKVMetadata(3, StepOrders(), gauges={"parked_bytes": 9}))
        engine.stats = {"gauges": {"open_sends": {"0": 1}}}
        own = {"parked_bytes": {"engine": 9}} if leads else {}
        assert worker.take_stats() == {"gauges": {"open_sends": {"0": 1}, **own}}


def test_events_of_the_scheduler_are_counted_by_one_rank_only() -> None:
    for leads, counted in ((True, {"hook_error": 2}), (False, {})):
        worker, engine = side(leads=leads)
        worker.begin(PushKVMetadata(1, StepOrders(counters={"hook_error": 2})))
        assert engine.steps[0].counters == counted


def test_the_first_statistics_name_the_provider_and_later_ones_are_the_engines() -> None:
    worker, engine = side()
    assert worker.take_stats() == {"provider": "tcp", "library": "libfabric 2.5"}
    assert worker.take_stats() == {}
    engine.stats = {"bytes": {"in": 5}}
    assert worker.take_stats() == {"bytes": {"in": 5}}


def test_transfers_that_were_not_tried_are_counted_by_every_rank() -> None:
    worker, engine = side(leads=False)
    worker.take_stats()
    worker.begin(PushKVMetadata(1, StepOrders(), untried={"in:failed:gone": 1}))
    engine.stats = {"transfers": {"in:failed:gone": 2, "in:completed": 1}, "bytes": {"in": 5}}
    assert worker.take_stats() == {"transfers": {"in:failed:gone": 3, "in:completed": 1}, "bytes": {"in": 5}}
    assert worker.take_stats() == {}


def test_closing_closes_the_engine() -> None:
    worker, engine = side()
    worker.close()
    assert engine.calls == ["close"]
