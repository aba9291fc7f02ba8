"""Statistics: added up over ranks and intervals, and shown where Prometheus looks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

from neuron_pushkv.connector.connector import PushKVConnector
from neuron_pushkv.connector.stats import PushKVMetrics, PushKVStats


def interval() -> dict[str, Any]:
    """One interval of one rank, as PushEngine.take_stats() has it."""
    return {
        "transfers": {"in:completed": 2, "in:failed:peer_lost": 1, "out:completed": 1},
        "bytes": {"in": 2 << 20, "out": 1 << 20},
        "writes": {"in": 8, "out": 4},
        "tokens": {"in": 96},
        "phases": {"in:transfer": [0.002, 0.004], "out:drain": [0.01]},
        "durations": {"in:completed": [1.0, 2.0], "in:failed": [3.0], "out:completed": [4.0]},
        "gauges": {"parked_bytes": {"0.0.0": 4096}, "open_sends": {"0.0.0": 2}},
        "refusals": {"wrong_key": 1},
        "events": {"hook_error": 1},
        "provider": "tcp",
        "library": "libfabric 2.5",
    }


def test_ranks_and_intervals_add_up() -> None:
    total = PushKVStats(data=interval())
    total.aggregate(PushKVStats(data=interval())).aggregate(PushKVStats(data={"tokens": {"in": 4}, "events": {"x": 1}}))
    assert total.data["transfers"] == {"in:completed": 4, "in:failed:peer_lost": 2, "out:completed": 2}
    assert total.data["tokens"] == {"in": 196}
    assert total.data["phases"]["in:transfer"] == [0.002, 0.004] * 2
    assert total.data["durations"] == {
        "in:completed": [1.0, 2.0] * 2,
        "in:failed": [3.0] * 2,
        "out:completed": [4.0] * 2,
    }
    assert total.data["events"] == {"hook_error": 2, "x": 1}
    assert total.data["provider"] == "tcp"


def test_adding_up_leaves_the_other_as_it_was() -> None:
    first, second = PushKVStats(), PushKVStats(data=interval())
    first.aggregate(second)
    first.aggregate(second)
    assert second.data == interval()


def test_gauges_keep_the_latest_of_each_rank() -> None:
    total = PushKVStats(data={"gauges": {"open_sends": {"0.0.0": 5, "0.0.1": 1}}})
    total.aggregate(PushKVStats(data={"gauges": {"open_sends": {"0.0.1": 4}, "parked_bytes": {"0.0.0": 8}}}))
    total.aggregate(PushKVStats(data={"gauges": {"open_sends": {"0.0.0": 2}}}))
    assert total.data["gauges"] == {"open_sends": {"0.0.0": 2, "0.0.1": 4}, "parked_bytes": {"0.0.0": 8}}


def test_nothing_is_empty() -> None:
    assert PushKVStats().is_empty()
    assert PushKVStats(data={"transfers": {}, "phases": {}}).is_empty()
    # vLLM would write a line without anything in it.
    assert PushKVStats(data={"gauges": {"open_sends": {"0.0.0": 2}}, "provider": "tcp"}).is_empty()
    assert not PushKVStats(data={"events": {"x": 1}}).is_empty()
    stats = PushKVStats(data=interval())
    stats.reset()
    assert stats.is_empty()


def test_they_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(PushKVStats(data=interval()))).data == interval()
    assert PushKVConnector.build_kv_connector_stats(interval()).data == interval()


def test_the_log_line_says_what_matters() -> None:
    assert PushKVStats(data=interval()).reduce() == {
        "received": 2,
        "received failed": 1,
        "received MiB": 2.0,
        "received mean ms": 3.0,
        "sent": 1,
        "sent failed": 0,
        "sent MiB": 1.0,
        "sent mean ms": 10.0,
        "refusals": 1,
        "events": 1,
    }
    assert PushKVStats().reduce() == {}


@pytest.fixture
def metrics() -> Iterator[PushKVMetrics]:
    """Registered as vLLM registers them, for two engines, and unregistered afterwards."""
    before = set(REGISTRY._collector_to_names)
    config: Any = SimpleNamespace(kv_transfer_config=None)
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    yield PushKVConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], labels)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def shown(name: str, engine: str = "0", **labels: str) -> float | None:
    """What a scrape sees."""
    return REGISTRY.get_sample_value(f"vllm:pushkv_{name}", {"model_name": "m", "engine": engine, **labels})


def test_prometheus_shows_every_number(metrics: PushKVMetrics) -> None:
    metrics.observe(interval(), 0)
    metrics.observe(interval(), 0)
    metrics.observe({"tokens": {"in": 5}}, 1)
    metrics.observe({}, 1)
    assert shown("transfers_total", direction="in", outcome="completed", reason="") == 4
    assert shown("transfers_total", direction="in", outcome="failed", reason="peer_lost") == 2
    assert shown("bytes_total", direction="out") == 2 << 20
    assert shown("writes_total", direction="in") == 16
    assert shown("tokens_total", direction="in") == 192
    assert shown("tokens_total", engine="1", direction="in") == 5
    assert shown("refusals_total", reason="wrong_key") == 2
    assert shown("events_total", event="hook_error") == 2
    assert shown("phase_seconds_count", direction="in", phase="transfer") == 4
    assert shown("phase_seconds_sum", direction="out", phase="drain") == pytest.approx(0.02)
    assert shown("transfer_seconds_count", direction="in", outcome="failed") == 2
    assert shown("transfer_seconds_sum", direction="in", outcome="completed") == pytest.approx(6.0)
    assert shown("info", provider="tcp", library="libfabric 2.5") == 1
    assert b"vllm:pushkv_info{" in generate_latest()


def test_a_gauge_is_the_sum_of_what_its_ranks_said_last(metrics: PushKVMetrics) -> None:
    metrics.observe({"gauges": {"open_sends": {"0.0.0": 2, "0.0.1": 3}, "parked_bytes": {"0.0.0": 4096}}}, 0)
    assert (shown("open_sends"), shown("parked_bytes")) == (5, 4096)
    metrics.observe({"gauges": {"open_sends": {"0.0.1": 1}}}, 0)
    metrics.observe({"gauges": {"open_sends": {"0.0.0": 9}}}, 1)
    assert (shown("open_sends"), shown("open_sends", engine="1"), shown("parked_bytes")) == (3, 9, 4096)
    metrics.observe({"gauges": {"open_sends": {"0.0.0": 0, "0.0.1": 0}, "parked_bytes": {"0.0.0": 0}}}, 0)
    assert (shown("open_sends"), shown("open_sends", engine="1"), shown("parked_bytes")) == (0, 9, 0)


def test_a_fraction_is_the_mean_of_its_ranks(metrics: PushKVMetrics) -> None:
    metrics.observe({"gauges": {"staging_fragmentation": {"0.0.0": 0.5, "0.0.1": 0.0}}}, 0)
    assert shown("staging_fragmentation") == 0.25
