"""A model with full attention and sliding windows, which vLLM gives two KV cache groups; pushed layer by layer.

Its decode engine runs one request at a time, and its prefill engine keeps what nobody asks for only two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from neuron_pushkv.fleet import Fleet
from tests.e2e import hybrid
from tests.e2e.deployment import (
    BLOCK,
    DECODE,
    PREFILL,
    ROUTER,
    UNDIVIDED,
    Deployment,
    Question,
    Watch,
    asked,
    fleet_settings,
    kept,
    legs,
    poll,
    tokens,
)

LENGTHS = (1, 2, 33, 64, 65, 99, 100, 101, 129, 480, 513, 1000, 2049)
KEPT_SECONDS = 2.0


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = hybrid.make(tmp_path_factory.mktemp("models") / "hybrid")

    def change(values: dict[str, Any]) -> None:
        values["model"] = str(folder)
        values["arguments"] = [*values["arguments"], "--served-model-name=tiny"]
        values["engines"].append({"name": UNDIVIDED, "role": "undivided", "port": 1})
        prefill, decode, _ = values["engines"]
        prefill["connector"].update(push_granularity="layer", keep_unclaimed_seconds=KEPT_SECONDS)
        decode["arguments"] = ["--max-num-seqs=1"]
        values["start_seconds"] = 200

    with Fleet(fleet_settings(change), tmp_path_factory.mktemp("windows")) as fleet:
        fleet.wait_ready()
        running = Deployment(fleet)
        with running.client:
            for name in (ROUTER, UNDIVIDED):
                running.ask(name, Question(tokens(40, seed=99), max_tokens=2))
            yield running


def pushed(count: int) -> int:
    """Bytes that have to be pushed of a prompt: its last token is computed again, and sees a window before it."""
    end = count - 1
    oldest = max(0, end - hybrid.WINDOW + 1) // BLOCK
    blocks = -(-end // BLOCK)
    return (blocks + blocks - oldest) * BLOCK * hybrid.GROUP_BYTES if end else 0


@pytest.mark.parametrize("at_once", [1, 4])
def test_every_token_and_only_the_last_window(windows: Deployment, at_once: int) -> None:
    questions = [Question(tokens(n, seed=60), stream=n % 2 == 0, salt=str(at_once)) for n in LENGTHS]
    golden = [windows.golden(question) for question in questions]
    assert len(set(golden)) == len(golden)
    decode = Watch(windows, DECODE)
    assert windows.ask_all(ROUTER, questions, at_once) == golden
    loads = sum(n > 1 for n in LENGTHS)
    decode.settle(loads, prompts=len(LENGTHS))
    assert decode.transfers("in") == decode.transfers("in", outcome="completed") == loads
    assert decode.bytes("in") == sum(pushed(n) for n in LENGTHS)
    assert decode.grown("vllm:pushkv_events_total") == decode.grown("vllm:pushkv_refusals_total") == 0


def test_prefix_hit_on_decode(windows: Deployment) -> None:
    # Of the first, decode has what the token after 992 sees, so vLLM can use its cache there, but nowhere before.
    first, more = tokens(993, seed=61), tokens(500, seed=62)
    windows.ask(ROUTER, Question(first))
    question = Question(first + more)
    golden = windows.golden(question)
    decode = Watch(windows, DECODE)
    assert windows.ask(ROUTER, question) == golden
    decode.settle(1)
    assert decode.source("local_cache_hit") == 992
    assert decode.bytes("in") == pushed(1493) - 992 * hybrid.GROUP_BYTES


def test_prefill_goes_on_decoding_while_its_window_is_kept(windows: Deployment) -> None:
    question = Question(tokens(700, seed=63))
    golden = windows.golden(question)
    prefill, decode = legs(windows, "moved on")
    windows.ask(PREFILL, asked(question, prefill, max_tokens=200))
    assert windows.ask(DECODE, asked(question, decode)) == golden


def test_a_long_queue_at_decode_costs_no_kv(windows: Deployment) -> None:
    """F4: prefill would keep it for two seconds, but decode has announced that it will come for it."""
    question = Question(tokens(600, seed=64))
    golden = windows.golden(question)
    prefill, decode = legs(windows, "queued")
    watch = Watch(windows, DECODE)
    with ThreadPoolExecutor(2) as pool:
        busy = pool.submit(windows.ask, DECODE, Question(tokens(100, seed=65), max_tokens=3000))
        poll(lambda: windows.metrics(DECODE).total("vllm:num_requests_running") == 1, 10, "decode is busy")
        windows.ask(PREFILL, asked(question, prefill, max_tokens=1))
        queued = pool.submit(windows.ask, DECODE, asked(question, decode))
        poll(lambda: windows.metrics(DECODE).total("vllm:num_requests_waiting") == 1, 10, "the other waits")
        waited = time.monotonic()
        busy.result()
        assert time.monotonic() - waited > 2 * KEPT_SECONDS, "decode was not busy for long enough; raise max_tokens"
        assert queued.result() == golden
    watch.settle(1, prompts=2)
    assert watch.transfers("in", outcome="completed") == 1


def test_kv_that_nobody_has_announced_to_want_is_let_go(windows: Deployment) -> None:
    """F4's control: without the announcement it would have been gone."""
    question = Question(tokens(600, seed=66))
    prefill, _ = legs(windows, "never wanted")
    windows.ask(PREFILL, asked(question, prefill, max_tokens=1))
    assert kept(windows) >= 1
    poll(lambda: kept(windows) == 0, 3 * KEPT_SECONDS, "prefill lets go")
