"""Capacity, parked memory, break-even and the published figures."""

from __future__ import annotations

import pytest

from neuron_pushkv.simulate.capacity import Tried, best, fleets, offered, parked_tokens
from neuron_pushkv.simulate.published import LOAD
from neuron_pushkv.simulate.replication import Result, replicate
from neuron_pushkv.simulate.scenario import Scenario, changed, scenario
from neuron_pushkv.simulate.tables import DEFAULT_TABLE, load_table
from neuron_pushkv.simulate.threshold import break_even, recompute_seconds, transfer_seconds
from tests.simulate.tables import plain, table


def test_what_a_load_asks_for() -> None:
    # A prompt takes 1 s of P; 100 steps of 10 ms on 4 slots take 0.25 s of D.
    load = offered(plain(rate=2.5, output=100, slots=4), table())
    assert load.prefills == pytest.approx(2.5)
    assert load.decodes == pytest.approx(0.625)
    assert load.fewest == (3, 1)
    assert offered(plain(rate=2.5, prefix_hit=0.6), table()).prefills == pytest.approx(1.0)
    turns = {"input": 1000, "output": 11, "turns": 3}
    assert offered(plain(**turns), table()).prefills == pytest.approx((1000 + 2011 + 3022) / 10_000)
    assert offered(plain(**turns, return_path=True), table()).prefills == pytest.approx(0.3)


def test_the_fewest_engines_that_do_are_found() -> None:
    asked: list[tuple[int, int]] = []

    def simulated(fleet: Scenario) -> Result:
        asked.append((fleet.prefills, fleet.decodes))
        return replicate(fleet, table(), replications=2)

    # Fixed arrivals: 3 P are enough for 2.5 a second, and so is 1 D, if nothing waits.
    base = plain(
        rate=2.5, arrivals="fixed", requests=60, warm_up=10, output=100, slots=4, slo_ttft_ms=1100, slo_tpot_ms=11
    )
    tried = fleets(base, table(), 0.9, simulated)
    assert asked == [(3, 1)]
    answer = best(tried)
    assert answer is not None
    assert answer.result["goodput.share"].mean == 1.0
    # At 2 slots less, D is what is short; at a TTFT below one prefill nothing helps.
    tried = fleets(changed(base, slots=3, rate=2.9), table(), 0.9, simulated)
    answer = best(tried)
    assert answer is not None
    fleet = answer.result.scenario
    assert all(not each.enough for each in tried if each.result.scenario.decodes < fleet.decodes)
    assert best(fleets(changed(base, slo_ttft_ms=900, requests=20), table(), 0.9, simulated)) is None


def test_the_best_of_the_fleets_that_do_is_the_answer() -> None:
    def tried(share: float, enough: bool) -> Tried:
        return Tried(Result(plain(), table(), 0, 1, {"goodput.share": [share]}, []), enough)

    fleets_of_three = [tried(0.92, True), tried(0.97, True), tried(0.99, False)]
    assert best(fleets_of_three) is fleets_of_three[1]
    assert best([tried(0.5, False)]) is None


def test_parked_memory_is_what_littles_law_says() -> None:
    settings = {"turns": 4, "input": 500, "output": 11, "think_seconds": 20, "keep_seconds": 40, "return_path": True}
    base = plain(rate=0.5, requests=300, warm_up=100, slots=64, **settings)
    expected = 0.5 * ((511 + 1022 + 1533) * 20 + 2044 * 40)
    assert parked_tokens(base) == pytest.approx(expected)
    result = replicate(base, table(), replications=4)
    found = result["kv_gigabytes.parked"]
    assert found.half_width < 0.2 * found.mean
    # Turns end a little later than the next begins to wait: the answer's time is not parked.
    assert abs(found.mean - expected * 1000 / 1e9) <= 2 * found.half_width
    assert result["evicted_conversations"].mean == 0
    small = replicate(changed(base, decode_kv_tokens=40_000), table(), replications=1)
    assert small["evicted_conversations"].mean > 0
    assert small["kv_gigabytes.parked_peak_of_one"].mean <= 40_000 * 1000 / 1e9


def test_break_even_is_where_both_take_as_long() -> None:
    # 100 us a token to compute, 20 to fetch, after 30 ms: 375 tokens, and 384 in whole blocks.
    network = plain(floor_ms=30, rail_gigabytes=0.05, block_tokens=16)
    assert break_even(0, network, table()) == 384
    assert transfer_seconds(368, network, table()) > recompute_seconds(368, 0, table())
    assert break_even(9_000, network, table()) == 384
    assert break_even(9_700, network, table()) is None
    assert break_even(0, changed(network, floor_ms=0), table()) == 16
    assert break_even(0, changed(network, rail_gigabytes=0.009), table()) is None


def test_break_even_with_the_shipped_table_falls_with_the_context() -> None:
    shipped = load_table(DEFAULT_TABLE)
    network = scenario({"posting_us": 0})
    found = [break_even(context, network, shipped) for context in (0, 4096, 16384)]
    assert all(tokens is not None for tokens in found)
    assert sorted(found, key=lambda tokens: -(tokens or 0)) == found


def test_cold_prompts_of_the_published_load_are_more_than_p_can_do() -> None:
    load = offered(LOAD, load_table(DEFAULT_TABLE))
    assert load.prefills == pytest.approx(2.77, abs=0.01)
