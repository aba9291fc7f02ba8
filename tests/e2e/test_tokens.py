"""The main job: prompts go to the router, and come back with exactly the tokens of one undivided engine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from neuron_pushkv import demo, tinymodel
from tests.e2e.deployment import (
    BLOCK,
    DECODE,
    PREFILL,
    ROUTER,
    UNDIVIDED,
    Deployment,
    Question,
    Watch,
    poll,
    tokens,
    whole_blocks,
)

# Around the boundaries of blocks (32) and of prefill chunks (512).
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 300, 480, 511, 512, 513)
LONGER = (543, 544, 545, 700, 1000, 1023, 1024, 1025, 1500, 2047, 2048, 2049, 2999, 3000)
CHATS = (1, 3, 20, 100, 300, 800)

QUESTIONS = [Question(tokens(n, seed=0), stream=i % 2 == 1) for i, n in enumerate((*LENGTHS, *LONGER))]
QUESTIONS += [Question(chat=tinymodel.words(n, seed=n), stream=i % 2 == 1) for i, n in enumerate(CHATS)]


def salted(salt: str) -> list[Question]:
    """The same questions, with nothing of them in any prefix cache yet."""
    return [replace(question, salt=salt) for question in QUESTIONS]


@pytest.fixture(scope="module")
def golden(deployment: Deployment) -> list[tuple[int, ...]]:
    return [deployment.golden(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def prompt_tokens(deployment: Deployment, golden: list[tuple[int, ...]]) -> list[int]:
    return [deployment.prompt_tokens[replace(question, stream=False)] for question in QUESTIONS]


def test_the_cache_lies_in_our_slabs(deployment: Deployment) -> None:
    """All of it, on both engines: whatever is pushed here goes from slab to slab."""
    (size,) = re.findall(r"--kv-cache-memory-bytes=(\d+)", " ".join(deployment.fleet.settings.arguments))
    deployment.ask(ROUTER, Question(tokens(40, seed=11)))
    for name in (PREFILL, DECODE):

        def slab_bytes(name: str = name) -> float:
            return deployment.metrics(name).total("vllm:pushkv_slab_bytes")

        assert poll(slab_bytes, 10, f"the gauges of {name}") == int(size)


def test_control_the_undivided_engine_repeats_itself(deployment: Deployment, golden: list[tuple[int, ...]]) -> None:
    assert deployment.ask_all(UNDIVIDED, salted("control alone")) == golden
    assert deployment.ask_all(UNDIVIDED, salted("control at once"), at_once=8) == golden


def test_answers_tell_prompts_apart(golden: list[tuple[int, ...]]) -> None:
    assert len(QUESTIONS) >= 30
    assert len(set(golden)) == len(golden)
    assert all(len(set(answer)) > 3 for answer in golden), "an answer that repeats one token shows little"


@pytest.mark.parametrize("at_once", [1, 8])
def test_every_token_and_every_byte(
    deployment: Deployment, golden: list[tuple[int, ...]], prompt_tokens: list[int], at_once: int
) -> None:
    prefill, decode = Watch(deployment, PREFILL), Watch(deployment, DECODE)
    assert deployment.ask_all(ROUTER, salted(f"{at_once} at once"), at_once) == golden
    decode.settle(len(QUESTIONS))
    assert decode.transfers("in") == decode.transfers("in", outcome="completed") == len(QUESTIONS)
    assert decode.grown("vllm:pushkv_tokens_total", direction="in") == sum(prompt_tokens)
    assert decode.bytes("in") == sum(whole_blocks(0, n) for n in prompt_tokens)
    # vLLM does not count the last token, which is always computed again for its logits, unless it is the only one.
    assert decode.source("external_kv_transfer") == sum(n for n in prompt_tokens if n > 1)
    assert decode.source("local_compute") == prompt_tokens.count(1)
    assert decode.source("local_cache_hit") == 0
    assert prefill.source("local_compute") == sum(prompt_tokens)
    assert decode.grown("vllm:pushkv_events_total") == decode.grown("vllm:pushkv_refusals_total") == 0


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [
        (tokens(1000, seed=1), tokens(1000, seed=1) + tokens(500, seed=2), 992),  # a longer prompt, hit inside
        (tokens(1024, seed=3), tokens(1024, seed=3) + tokens(100, seed=4), 1024),  # at a block boundary
        (tokens(512, seed=5), tokens(512, seed=5), 480),  # all of it is there, but the last block is wanted again
        (tokens(500, seed=6), tokens(500, seed=6)[:100] + tokens(300, seed=7), 96),  # another continuation
    ],
)
def test_prefix_hit_on_decode(
    deployment: Deployment, first: tuple[int, ...], second: tuple[int, ...], hit: int
) -> None:
    deployment.ask(ROUTER, Question(first))
    question = Question(second)
    golden = deployment.golden(question)
    decode = Watch(deployment, DECODE)
    assert deployment.ask(ROUTER, question) == golden
    decode.settle(1)
    assert decode.source("local_cache_hit") == hit
    assert decode.bytes("in") == whole_blocks(hit, len(second))
    assert decode.source("local_compute") == 0


def test_one_wrong_block_changes_the_tokens(deployment: Deployment) -> None:
    question = Question(tokens(6 * BLOCK + 10, seed=8))
    golden = deployment.golden(question)
    deployment.rpc(DECODE, "remember_blocks")
    assert deployment.ask(ROUTER, question) == golden
    changed = deployment.rpc(DECODE, "changed_blocks")
    assert len(changed) == 7
    wrong = 0
    for block in changed:
        deployment.rpc(DECODE, "negate_block", str(block))
        wrong += deployment.ask(ROUTER, question) != golden
        deployment.rpc(DECODE, "negate_block", str(block))
    # Six full blocks are decode's prefix cache by now; the seventh is pushed anew each time, elsewhere.
    assert wrong == 6
    assert deployment.ask(ROUTER, question) == golden


def test_several_samples_of_one_prompt(deployment: Deployment) -> None:
    body = Question(tokens(300, seed=9), more={"n": 3, "temperature": 1.0, "seed": 5}).body()
    answers = []
    for name in (UNDIVIDED, ROUTER):
        response = deployment.client.post(deployment.urls[name] + "/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answers.append([choice["token_ids"] for choice in response.json()["choices"]])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 3


def test_several_prompts_in_one_request(deployment: Deployment) -> None:
    questions = [Question(tokens(n, seed=10)) for n in (33, 200, 600)]
    golden = [deployment.golden(question) for question in questions]
    body = {**questions[0].body(), "prompt": [question.prompt for question in questions]}
    decode = Watch(deployment, DECODE)
    response = deployment.client.post(deployment.urls[ROUTER] + "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert [tuple(choice["token_ids"]) for choice in response.json()["choices"]] == golden
    decode.settle(3)
    assert decode.bytes("in") == sum(whole_blocks(0, n) for n in (33, 200, 600))


def test_demo_notices_what_is_recomputed(deployment: Deployment) -> None:
    urls = deployment.urls
    row = demo.measure(deployment.client, urls[ROUTER], urls[DECODE], urls[UNDIVIDED], 70)
    assert list(row.faults()) == []
    # The parameters are lost on the way: decode answers, rightly, but has computed everything itself.
    row = demo.measure(deployment.client, urls[DECODE], urls[DECODE], urls[UNDIVIDED], 71)
    assert list(row.faults()) == [
        "0 bytes were pushed instead of 393216",
        "the decode engine computed 71 of its tokens itself",
    ]
