"""The model against queues whose waiting times are known: M/D/1 at P, M/D/c at D's slots, and Little's law.

Twice: means of the model against the formula, as sure as a test's time allows; and request by request against plain
servers under the same arrivals, which are held to the formula with many more of them.

Seeds are fixed, so a run either always passes or never. Means are held to twice the half width of their 95 % confidence
interval, which must be narrow enough to tell something.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from neuron_pushkv.simulate.measures import figures
from neuron_pushkv.simulate.model import simulate
from neuron_pushkv.simulate.replication import Estimate, estimate
from neuron_pushkv.simulate.requests import Request
from tests.simulate.tables import PREFILL_TOKENS, plain, table


def waiting_time(servers: int, load: float) -> float:
    """Mean wait of M/D/c in service times, ``load`` being arrivals per service time. Crommelin 1932."""
    total = 0.0
    for i in range(1, 1000):
        mean = i * load
        # P(N >= i c) and P(N > i c) for N Poisson with that mean, times e^-mean summed from the top.
        first = math.exp(-mean + i * servers * math.log(mean) - math.lgamma(i * servers + 1))
        at_least, term, number = 0.0, first, i * servers
        while term > 1e-16 * max(first, 1e-300) and number < i * servers + 4000:
            at_least += term
            number += 1
            term *= mean / number
        difference = at_least - servers / load * (at_least - first)
        total += difference
        if abs(difference) < 1e-12:
            break
    return total


def begins(servers: int, arrivals: list[float], service: float) -> list[float]:
    """When each arrival's service begins at so many servers with one queue. Kiefer and Wolfowitz 1955."""
    free = [0.0] * servers
    found = []
    for arrival in arrivals:
        found.append(max(arrival, heapq.heappop(free)))
        heapq.heappush(free, found[-1] + service)
    return found


def close(found: Estimate, low: float, high: float) -> None:
    assert found.half_width < 0.3 * high
    assert low - 2 * found.half_width <= found.mean <= high + 2 * found.half_width


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_the_formula_is_that_of_one_server_for_one_server(load: float) -> None:
    assert waiting_time(1, load) == pytest.approx(load / (2 * (1 - load)), rel=1e-6)


def test_the_formula_for_several_servers_is_near_the_known_approximation() -> None:
    # Half of M/M/c's wait, corrected (Cosmetatos 1975); it is within 2 % here.
    for servers, share in ((2, 0.8), (4, 0.8), (8, 0.9)):
        load = servers * share
        below = sum(load**k / math.factorial(k) for k in range(servers))
        full = load**servers / math.factorial(servers) / (1 - share)
        exponential = full / (below + full) / (servers * (1 - share))
        correction = 1 + (1 - share) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * servers * share)
        assert waiting_time(servers, load) == pytest.approx(exponential / 2 * correction, rel=0.02)


@pytest.mark.parametrize(("servers", "share"), [(1, 0.7), (2, 0.7), (4, 0.8)])
def test_such_servers_make_arrivals_wait_as_the_formula_says(servers: int, share: float) -> None:
    waits = []
    for seed in range(8):
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / (servers * share), 20_000)).tolist()
        waits.append(float(np.mean(np.subtract(begins(servers, arrivals, 1.0), arrivals))))
    found, expected = estimate(waits), waiting_time(servers, servers * share)
    assert found.half_width < 0.08 * expected
    assert abs(found.mean - expected) <= 2 * found.half_width


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_waiting_for_p_is_that_of_one_server_with_fixed_times(share: float) -> None:
    scenario = plain(rate=share, requests=1500, warm_up=150, output=1, chunk_tokens=PREFILL_TOKENS)
    waits, busy = [], []
    for seed in range(6):
        result = figures(simulate(scenario, table(prefill_ms=1000, decode_ms=0), seed))
        waits.append(result["prefill_queue_ms.mean"] / 1000)
        busy.append(result["utilisation.prefill"])
    expected = waiting_time(1, share)
    close(estimate(waits), expected, expected)
    close(estimate(busy), share, share)


def at_slots(slots: int, share: float, requests: int, seed: int) -> list[Request]:
    """Requests that come to D at random, since prefill and network take no time; each decodes for a second."""
    scenario = plain(rate=slots * share, requests=requests, warm_up=0, output=STEPS, slots=slots)
    return list(simulate(scenario, table(prefill_ms=0, decode_ms=STEP * 1000), seed).requests)


# A request joins between two steps, and a slot that gets free is taken one step later, when KV has come. So D is never
# quicker than servers that begin at once, and never slower than such whose service is a step longer, two steps later.
STEPS = 50
STEP = 1 / STEPS


@pytest.mark.parametrize(("slots", "share"), [(2, 0.6), (4, 0.6)])
def test_waiting_for_a_slot_at_d_is_that_of_as_many_servers(slots: int, share: float) -> None:
    waits = []
    for seed in range(5):
        counted = [request.joined - request.arrived for request in at_slots(slots, share, 1000, seed)[100:]]
        waits.append(sum(counted) / len(counted))
    longer = 1 + STEP
    close(
        estimate(waits),
        waiting_time(slots, slots * share),
        waiting_time(slots, slots * share * longer) * longer + 2 * STEP,
    )


@pytest.mark.parametrize(("slots", "share"), [(1, 0.9), (3, 0.8), (8, 0.95)])
def test_no_request_waits_longer_or_shorter_for_a_slot_than_servers_would_make_it(slots: int, share: float) -> None:
    requests = at_slots(slots, share, 300, seed=1)

    arrivals = [request.arrived for request in requests]
    early, late = begins(slots, arrivals, 1.0), begins(slots, arrivals, 1.0 + STEP)
    for request, soonest, latest in zip(requests, early, late, strict=True):
        assert soonest - 1e-6 <= request.joined <= latest + 2 * STEP + 1e-6
    assert sum(request.joined - request.arrived > 0.1 for request in requests) > 100


def test_each_prompt_waits_for_p_exactly_as_long_as_those_before_it_take() -> None:
    scenario = plain(rate=0.9, requests=400, output=1, chunk_tokens=PREFILL_TOKENS)
    free = 0.0
    for request in simulate(scenario, table(prefill_ms=1000, decode_ms=0), 2).requests:
        assert request.prefill_begun == pytest.approx(max(request.arrived, free))
        free = request.prefill_begun + 1.0


def test_littles_law_holds_everywhere() -> None:
    settings = {"rate": 1.5, "requests": 300, "input": "uniform:100:9000", "slots": 2, "prefills": 2, "decodes": 2}
    trace = simulate(plain(mode="pull", output=60, floor_ms=10, rail_gigabytes=0.05, **settings), table(), 5)
    end = max(request.finished for request in trace.requests)
    requests = trace.requests

    def total(levels: list[float]) -> float:
        return sum(levels) * end

    assert total([trace.present.mean(0, end)]) == pytest.approx(sum(r.end_to_end for r in requests))
    queued = total([engine.queue.mean(0, end) for engine in trace.prefills])
    assert queued == pytest.approx(sum(r.prefill_begun - r.returned for r in requests))
    computing = total([engine.busy.mean(0, end) for engine in trace.prefills])
    assert computing == pytest.approx(sum(r.prefill_ended - r.prefill_begun for r in requests))
    decoding = total([engine.occupied.mean(0, end) for engine in trace.decodes])
    assert decoding == pytest.approx(sum(r.finished - r.joined for r in requests))
    held = total([engine.held.mean(0, end) for engine in trace.decodes])
    assert held == pytest.approx(sum((r.finished - r.allocated) * (r.prompt + r.output) for r in requests))
    kept = total([trace.kept.mean(0, end)])
    assert kept == pytest.approx(sum((r.landed - r.prefill_ended) * r.prompt for r in requests))
    assert all(engine.load == 0 for engine in trace.decodes)
    assert all(engine.left == 0 for engine in trace.prefills)
