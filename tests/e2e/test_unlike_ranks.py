"""Two tensor parallel ranks on one side and one on the other: each rank has its heads pushed from, or into, a part.

Both engines can do both, so one fleet shows both ways: the second way's legs are sent without the router.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from neuron_pushkv.fleet import Fleet
from tests.e2e.deployment import (
    DECODE,
    PREFILL,
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
LENGTHS = (1, 33, 513, 1000)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Prefill has two ranks, decode one."""

    def change(values: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        values["arguments"] = [text for text in values["arguments"] if text != UNI]
        # See test_two_ranks for these, and for the cores.
        values["environment"] = {**values["environment"], "VLLM_HOST_IP": "127.0.0.1", "TORCHDYNAMO_DISABLE": "1"}
        for number, engine in enumerate(values["engines"]):
            engine["cores"] = [cores[number % len(cores)]]
        prefill, decode = values["engines"]
        prefill["arguments"], decode["arguments"] = ["--tensor-parallel-size=2"], [UNI]
        values["start_seconds"] = 200

    with Fleet(fleet_settings(change), tmp_path_factory.mktemp("unlike")) as fleet:
        fleet.wait_ready()
        running = Deployment(fleet)
        with running.client:
            running.ask(ROUTER, Question(tokens(40, seed=99), max_tokens=2))
            yield running


def test_two_ranks_push_into_one(deployment: Deployment, unlike: Deployment) -> None:
    questions = [Question(tokens(n, seed=70)) for n in LENGTHS]
    golden = [deployment.golden(question) for question in questions]
    decode = Watch(unlike, DECODE)
    assert unlike.ask_all(ROUTER, questions, at_once=2) == golden
    decode.settle(len(LENGTHS))
    assert decode.transfers("in") == decode.transfers("in", outcome="completed") == len(LENGTHS)
    assert decode.bytes("in") == sum(whole_blocks(0, n) for n in LENGTHS)
    assert decode.source("local_compute") == 1  # the prompt of one token


def test_one_rank_pushes_into_two(deployment: Deployment, unlike: Deployment) -> None:
    questions = [Question(tokens(n, seed=71)) for n in LENGTHS]
    golden = [deployment.golden(question) for question in questions]
    receiver = Watch(unlike, PREFILL)
    for number, question in enumerate(questions):
        prefill, decode = legs(unlike, f"backwards {number}", source=DECODE)
        unlike.ask(DECODE, asked(question, prefill, max_tokens=1))
        assert unlike.ask(PREFILL, asked(question, decode)) == golden[number]
    receiver.settle(2 * len(LENGTHS), prompts=len(LENGTHS))  # each rank counts its own transfers
    assert receiver.transfers("in") == receiver.transfers("in", outcome="completed") == 2 * len(LENGTHS)
    assert receiver.bytes("in") == sum(whole_blocks(0, n) for n in LENGTHS)
    assert receiver.source("local_compute") == 1
