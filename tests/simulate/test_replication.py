"""Seeds, confidence intervals and figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from neuron_pushkv.errors import ConfigError
from neuron_pushkv.simulate.measures import Level, figures
from neuron_pushkv.simulate.model import simulate
from neuron_pushkv.simulate.replication import difference, estimate, replicate
from neuron_pushkv.simulate.scenario import changed, scenario
from neuron_pushkv.simulate.tables import DEFAULT_TABLE, load_table
from tests.simulate.tables import plain, table

BUSY = {"requests": 80, "warm_up": 10, "rate": 1.2, "input": "uniform:100:9000", "output": "uniform:1:60", "slots": 2}


def test_the_same_seed_gives_the_same_result_to_the_last_digit() -> None:
    first, second = (figures(simulate(plain(**BUSY, mode="pull"), table(), seed=11)) for _ in range(2))
    assert first == second
    assert first != figures(simulate(plain(**BUSY, mode="pull"), table(), seed=12))


def test_other_modes_and_fleets_get_the_same_load() -> None:
    def load(**settings: object) -> list[tuple[float, int, int]]:
        requests = simulate(plain(**BUSY, **settings), table(), seed=4).requests
        return [(request.arrived, request.prompt, request.output) for request in requests]

    assert load(mode="push") == load(mode="pull", decodes=3) == load(mode="late-push", prefix_hit=0.5)


def test_an_estimate_is_mean_and_students_interval() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.half_width == pytest.approx(3.182 * math.sqrt(5 / 3) / 2)
    assert not estimate([-1.0, 1.0]).sure
    assert estimate([1.0, 1.1]).sure
    assert math.isnan(estimate([1.0]).half_width)
    assert not estimate([1.0]).sure


def test_95_percent_intervals_hold_the_truth_95_percent_of_the_time() -> None:
    random = np.random.default_rng(2)
    found = [estimate([float(each) for each in random.normal(3, 2, 5)]) for _ in range(2000)]
    inside = sum(abs(each.mean - 3) <= each.half_width for each in found) / len(found)
    assert inside == pytest.approx(0.95, abs=0.015)


def test_figures_are_those_of_the_requests() -> None:
    trace = simulate(plain(**BUSY), table(), seed=1)
    result = figures(trace)
    counted = trace.requests[10:]
    assert result["requests"] == 70
    assert result["ttft_ms.median"] == pytest.approx(1000 * np.median([request.ttft for request in counted]))
    assert result["e2e_ms.p99"] == pytest.approx(1000 * np.quantile([r.end_to_end for r in counted], 0.99))
    gaps = np.concatenate([np.diff(request.steps) for request in counted])
    assert result["itl_ms.p90"] == pytest.approx(1000 * np.quantile(gaps, 0.9))
    begin, end = counted[0].arrived, counted[-1].arrived
    ended = [request for request in trace.requests if begin < request.finished <= end]
    assert result["throughput.requests_per_second"] == pytest.approx(len(ended) / (end - begin))
    phases = sum(value for name, value in result.items() if name.startswith("phase_ms."))
    assert phases == pytest.approx(result["ttft_ms.mean"])


def test_goodput_counts_what_meets_both_limits() -> None:
    trace = simulate(plain(**BUSY, slo_ttft_ms=1500, slo_tpot_ms=10.5), table(), seed=1)
    good = [request.ttft <= 1.5 for request in trace.requests[10:]]
    assert 0 < sum(good) < len(good)
    assert figures(trace)["goodput.share"] == pytest.approx(sum(good) / len(good))
    assert figures(simulate(plain(**BUSY, slo_tpot_ms=9.5), table(), seed=1))["goodput.share"] < 0.2


def test_answers_of_one_token_have_no_tpot() -> None:
    result = replicate(plain(output=1), table(), replications=2)
    assert "tpot_ms.mean" not in result
    assert "itl_ms.p99" not in result
    assert result["ttft_ms.mean"].mean > 0


def test_differences_are_taken_load_by_load() -> None:
    base = plain(**BUSY, floor_ms=30)
    push, late = (replicate(changed(base, mode=mode), table(), replications=4) for mode in ("push", "late-push"))
    paired = difference(push, late, "ttft_ms.mean")
    assert paired.mean == pytest.approx(push["ttft_ms.mean"].mean - late["ttft_ms.mean"].mean)
    assert paired.half_width < push["ttft_ms.mean"].half_width / 4


def test_a_level_over_time() -> None:
    level = Level()
    level.set(1.0, 4)
    level.add(2.0, -3)
    level.set(4.0, 0)
    assert level.mean(0, 4) == pytest.approx((4 + 2) / 4)
    assert level.mean(1.5, 3) == pytest.approx((2 + 1) / 1.5)
    assert level.mean(3, 3) == 1
    assert level.peak(0, 4) == 4
    assert level.peak(2, 4) == 1
    assert level.series(0, 5)[10:21:10] == [(1.0, 4.0), (2.0, 1.0)]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rate": 0}, "rate: "),
        ({"input": "many"}, "is no length"),
        ({"mode": "pul"}, "mode: "),
        ({"speed": 1}, "unknown setting 'speed'"),
        ({"requests": 10, "warm_up": 10}, "warm_up (10) must be less than requests (10)"),
        ({"return_path": True}, "set turns to 2 or more"),
        ({"decode_kv_tokens": 100}, "must hold the longest request"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario(settings)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"input": 24_577}, "ends at prompts of 24,576 tokens"), ({"slots": 9}, "ends at 8 sequences")],
)
def test_what_the_table_cannot_tell_is_refused_before_anything_runs(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulate(scenario(settings), load_table(DEFAULT_TABLE), seed=0)
