"""Models with a second KV cache group that keeps a sliding window only, in vLLM's real scheduler and block pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv.connector.compat import NULL_BLOCK
from neuron_pushkv.layout import Group
from tests.connector.harness import DECODE, PREFILL, Harness

BLOCK = 32
LENGTHS = [33, 64, 65, 96, 97, 160, 161, 200, 255, 256, 257]


def hybrid(model: Path, window: int = 64, **settings: Any) -> Harness:
    return Harness(model, window=window, **settings)


def numbers(count: int, first: int = 1) -> list[int]:
    return [(first + 7 * token) % 1000 for token in range(count)]


def seen(count: int, window: int) -> range:
    """Numbers of the blocks that hold what the prompt's last token sees."""
    return range(max(0, count - window) // BLOCK, -(-count // BLOCK))


def test_vllm_writes_the_null_block_where_we_look_for_it(model: Path) -> None:
    assert hybrid(model).pool.null_block.block_id == NULL_BLOCK


@pytest.mark.parametrize("window", [33, 64, 65, 100, 1000])
@pytest.mark.parametrize("count", LENGTHS)
def test_the_last_window_is_ready_when_the_prompt_is(model: Path, count: int, window: int) -> None:
    """In chunks that end anywhere; nothing of the window group is named before."""
    harness = hybrid(model, window, chunk=50)
    harness.add("p", numbers(count), PREFILL)
    while not harness.engine.sealed(count):
        tables = harness.tables_of_step("p")
        for order in harness.outputs[-1].kv_connector_metadata.orders.ready:
            full, part = order.blocks
            assert full == tuple(tables[0][: -(-order.tokens // BLOCK)])
            if order.tokens < count:
                assert part == ()
                continue
            named = {number: block for number, block in enumerate(part) if block >= 0}
            assert list(named) == list(seen(count, window))
            assert len(part) == -(-count // BLOCK)
            assert all(tables[1][number] == block != NULL_BLOCK for number, block in named.items())
    assert [order.tokens for order in harness.engine.ready][-1] == count


@pytest.mark.parametrize("decoding", [1, 40, 100])
@pytest.mark.parametrize("count", LENGTHS)
def test_the_last_window_is_kept_though_vllm_moves_on(model: Path, count: int, decoding: int) -> None:
    """Its blocks carry our reference from the step that seals the prompt to the last rank's letting go."""
    harness = hybrid(model, chunk=50)
    whole = harness.free
    harness.add("p", numbers(count), PREFILL, max_tokens=decoding)
    harness.steps()
    (sealed,) = [order for order in harness.engine.ready if order.tokens == count]
    held = [block for group in sealed.blocks for block in group if block >= 0]
    assert len(held) == len(set(held)) == whole - harness.free
    assert all(harness.pool.blocks[block].ref_cnt == 1 for block in held)
    assert harness.answers["p"].kv_transfer_params["remote_num_tokens"] == count
    harness.directory.free("p")
    harness.add("last", [1], None)
    harness.steps()
    assert harness.free == whole


@pytest.mark.parametrize("steps", range(9))
def test_a_prefill_aborted_at_any_stage_leaves_no_block_behind(model: Path, steps: int) -> None:
    harness = hybrid(model, chunk=50)
    whole = harness.free
    harness.add("p", numbers(200), PREFILL, max_tokens=30)
    for _ in range(steps):
        harness.step()
    harness.abort("p")
    harness.steps()
    harness.directory.free(*harness.directory.kept)
    harness.add("last", [1], None)
    harness.steps()
    assert harness.free == whole


def test_preempted_prompts_keep_no_window_and_are_sealed_again(model: Path) -> None:
    harness = hybrid(model, blocks=34, chunk=256)
    whole = harness.free
    harness.add("elder", numbers(250, 3), max_tokens=200)
    harness.step()
    harness.add("p", numbers(250), PREFILL, max_tokens=200)
    harness.steps(600)
    assert harness.engine.all("preempted") == ["p"] * len(harness.engine.all("preempted"))
    assert harness.engine.all("preempted")
    assert len(harness.engine.sealed(250)) == len(harness.engine.all("preempted")) + 1
    harness.directory.free(*harness.directory.kept)
    harness.add("last", [1], None)
    harness.steps()
    assert harness.free == whole


def test_a_step_that_cannot_be_read_drops_the_window(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = hybrid(model, chunk=256)
    whole = harness.free
    harness.add("p", numbers(200), PREFILL, max_tokens=20)
    harness.step()

    def broken(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr("neuron_pushkv.connector.compat.step_view", broken)
        harness.step()
    harness.steps()
    harness.directory.free(*harness.directory.kept)
    harness.add("last", [1], None)
    harness.steps()
    assert harness.free == whole


@pytest.mark.parametrize("cached", [0, 40, 96, 130])
@pytest.mark.parametrize("count", LENGTHS)
def test_a_load_asks_for_all_but_the_last_token(model: Path, count: int, cached: int) -> None:
    """Of the window group into the blocks that vLLM has kept for the last token, and into no others."""
    harness = hybrid(model, chunk=300)
    whole = harness.free
    harness.add("before", numbers(cached), None) if cached else None
    harness.steps()
    harness.add("d", numbers(count), DECODE, max_tokens=3)
    harness.step()
    orders = harness.engine.all("receives")
    if not orders:
        assert min(cached, count - 1) // BLOCK * BLOCK >= count - 1  # the prefix cache has it all
        harness.steps()
        return
    (order,) = orders
    assert order.end_token == count - 1
    assert order.start_token % BLOCK == 0
    tables = harness.scheduler.kv_cache_manager.get_block_ids("d")
    last = -(-(count - 1) // BLOCK)
    for number, group in enumerate((Group(BLOCK), Group(BLOCK, 64))):
        first = group.first_token(order.start_token, order.end_token) // BLOCK
        assert order.blocks[number] == tuple(tables[number][first:last])
        assert NULL_BLOCK not in order.blocks[number]
        if group.window and order.start_token == 0:
            assert set(tables[number][:first]) <= {NULL_BLOCK}
    harness.step(received=["d"])
    harness.steps()
    assert sum(output.num_scheduled_tokens.get("d", 0) for output in harness.outputs) == 3
    assert harness.free == whole


def test_an_announcement_ends_where_the_load_will(model: Path) -> None:
    harness = hybrid(model, blocks=34, chunk=512)
    harness.add("elder", numbers(480, 3), max_tokens=3)
    harness.step()
    harness.add("d", numbers(400), DECODE)
    harness.step()
    (intent,) = harness.engine.all("intents")
    while not harness.engine.all("receives"):
        harness.step()
    (order,) = harness.engine.all("receives")
    assert (intent.end_token, intent.end_content) == (399, order.end_content)
    harness.step(received=["d"])
    harness.steps()


def test_a_prompt_of_one_token_is_computed(model: Path) -> None:
    harness = hybrid(model)
    harness.add("d", [5], DECODE)
    harness.steps()
    assert not any(harness.engine.all(kind) for kind in ("intents", "receives", "withdrawn"))
    assert harness.side._receiving._loads == {}


def test_a_failed_load_is_computed(model: Path) -> None:
    harness = hybrid(model)
    whole = harness.free
    harness.add("d", numbers(200), DECODE, max_tokens=2)
    harness.step()
    harness.step(failed=["d"])
    harness.steps()
    assert sum(output.num_scheduled_tokens.get("d", 0) for output in harness.outputs) == 201
    assert harness.free == whole


def test_refused_parameters_fail_by_vllms_policy(model: Path) -> None:
    harness = hybrid(model, policy="fail")
    whole = harness.free
    harness.add("d", numbers(200), {**DECODE, "remote_port": 0})
    harness.steps()
    assert str(harness.answers["d"].finish_reason) == "error"
    assert harness.free == whole
