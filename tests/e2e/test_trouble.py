"""What may go wrong with whole processes and clients, and what an engine does when there is nothing to do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.deployment import (
    DECODE,
    PREFILL,
    ROUTER,
    Deployment,
    Question,
    Watch,
    asked,
    kept,
    legs,
    poll,
    tokens,
    whole_blocks,
)

IDLE_CORES = 0.1


def assert_pushed(deployment: Deployment, question: Question) -> None:
    """The router answers this question rightly, and all of its KV has been pushed."""
    golden = deployment.golden(question)
    decode = Watch(deployment, DECODE)
    assert deployment.ask(ROUTER, question) == golden
    decode.settle(1)
    assert decode.transfers("in") == decode.transfers("in", outcome="completed") == 1
    assert decode.bytes("in") == whole_blocks(0, len(question.prompt))


def cores(deployment: Deployment, name: str, seconds: float = 3.0) -> float:
    before, begun = deployment.cpu_seconds(name), time.monotonic()
    time.sleep(seconds)  # what is measured is what happens while nothing is asked for
    return (deployment.cpu_seconds(name) - before) / (time.monotonic() - begun)


def assert_empty(deployment: Deployment, name: str) -> None:
    """The engine has nothing to do soon, and no KV block is taken."""

    def empty() -> bool:
        deployment.ask(name, Question((7, 8, 9), max_tokens=2))  # what is held is told with a step, so make it take one
        metrics = deployment.metrics(name)
        return all(
            metrics.total(f"vllm:{gauge}") == 0
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )

    poll(empty, 15, f"{name} lets go of all requests and blocks")


def test_idle_engines_sleep_though_they_keep_kv(deployment: Deployment) -> None:
    question = Question(tokens(1000, seed=30))
    golden = deployment.golden(question)
    prefill, decode = legs(deployment, "kept for later")
    deployment.ask(PREFILL, asked(question, prefill))
    poll(lambda: deployment.metrics(PREFILL).total("vllm:num_requests_running") == 0, 5, "prefill is done")
    for name in (PREFILL, DECODE, ROUTER):
        assert cores(deployment, name) < IDLE_CORES, name
    # It has been kept all the while, and is pushed without the sleeping engine taking a step.
    watch = Watch(deployment, DECODE)
    assert deployment.ask(DECODE, asked(question, decode)) == golden
    watch.settle(1)
    assert watch.bytes("in") == whole_blocks(0, 1000)
    for name in (PREFILL, DECODE):
        assert cores(deployment, name) < IDLE_CORES, name


def test_client_leaves_while_it_reads(deployment: Deployment) -> None:
    body = Question(tokens(2000, seed=31), stream=True, max_tokens=1500).body()
    with deployment.client.stream("POST", deployment.urls[ROUTER] + "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith("data: {")
    for name in (PREFILL, DECODE):
        assert_empty(deployment, name)
    assert_pushed(deployment, Question(tokens(100, seed=32)))


def test_client_leaves_while_decode_waits(deployment: Deployment) -> None:
    """Its KV never comes, since nobody computes it; the blocks that were reserved for it come back all the same."""
    _, decode = legs(deployment, "never computed")
    question = asked(Question(tokens(1500, seed=33)), decode)
    with pytest.raises(httpx.ReadTimeout):
        deployment.client.post(
            deployment.urls[DECODE] + "/v1/completions", json=question.body(), timeout=httpx.Timeout(1.0)
        )
    assert_empty(deployment, DECODE)
    assert_pushed(deployment, Question(tokens(100, seed=34)))


@pytest.mark.parametrize("fault", [{"model": "another"}, {"prompt": [5] * 5000}], ids=["model", "length"])
def test_decode_rejects_what_prefill_has_computed(deployment: Deployment, fault: dict[str, Any]) -> None:
    """F9: no request of decode's will ever ask for it, so it is let go at once, though both engines are idle."""
    (name,) = fault
    question = Question(tokens(500, seed=36), salt=name)
    prefill, decode = legs(deployment, f"rejected for its {name}")
    before = kept(deployment)
    deployment.ask(PREFILL, asked(question, prefill, max_tokens=1))
    assert kept(deployment) == before + 1
    body = {**asked(question, decode).body(), **fault}
    begun = time.monotonic()
    response = deployment.client.post(deployment.urls[DECODE] + "/v1/completions", json=body)
    assert 400 <= response.status_code < 500
    poll(lambda: kept(deployment) == before, 2, "prefill lets go")
    assert time.monotonic() - begun < 2


def test_nobody_computes_it(deployment: Deployment) -> None:
    """The prefill leg never arrives: decode's patience ends, and it computes the prompt itself."""
    question = Question(tokens(200, seed=35))
    golden = deployment.golden(question)
    _, decode = legs(deployment, "lost on the way")
    watch = Watch(deployment, DECODE)
    begun = time.monotonic()
    assert deployment.ask(DECODE, asked(question, decode)) == golden
    assert time.monotonic() - begun < 15
    watch.settle(1)
    assert watch.transfers("in", outcome="failed", reason="unknown_source") == 1
    assert watch.source("local_compute") == 200


def test_prefill_is_killed_in_the_middle(deployment: Deployment) -> None:
    questions = [Question(tokens(3000, seed=seed)) for seed in range(40, 46)]
    golden = [deployment.golden(question) for question in questions]
    pairs = [legs(deployment, f"killed {n}") for n in range(len(questions))]
    watch = Watch(deployment, DECODE)
    with ThreadPoolExecutor(24) as pool:
        for question, (prefill, _) in zip(questions, pairs, strict=True):
            pool.submit(post, deployment, PREFILL, asked(question, prefill, max_tokens=1))
        # Half of the decode legs without the router: decode recomputes. Half with it: it ends them.
        direct = [
            pool.submit(deployment.ask, DECODE, asked(question, decode))
            for question, (_, decode) in zip(questions, pairs, strict=True)
        ]
        routed = [
            pool.submit(post, deployment, ROUTER, Question(tokens(3000, seed=seed), stream=True)) for seed in (46, 47)
        ]
        poll(lambda: deployment.metrics(DECODE).total("vllm:num_requests_waiting") >= 6, 10, "decode waits")
        poll(lambda: deployment.metrics(PREFILL).total("vllm:num_requests_running") >= 1, 10, "prefill is busy")
        begun = time.monotonic()
        deployment.fleet.kill(PREFILL)
        answers = [answering.result() for answering in direct]
        statuses = [answering.result() for answering in routed]
        seconds = time.monotonic() - begun
    assert answers == golden
    assert seconds < 30
    assert all(status in {502, 503} for status in statuses), statuses
    watch.settle(len(questions))
    assert watch.transfers("in", outcome="failed") >= 1
    assert deployment.client.get(deployment.urls[DECODE] + "/health").status_code == 200
    assert deployment.client.get(deployment.urls[ROUTER] + "/ready").status_code == 503

    deployment.fleet.restart(PREFILL)
    deployment.fleet.wait_ready()
    assert_pushed(deployment, Question(tokens(1000, seed=48)))
    assert_empty(deployment, DECODE)


def post(deployment: Deployment, name: str, question: Question) -> int:
    """The status of the answer; 0 if the connection broke."""
    try:
        return deployment.client.post(deployment.urls[name] + question.path, json=question.body()).status_code
    except httpx.TransportError:
        return 0
