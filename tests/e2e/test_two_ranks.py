"""Two tensor parallel ranks on each side, each pushing its own heads; over shared memory for a change.

These engines end a request whose KV does not come, instead of computing it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from neuron_pushkv.fleet import Fleet
from tests.e2e.deployment import (
    DECODE,
    ROUTER,
    Deployment,
    Question,
    Watch,
    asked,
    fleet_settings,
    legs,
    tokens,
    whole_blocks,
)

UNI = "--distributed-executor-backend=uni"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    def change(values: dict[str, Any]) -> None:
        values["arguments"] = [text for text in values["arguments"] if text != UNI] + ["--tensor-parallel-size=2"]
        # Or else vLLM's ranks look for each other on the network, and each compiles a small function in its first step:
        # together that is most of a minute.
        quick = {"VLLM_HOST_IP": "127.0.0.1", "TORCHDYNAMO_DISABLE": "1"}
        values["environment"] = {**values["environment"], **quick}
        cores = sorted(os.sched_getaffinity(0))
        for number, engine in enumerate(values["engines"]):
            # vLLM's ranks wait for each other with sched_yield. Where the two engines' ranks share cores, Linux (6.18)
            # lets one engine starve for ten seconds and more, which is a dead peer.
            engine["cores"] = [cores[number % len(cores)]]
            engine["connector"].update(provider="shm", unknown_source_seconds=5)
            engine["load_failure_policy"] = "fail"
        values["start_seconds"] = 200

    with Fleet(fleet_settings(change), tmp_path_factory.mktemp("pair")) as fleet:
        fleet.wait_ready()
        running = Deployment(fleet)
        with running.client:
            running.ask(ROUTER, Question(tokens(40, seed=99), max_tokens=2))
            yield running


def test_both_ranks_push_their_heads(deployment: Deployment, pair: Deployment) -> None:
    lengths = (1, 33, 513, 1000)
    questions = [Question(tokens(n, seed=50)) for n in lengths]
    golden = [deployment.golden(question) for question in questions]
    decode = Watch(pair, DECODE)
    assert pair.ask_all(ROUTER, questions, at_once=2) == golden
    decode.settle(2 * len(lengths), prompts=len(lengths))  # each rank counts its own transfers
    assert decode.transfers("in") == decode.transfers("in", outcome="completed") == 2 * len(lengths)
    assert decode.bytes("in") == sum(whole_blocks(0, n) for n in lengths)
    assert decode.source("external_kv_transfer") == sum(lengths) - 1
    assert pair.metrics(DECODE).label("vllm:pushkv_info", "provider") == "shm"


def test_request_whose_kv_does_not_come_is_ended(pair: Deployment) -> None:
    _, parameters = legs(pair, "nobody computes it")
    parameters["tp_size"] = 2
    body = asked(Question(tokens(100, seed=51)), parameters).body()
    url = pair.urls[DECODE] + "/v1/completions"
    decode = Watch(pair, DECODE)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(pair.client.post, url, json=body)
        streamed = pool.submit(pair.client.post, url, json={**body, "stream": True})
    assert whole.result().status_code == 500
    # A stream has begun by then, so vLLM tells of it in an event.
    first = streamed.result().text.splitlines()[0]
    assert json.loads(first.removeprefix("data: "))["error"]["code"] == 500
    question = Question(tokens(64, seed=52))
    pair.ask(ROUTER, question)
    decode.settle(6, prompts=1)
    assert decode.transfers("in", outcome="failed", reason="unknown_source") == 4
    assert decode.bytes("in") == whole_blocks(0, 64)
