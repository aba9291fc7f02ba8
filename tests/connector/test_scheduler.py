"""The scheduler side inside vLLM's real scheduler, with its real block pool: whatever happens, no block is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_pushkv.orders import Ready, Release, Remote
from tests.connector.harness import DECODE, PREFILL, PROMPT, Harness, untried

# Prefill legs.


def test_prefix_hits_are_pushed_before_the_step_that_computes_the_rest(engine: Harness) -> None:
    engine.add("p", PROMPT)
    engine.steps()
    engine.add("decoding", [1, 2, 3], max_tokens=9)
    engine.step()
    engine.add("q", [*PROMPT, 1, 2], PREFILL)
    (table,) = engine.tables_of_step("q")
    orders = engine.outputs[-1].kv_connector_metadata.orders
    assert orders.cached == (Ready("q", 192, (tuple(table[:6]),)),)
    assert orders.ready == (Ready("q", 202, (tuple(table[:7]),)),)


@pytest.mark.parametrize("parameters", [PREFILL, None])
@pytest.mark.parametrize(("length", "before"), [(32, 0), (96, 64)])
def test_prefix_hits_that_the_same_step_fills_are_not_pushed_before_it(
    engine: Harness, parameters: dict[str, Any] | None, length: int, before: int
) -> None:
    """Whether it is a new request that fills them or a running one, one of ours or not."""
    engine.add("p", PROMPT[:length], parameters)
    for _ in range(before // 64):
        engine.step()
    engine.add("q", [*PROMPT[:length], 1, 2], {**PREFILL, "transfer_id": "u"})
    output = engine.step()
    (q,) = (data for data in output.scheduled_new_reqs if data.req_id == "q")
    assert q.num_computed_tokens == length, "vLLM counts as computed what this very step computes"
    assert sum(order.tokens for order in output.kv_connector_metadata.orders.cached) == before


def test_a_finished_prefill_keeps_its_blocks_until_all_ranks_let_go(engine: Harness) -> None:
    whole = engine.free
    engine.add("p", PROMPT, PREFILL)
    engine.steps()
    assert engine.free == whole - 7
    assert engine.directory.kept == ["p"]
    assert not engine.scheduler.has_requests()
    engine.directory.free("p", "unheard-of")
    engine.add("next", [1, 2])
    assert engine.free == whole
    assert engine.engine.all("finished")[0].kept


def test_kept_blocks_are_still_shared_by_the_prefix_cache(engine: Harness) -> None:
    engine.add("p", PROMPT, PREFILL)
    engine.steps()
    free = engine.free
    engine.add("same", PROMPT)
    engine.steps()
    assert engine.answers["same"].prefill_stats.num_cached_tokens == 192
    assert engine.free == free


def test_an_idle_engine_with_kept_blocks_has_nothing_to_do(engine: Harness) -> None:
    engine.add("p", PROMPT, PREFILL)
    engine.steps()
    assert engine.kept == 1
    assert not engine.connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("steps", range(6))
def test_a_prefill_aborted_at_any_stage(engine: Harness, steps: int) -> None:
    whole = engine.free
    engine.add("p", PROMPT, PREFILL, max_tokens=3)
    for _ in range(steps):
        engine.step()
    engine.abort("p")
    sealed = bool(engine.engine.sealed(len(PROMPT)))
    assert sealed == (steps >= 4)
    assert engine.directory.kept == (["p"] if sealed else [])
    assert engine.free == whole - (7 if sealed else 0)
    engine.steps()
    told = [(finish.request, finish.kept) for finish in engine.engine.all("finished")]
    assert told == ([("p", sealed)] if steps else [])
    assert [offer.request for offer in engine.engine.all("offers")] == (["p"] if steps else [])


def test_the_answer_is_only_given_for_what_is_kept(engine: Harness) -> None:
    engine.add("p", PROMPT, PREFILL)
    engine.add("q", PROMPT)
    engine.steps()
    assert engine.answers["p"].kv_transfer_params["remote_request_id"] == "p"
    assert engine.answers["q"].kv_transfer_params is None


def test_a_prefill_leg_behind_a_full_batch_is_offered_at_once(model: Path) -> None:
    harness = Harness(model, chunk=64)
    harness.add("busy", PROMPT * 2)
    harness.step()
    harness.add("queued", PROMPT, PREFILL)
    harness.step()
    assert [offer.request for offer in harness.engine.all("offers")] == ["queued"]
    assert "queued" not in harness.outputs[-1].num_scheduled_tokens


def test_prompts_without_tokens_are_not_offered(engine: Harness) -> None:
    import torch

    request = SimpleNamespace(
        request_id="embeds",
        kv_transfer_params=PREFILL,
        prompt_token_ids=None,
        prompt_embeds=torch.zeros(1),
        resumable=False,
        abort_immediately=False,
    )
    engine.side.on_new_request(request)
    assert untried(engine) == {"out:failed:unsupported": 1}
    assert not engine.engine.all("offers")


def test_a_name_that_is_still_kept_is_not_offered_twice(engine: Harness) -> None:
    engine.add("p", PROMPT, PREFILL)
    engine.steps()
    engine.add("p", PROMPT, PREFILL)
    engine.steps()
    assert len(engine.engine.all("offers")) == 1
    assert engine.directory.kept == ["p"]
    assert engine.answers["p"].kv_transfer_params is None
    assert {"request_id_in_use": 1} in [orders.counters for orders in engine.engine.steps]


# Decode legs.


def test_a_load_is_asked_for_once(engine: Harness) -> None:
    engine.add("d", PROMPT, DECODE, max_tokens=2)
    engine.step()
    engine.step()
    (order,) = engine.engine.all("receives")
    assert (order.start_token, order.end_token, len(order.blocks[0])) == (0, 200, 7)
    engine.step(received=["d"])
    engine.steps()
    assert len(engine.engine.all("receives")) == 1
    assert engine.answers["d"].finish_reason is not None
    assert [output.num_scheduled_tokens.get("d") for output in engine.outputs if output.num_scheduled_tokens] == [1, 1]


def test_both_sides_name_a_prompt_alike(model: Path) -> None:
    more: dict[str, Any] = {"cache_salt": "pepper"}
    sender, receiver = Harness(model), Harness(model, block_size=64, blocks=64)
    sender.add("p", PROMPT, PREFILL, **more)
    sender.step()
    receiver.add("d", PROMPT, DECODE, **more)
    receiver.step()
    (offer,), (order,) = sender.engine.all("offers"), receiver.engine.all("receives")
    assert offer.content.at(200) == order.end_content
    assert offer.content.at(0) == order.start_content
    other = Harness(model)
    other.add("p", PROMPT, PREFILL)
    other.step()
    assert other.engine.all("offers")[0].content.at(200) != order.end_content


def test_only_what_the_prefix_cache_lacks_is_asked_for(engine: Harness) -> None:
    engine.add("before", PROMPT[:100])
    engine.steps()
    engine.add("d", PROMPT, DECODE)
    engine.step()
    (order,) = engine.engine.all("receives")
    table = engine.scheduler.kv_cache_manager.get_block_ids("d")[0]
    assert (order.start_token, order.blocks[0]) == (96, tuple(table[3:]))
    engine.step(received=["d"])


def test_a_failed_load_is_computed_and_not_tried_again(engine: Harness) -> None:
    engine.add("d", PROMPT, DECODE, max_tokens=2)
    engine.step()
    engine.step(failed=["d"])
    engine.steps()
    assert len(engine.engine.all("receives")) == 1
    assert sum(output.num_scheduled_tokens.get("d", 0) for output in engine.outputs) == 201
    assert engine.answers["d"].finish_reason is not None


def test_a_failed_load_ends_the_request_where_vllm_is_told_to(model: Path) -> None:
    harness = Harness(model, policy="fail")
    whole = harness.free
    harness.add("d", PROMPT, DECODE)
    harness.step()
    harness.step(failed=["d"])
    harness.steps()
    assert str(harness.answers["d"].finish_reason) == "error"
    assert harness.free == whole
    assert not harness.engine.all("withdrawn")


def test_a_preemption_after_the_load_is_computed_here(model: Path) -> None:
    harness = Harness(model, blocks=18, chunk=256)
    whole = harness.free
    harness.add("elder", [3] * 250, max_tokens=12)
    harness.step()
    harness.add("d", [5] * 250, DECODE, max_tokens=12)
    harness.step()
    harness.step(received=["d"])
    harness.steps()
    preempted = [name for output in harness.outputs for name in output.preempted_req_ids or ()]
    assert preempted == ["d"]
    assert len(harness.engine.all("receives")) == 1
    assert harness.free == whole


def test_an_allocation_that_fails_asks_again(model: Path) -> None:
    harness = Harness(model, blocks=18, chunk=256)
    harness.add("elder", [3] * 450, max_tokens=3)
    harness.step()
    harness.add("d", [5] * 250, DECODE)
    harness.step()
    assert not harness.engine.all("receives")
    while not harness.engine.all("receives"):
        harness.step()
    harness.step(received=["d"])
    harness.steps()
    assert len(harness.engine.all("receives")) == 1


REPORTS = ["before", "with", "after", "twice", "failed", "never asked"]


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_load_aborted_at_any_stage_is_reported_once(engine: Harness, steps: int, report: str) -> None:
    """F7: the report comes before the abort, with it, after it, twice, as failed, or for nobody. vLLM hears it once."""
    whole = engine.free
    engine.add("d", PROMPT, DECODE, max_tokens=9)
    for _ in range(steps):
        engine.step()
    asked = bool(engine.engine.all("receives"))
    assert asked == (steps > 0)
    if report == "before":
        engine.step(received=["d"] if asked else [])
        asked = bool(engine.engine.all("receives"))
    engine.abort("d")
    if report == "failed":
        engine.step(failed=["d"])
    elif report != "before":
        engine.step(received=["d"])
    if report in ("twice", "after"):
        engine.step(received=["d"])
        engine.step(failed=["d"])
    if report == "never asked":
        engine.step(received=["nobody", "d"])
    if report == "before" and not steps:
        engine.step(received=["d"])
    engine.steps()
    assert engine.free == whole
    assert "d" not in engine.scheduler.requests


def test_an_aborted_load_holds_its_blocks_until_it_is_reported(engine: Harness) -> None:
    whole = engine.free
    engine.add("d", PROMPT, DECODE)
    engine.step()
    engine.abort("d")
    engine.step()
    assert engine.engine.all("withdrawn") == ["d"]
    assert engine.free == whole - 7
    engine.step(failed=["d"])
    assert engine.free == whole


def phantom(engine: Harness, name: str, parameters: Any) -> None:
    """What vLLM makes up for a request that is rejected before it is admitted: no prompt, aborted at once."""
    engine.add(name, [0], parameters, abort_immediately=True)
    engine.abort(name)


def test_what_was_computed_for_a_rejected_request_is_released(engine: Harness) -> None:
    """F9. The engine was idle, and takes a step for it."""
    assert not engine.scheduler.has_requests()
    phantom(engine, "rejected", {**DECODE, "tp_size": 2})
    assert engine.scheduler.has_requests()
    engine.step()
    assert engine.engine.steps[-1].releases == (Release("t", Remote("127.0.0.1", 14600, 2, 1)),)
    phantom(engine, "prefill", PREFILL)
    phantom(engine, "nameless", {**DECODE, "transfer_id": None})
    phantom(engine, "elsewhere", {**DECODE, "remote_host": "8.8.8.8"})
    engine.steps()
    assert len(engine.engine.all("releases")) == 1
    assert not any(engine.engine.all(kind) for kind in ("offers", "intents", "receives", "withdrawn", "finished"))
    assert untried(engine) == {}


def fill(engine: Harness) -> None:
    """Leave no blocks for anybody else until "elder" has ended, after two steps."""
    engine.add("elder", [3] * 450, max_tokens=3)
    engine.step()


def test_a_load_that_has_to_queue_is_announced(model: Path) -> None:
    """F4: the sender keeps what it has for a receiver that has no room yet."""
    harness = Harness(model, blocks=18, chunk=256)
    fill(harness)
    harness.add("d", PROMPT, DECODE)
    harness.step()
    (intent,) = harness.engine.steps[-1].intents
    assert (intent.request, intent.transfer, intent.remote) == ("d", "t", Remote("127.0.0.1", 14600))
    while not harness.engine.all("receives"):
        harness.step()
    (order,) = harness.engine.all("receives")
    assert (intent.end_token, intent.end_content) == (order.end_token, order.end_content) == (200, order.end_content)
    harness.step(received=["d"])
    harness.steps()
    assert len(harness.engine.all("intents")) == 1
    assert not harness.engine.all("withdrawn")


def test_a_load_that_gets_its_blocks_at_once_needs_no_announcement(engine: Harness) -> None:
    engine.add("d", PROMPT, DECODE)
    engine.step()
    assert engine.engine.all("receives")
    assert not engine.engine.all("intents")
    engine.step(received=["d"])


@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_leaves_the_queue_takes_its_announcement_back(model: Path, announced: bool) -> None:
    harness = Harness(model, blocks=18, chunk=256)
    fill(harness)
    harness.add("d", PROMPT, DECODE)
    if announced:
        harness.step()
    harness.abort("d")
    harness.steps()
    assert [intent.request for intent in harness.engine.all("intents")] == (["d"] if announced else [])
    assert harness.engine.all("withdrawn") == (["d"] if announced else [])
    assert not harness.engine.all("receives")
    assert harness.side._receiving._loads == {}


def test_a_load_that_turns_out_not_to_be_needed_takes_its_announcement_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt was in the prefix cache by the time there was room."""
    harness = Harness(model, blocks=18, chunk=256)
    fill(harness)
    harness.add("d", PROMPT, DECODE)
    harness.step()
    assert harness.engine.all("intents")
    monkeypatch.setattr(harness.side, "get_num_new_matched_tokens", lambda request, computed: (0, False))
    harness.steps()
    assert harness.engine.all("withdrawn") == ["d"]
    assert not harness.engine.all("receives")


@pytest.mark.parametrize("headers", [{"traceparent": "00-ab-cd-01"}, {"TraceParent": "00-ab-cd-01"}])
def test_trace_contexts_go_with_offers_and_loads(engine: Harness, headers: dict[str, str]) -> None:
    engine.add("d", [9] * 150, DECODE, trace_headers=headers)
    engine.add("p", PROMPT, PREFILL, trace_headers=headers)
    engine.step()
    orders = [*engine.engine.all("offers"), *engine.engine.all("receives")]
    assert [order.traceparent for order in orders] == ["00-ab-cd-01"] * 2
    engine.step(received=["d"])


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "a"}, {"traceparent": "x" * 129}, {"traceparent": "\0"}])
def test_what_is_no_trace_context_is_dropped(engine: Harness, headers: Any) -> None:
    engine.add("p", PROMPT, PREFILL, trace_headers=headers)
    engine.step()
    assert [offer.traceparent for offer in engine.engine.all("offers")] == [""]
    engine.steps()


def test_both_roles_in_one_engine(engine: Harness) -> None:
    engine.add("d", [9] * 150, {**DECODE, "transfer_id": "b"}, max_tokens=2)
    engine.add("p", PROMPT, {**PREFILL, "transfer_id": "a"})
    engine.step()
    engine.step(failed=["d"])
    engine.steps()
    assert engine.answers["p"].kv_transfer_params["transfer_id"] == "a"
    assert engine.directory.kept == ["p"]
