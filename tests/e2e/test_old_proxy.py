"""A proxy that was written for vLLM's ``NixlPushConnector`` and knows nothing of ours is served as it is.

Such a proxy gives both legs one ``X-Request-Id``, knows where the prefill engine's listener is from its own command
line, and sends no transfer id: the two legs are paired by what their prompts contain.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from neuron_pushkv import tinymodel
from tests.e2e.deployment import DECODE, PREFILL, Deployment, Question, Watch, poll, tokens, whole_blocks


class Proxy:
    """Sends what such a proxy sends."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        (engine,) = (e for e in deployment.fleet.settings.engines if e.name == PREFILL)
        assert engine.connector
        self._coordinates = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": PREFILL,
            "remote_host": engine.connector.host,
            "remote_port": engine.connector.port,
            "tp_size": 1,
            "pp_size": 1,
        }

    def prefill(self, question: Question, request_id: str) -> httpx.Response:
        parameters = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        return self._post(PREFILL, {**question.body(), "max_tokens": 1}, parameters, request_id, question.path)

    def decode(self, question: Question, request_id: str) -> tuple[int, ...]:
        parameters = {**self._coordinates, "remote_request_id": request_id}
        response = self._post(DECODE, question.body(), parameters, request_id, question.path)
        return tuple(response.json()["choices"][0]["token_ids"])

    def _post(
        self, name: str, body: dict[str, Any], parameters: dict[str, Any], request_id: str, path: str
    ) -> httpx.Response:
        response = self._deployment.client.post(
            self._deployment.urls[name] + path,
            json={**body, "kv_transfer_params": parameters},
            headers={"X-Request-Id": request_id},
        )
        assert response.status_code == 200, response.text
        return response


@pytest.fixture
def proxy(deployment: Deployment) -> Proxy:
    return Proxy(deployment)


@pytest.mark.parametrize("question", [Question(tokens(700, seed=20)), Question(chat=tinymodel.words(150, seed=21))])
@pytest.mark.parametrize("order", ["prefill first", "decode first", "at once"])
def test_both_legs_find_each_other(deployment: Deployment, proxy: Proxy, question: Question, order: str) -> None:
    question = replace(question, salt=order)
    golden = deployment.golden(question)
    request_id = str(uuid.uuid4())
    decode = Watch(deployment, DECODE)
    with ThreadPoolExecutor(1) as pool:
        if order == "prefill first":
            proxy.prefill(question, request_id)
            answer = proxy.decode(question, request_id)
        elif order == "at once":
            answering = pool.submit(proxy.decode, question, request_id)
            proxy.prefill(question, request_id)
            answer = answering.result()
        else:
            answering = pool.submit(proxy.decode, question, request_id)
            poll(lambda: waiting_for_kv(deployment) == 1, 10, "decode waits for its KV")
            proxy.prefill(question, request_id)
            answer = answering.result()
    assert answer == golden
    decode.settle(1)
    assert decode.transfers("in") == decode.transfers("in", outcome="completed") == 1
    assert decode.bytes("in") == whole_blocks(0, deployment.prompt_tokens[question])
    assert decode.source("local_compute") == 0


def test_like_prompts_and_unlike_ones_at_once(deployment: Deployment, proxy: Proxy) -> None:
    lengths = (300, 300, 300, 301, 64, 65, 900, 900)
    questions = [Question(tokens(n, seed=22), salt="old proxy") for n in lengths]
    golden = [deployment.golden(question) for question in questions]
    decode = Watch(deployment, DECODE)
    with ThreadPoolExecutor(2 * len(questions)) as pool:
        legs: Sequence[tuple[Future[httpx.Response], Future[tuple[int, ...]]]] = [
            (pool.submit(proxy.prefill, question, name), pool.submit(proxy.decode, question, name))
            for question in questions
            for name in [str(uuid.uuid4())]
        ]
        answers = [answering.result() for _, answering in legs]
        for prefilling, _ in legs:
            prefilling.result()
    assert answers == golden
    # Those with equal prompts may find each other's blocks in decode's prefix cache, and then need less.
    decode.settle(len(set(lengths)), prompts=len(lengths))
    assert decode.transfers("in") == decode.transfers("in", outcome="completed")
    assert decode.source("local_compute") == 0


def waiting_for_kv(deployment: Deployment) -> int:
    return round(deployment.metrics(DECODE).total("vllm:num_requests_waiting"))
