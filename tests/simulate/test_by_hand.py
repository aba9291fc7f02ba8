"""Single requests through idle engines: every time can be computed with a pencil."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_pushkv.simulate.model import Trace, simulate
from neuron_pushkv.simulate.requests import Request
from neuron_pushkv.simulate.scenario import MODES
from tests.simulate.tables import PREFILL_TOKENS, plain, table

PREFILL, STEP = 1.0, 0.010
FLOOR = 0.030
BYTES = PREFILL_TOKENS * 1000
SLOW = {"rail_gigabytes": BYTES / 1e9 / 0.2}  # the whole prompt takes 200 ms on the wire
WIRE = 0.2


def run(**settings: Any) -> Trace:
    return simulate(plain(**settings), table(), seed=3)


def one(**settings: Any) -> Request:
    (request,) = run(**settings).requests
    return request


@pytest.mark.parametrize("mode", MODES)
def test_over_a_free_network_ttft_is_prefill_and_one_step(mode: str) -> None:
    request = one(mode=mode)
    assert request.ttft == pytest.approx(PREFILL + STEP)
    assert request.tpot == pytest.approx(STEP)
    assert request.end_to_end == pytest.approx(PREFILL + 11 * STEP)


@pytest.mark.parametrize("mode", ["late-push", "pull"])
def test_what_begins_after_prefill_adds_all_of_its_transfer(mode: str) -> None:
    assert one(mode=mode, floor_ms=30, **SLOW).ttft == pytest.approx(PREFILL + WIRE + FLOOR + STEP)


def test_streamed_push_adds_its_last_step_only() -> None:
    request = one(mode="push", chunk_tokens=1000, floor_ms=30, **SLOW)
    assert request.ttft == pytest.approx(PREFILL + WIRE / 10 + FLOOR + STEP)


def test_unstreamed_push_adds_all_of_its_transfer() -> None:
    request = one(mode="push", stream=False, chunk_tokens=1000, floor_ms=30, **SLOW)
    assert request.ttft == pytest.approx(PREFILL + WIRE + FLOOR + STEP)


def test_streamed_push_over_a_wire_slower_than_prefill_is_bound_by_the_wire() -> None:
    slow = {"rail_gigabytes": BYTES / 1e9 / 3.0}  # 3 s; the first tenth is there after 100 ms
    assert one(mode="push", chunk_tokens=1000, **slow).ttft == pytest.approx(PREFILL / 10 + 3.0 + STEP)


def test_rails_add_up() -> None:
    assert one(mode="pull", rails=4, **SLOW).ttft == pytest.approx(PREFILL + WIRE / 4 + STEP)


def test_cached_on_p_is_not_computed_but_moved() -> None:
    request = one(mode="pull", prefix_hit=0.75, **SLOW)
    assert request.ttft == pytest.approx(PREFILL / 4 + WIRE + STEP)


def test_cached_on_p_streams_while_the_rest_is_computed() -> None:
    request = one(mode="push", prefix_hit=0.5, chunk_tokens=5000, **SLOW)
    assert request.ttft == pytest.approx(PREFILL / 2 + WIRE / 2 + STEP)


def test_cached_on_d_is_not_moved() -> None:
    assert one(mode="pull", decode_hit=0.75, **SLOW).ttft == pytest.approx(PREFILL + WIRE / 4 + STEP)
    # Streamed, what D has is the prompt's first part: of the last tenth nothing is spared.
    streamed = one(mode="push", decode_hit=0.75, chunk_tokens=1000, **SLOW)
    assert streamed.ttft == pytest.approx(PREFILL + WIRE / 10 + STEP)


def test_posting_slower_than_the_wire_decides() -> None:
    # 100 blocks of 100 tokens, 10 regions each: 1,000 descriptors of 500 us.
    slow = {"block_tokens": 100, "posting_us": 500, **SLOW}
    assert one(mode="pull", posting="background", **slow).ttft == pytest.approx(PREFILL + 0.5 + STEP)


def test_inline_posting_stops_the_decode_batch_and_background_posting_does_not() -> None:
    load = {"mode": "pull", "requests": 2, "arrivals": "fixed", "rate": 0.5, "output": 150, "prefix_hit": 0.0}
    slow = {"block_tokens": 100, "posting_us": 100}  # 100 ms a request
    # The second request comes 2 s after the first and is read 1 s later, while the first one decodes (1.5 s).
    load["rate"] = 1.0
    first, _ = run(**load, **slow, posting="inline").requests
    assert first.end_to_end == pytest.approx(PREFILL + 0.1 + 150 * STEP + 0.1)
    first, _ = run(**load, **slow, posting="background").requests
    assert first.end_to_end == pytest.approx(PREFILL + 0.1 + 150 * STEP)
    # `auto` is inline with pull, and in the background with the others.
    first, _ = run(**load, **slow).requests
    assert first.end_to_end == pytest.approx(PREFILL + 0.2 + 150 * STEP)


def test_inline_posting_of_push_stops_the_prefill_engine() -> None:
    slow = {"mode": "push", "chunk_tokens": 1000, "block_tokens": 100, "posting_us": 100}  # 10 ms a step
    assert one(**slow).prefill_ended == pytest.approx(one().prefill_ended)
    request = one(**slow, posting="inline")
    assert request.prefill_ended - request.prefill_begun == pytest.approx(PREFILL + 9 * 0.010)


def test_prompts_wait_for_each_other_at_p() -> None:
    first, second, third = run(requests=3, arrivals="fixed", rate=2.0).requests
    assert [r.ttft for r in (first, second, third)] == pytest.approx([1.01, 1.51, 2.01], abs=STEP + 1e-9)
    assert second.phases()["prefill queue"] == pytest.approx(0.5)
    assert third.phases()["prefill queue"] == pytest.approx(1.0)


def test_two_prefill_engines_share_by_load_or_in_turn() -> None:
    for choice in ("least-loaded", "round-robin"):
        requests = run(requests=4, arrivals="fixed", rate=2.0, prefills=2, choose_prefill=choice).requests
        assert max(request.phases()["prefill queue"] for request in requests) == pytest.approx(0.0)


def test_a_full_batch_keeps_a_pull_out_until_a_slot_is_free() -> None:
    settings = {"requests": 2, "arrivals": "fixed", "rate": 1.0, "slots": 1, "output": 150}
    first, second = run(mode="pull", **settings, **SLOW).requests
    assert second.allocated == pytest.approx(first.finished)
    assert second.phases()["room at D"] == pytest.approx(first.finished - second.prefill_ended)
    # A push reserved its blocks before, and waits for the slot with its KV in place.
    first, second = run(mode="push", chunk_tokens=1000, **settings, **SLOW).requests
    assert second.landed < first.finished
    assert second.joined == pytest.approx(first.finished)


def test_a_full_cache_keeps_requests_out() -> None:
    settings = {"requests": 2, "arrivals": "fixed", "rate": 1.0, "slots": 8, "output": 150}
    first, second = run(mode="pull", **settings, decode_kv_tokens=20_000).requests
    assert second.allocated == pytest.approx(first.finished)
    first, second = run(mode="pull", **settings, decode_kv_tokens=20_300).requests
    assert second.allocated < first.finished


@pytest.mark.parametrize("mode", MODES)
def test_phases_add_up_to_ttft(mode: str) -> None:
    settings = {"requests": 60, "rate": 1.3, "input": "uniform:100:9000", "slots": 2, "decode_kv_tokens": 20_000}
    requests = run(mode=mode, **settings, floor_ms=5, output=40, **SLOW).requests
    assert len(requests) == 60
    for request in requests:
        phases = request.phases()
        assert min(phases.values()) >= 0
        assert sum(phases.values()) == pytest.approx(request.ttft)


def turns(**settings: Any) -> list[Request]:
    """Three turns of 1,000 tokens and an answer of 11."""
    quick = {"think_seconds": 5, "turns": 3, "input": 1000, "mode": "pull"}
    trace = run(**{**quick, **settings}, floor_ms=30, **SLOW)
    assert [engine.left for engine in trace.prefills] == [0]
    return list(trace.requests)


def test_a_prompt_is_all_that_was_said_before() -> None:
    first, second, third = turns()
    assert [request.prompt for request in (first, second, third)] == [1000, 2011, 3022]
    assert second.arrived - first.finished == pytest.approx(5)


def test_the_return_path_saves_what_was_said_before() -> None:
    per_token = (PREFILL / PREFILL_TOKENS, WIRE / PREFILL_TOKENS)
    without = turns()[2].ttft
    assert without == pytest.approx(3022 * sum(per_token) + FLOOR + STEP)
    last = turns(return_path=True)[2]
    assert last.phases()["return"] == pytest.approx(2022 * per_token[1] + FLOOR)
    assert last.ttft == pytest.approx(2022 * per_token[1] + FLOOR + 1000 * sum(per_token) + FLOOR + STEP)


def test_fewer_tokens_than_the_threshold_are_computed_again() -> None:
    first, second, third = turns(return_path=True, recompute_threshold=2000)
    assert second.phases()["return"] == 0
    assert second.phases()["prefill"] == pytest.approx(2011 * PREFILL / PREFILL_TOKENS)
    assert third.phases()["return"] > 0
    assert first.decode_hit == 0


def test_kv_that_is_not_kept_long_enough_is_not_returned() -> None:
    _, second, third = turns(return_path=True, keep_seconds=4.9)
    assert second.phases()["return"] == third.phases()["return"] == 0
    assert third.decode_hit == 0
    assert third.prefill_hit == 0


def test_late_push_and_pull_differ_by_who_posts_only() -> None:
    settings = {"requests": 50, "rate": 1.2, "slots": 2, "input": "uniform:100:9000", "posting": "background", **SLOW}
    pushed, pulled = run(mode="late-push", **settings).requests, run(mode="pull", **settings).requests
    assert [request.steps for request in pushed] == [request.steps for request in pulled]
