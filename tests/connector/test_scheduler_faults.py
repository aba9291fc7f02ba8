"""Bad parameters and hooks that raise: the engine lives, no block is lost, and vLLM's policy decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_pushkv.errors import Reason
from tests.connector.harness import DECODE, PREFILL, PROMPT, Harness, untried

# Bad parameters.

BAD = [
    ({"remote_port": "14600"}, Reason.BAD_PARAMETERS),
    ({"remote_host": None}, Reason.BAD_PARAMETERS),
    ({"remote_host": "10.9.8.7"}, Reason.HOST_NOT_ALLOWED),
    ({"tp_size": 0}, Reason.BAD_PARAMETERS),
    ({"do_remote_decode": True}, Reason.BAD_PARAMETERS),
    ({"do_remote_prefill": "yes"}, Reason.BAD_PARAMETERS),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_bad_parameters_are_counted_said_once_and_computed_here(
    engine: Harness, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: Reason
) -> None:
    with caplog.at_level(logging.WARNING):
        engine.add("d", PROMPT, {**DECODE, **change}, max_tokens=2)
        engine.steps()
    assert engine.answers["d"].finish_reason is not None
    assert untried(engine) == {f"in:failed:{reason}": 1}
    assert not engine.engine.all("receives")
    assert [reason.value in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_bad_parameters_fail_the_request_where_vllm_is_told_to(
    model: Path, change: dict[str, Any], reason: Reason
) -> None:
    harness = Harness(model, policy="fail")
    whole = harness.free
    harness.add("d", PROMPT, {**DECODE, **change})
    harness.steps()
    assert str(harness.answers["d"].finish_reason) == "error"
    assert harness.free == whole
    assert untried(harness) == {f"in:failed:{reason}": 1}
    assert not any(harness.engine.all(kind) for kind in ("receives", "withdrawn"))
    assert harness.side._receiving._loads == {}


def test_a_refused_load_that_is_aborted_first_is_still_reported(model: Path) -> None:
    harness = Harness(model, policy="fail", ahead=True)
    whole = harness.free
    harness.add("d", PROMPT, {**DECODE, "remote_port": 0})
    harness.step()
    harness.abort("d")
    assert harness.free == whole - 7
    harness.steps()
    assert harness.free == whole
    assert not harness.scheduler.requests


def test_bad_parameters_of_a_prefill_leg_only_cost_the_push(engine: Harness) -> None:
    engine.add("p", PROMPT, {**PREFILL, "transfer_id": 5})
    engine.add("q", PROMPT, {**PREFILL, "deliveries": 0})
    engine.steps()
    assert engine.answers["p"].kv_transfer_params is None
    assert untried(engine) == {"out:failed:bad_parameters": 2}
    assert not engine.directory.kept


# Hooks that raise.


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


BREAK: dict[str, Callable[[Harness, pytest.MonkeyPatch], None]] = {
    "content": lambda engine, patch: patch.setattr("neuron_pushkv.connector.compat.content_of", broken),
    "parse": lambda engine, patch: patch.setattr("neuron_pushkv.connector.scheduler.parse", broken),
    "view": lambda engine, patch: patch.setattr("neuron_pushkv.connector.compat.step_view", broken),
    "keep": lambda engine, patch: patch.setattr(engine.directory, "keep", broken),
    "take_freed": lambda engine, patch: patch.setattr(engine.directory, "take_freed", broken),
    "touch": lambda engine, patch: engine.side.bind_pool(
        SimpleNamespace(blocks=engine.pool.blocks, touch=broken, free_blocks=broken)
    ),
    "order": lambda engine, patch: patch.setattr(engine.side._receiving, "order", broken),
    "reported": lambda engine, patch: patch.setattr(engine.side._receiving, "reported", broken),
    "finished": lambda engine, patch: patch.setattr(engine.side._receiving, "finished", broken),
}


@pytest.mark.parametrize("where", BREAK)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_hook_that_raises_hurts_no_engine_and_loses_no_block(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, policy: str
) -> None:
    engine = Harness(model, chunk=64, policy=policy)
    whole, pool = engine.free, engine.pool
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        BREAK[where](engine, patch)
        engine.add("d", [9] * 150, DECODE, max_tokens=2)
        engine.add("p", PROMPT, PREFILL)
        engine.step()
        engine.step(received=[order.request for order in engine.engine.all("receives")])
        engine.steps()
        engine.add("e", [8] * 150, DECODE)
        engine.step()
        engine.abort("e")
        engine.step(failed=[order.request for order in engine.engine.all("receives") if order.request == "e"])
        engine.steps()
    assert any("broken on purpose" in (record.exc_text or "") for record in caplog.records)
    assert any("hook_error" in orders.counters for orders in engine.engine.steps)
    assert set(engine.answers) >= {"p", "d"}
    engine.side.bind_pool(pool)
    engine.directory.free(*engine.directory.kept)
    engine.add("last", [1, 2])
    engine.steps()
    assert engine.free == whole
    assert not engine.scheduler.requests
    assert engine.side._sending._offered == {}
    assert engine.kept == 0


def test_a_step_that_cannot_be_read_takes_back_what_was_sealed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(model, chunk=256)
    whole = engine.free
    engine.add("p", PROMPT, PREFILL, max_tokens=5)
    engine.step()
    assert engine.engine.sealed(len(PROMPT)) == ["p"]
    with monkeypatch.context() as patch:
        patch.setattr("neuron_pushkv.connector.compat.step_view", broken)
        engine.step()
    assert engine.engine.steps[-1].preempted == ("p",)
    engine.step()
    assert engine.engine.sealed(len(PROMPT)) == ["p", "p"]
    engine.steps()
    assert engine.directory.kept == ["p"]
    engine.directory.free("p")
    engine.add("last", [1, 2])
    engine.steps()
    assert engine.free == whole
