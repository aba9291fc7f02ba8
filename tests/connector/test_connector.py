"""The connector whole: what it refuses, and two engines of which nothing is played but the forward pass."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from neuron_pushkv.connector import plugin
from neuron_pushkv.connector.compat import NULL_BLOCK
from neuron_pushkv.connector.connector import PushKVConnector
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.orders import Ready
from tests.connector.harness import Harness, cache_config, vllm_config

BLOCKS, BLOCK, LAYERS = 64, 32, 2
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {"do_remote_decode": False, "do_remote_prefill": True}
ATTENTION = SimpleNamespace(
    isa="vec", get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), impl=SimpleNamespace()
)
"""What vLLM's attention layers say of themselves."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# What is refused.


def construct(config: Any, caches: Any = None) -> PushKVConnector:
    return PushKVConnector(config, KVConnectorRole.WORKER, caches or cache_config(BLOCKS, BLOCK))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_another_role_is_refused_in_words(model: Path, role: str) -> None:
    with pytest.raises(ConfigError, match=f'kv_role is "{role}"; set "kv_role": "kv_both"'):
        construct(vllm_config(model, role=role))


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"prot": 1}, "kv_connector_extra_config: unknown setting 'prot'; known here: .*port"),
        ({"port": 0}, "kv_connector_extra_config: port: "),
        ({"provider": "udp"}, "kv_connector_extra_config: provider: .*tcp"),
        ({"host": "10.0.0.1"}, "a fleet key is needed"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(
    model: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], sentence: str
) -> None:
    monkeypatch.delenv("PUSHKV_FLEET_KEY", raising=False)
    with pytest.raises(ConfigError, match=sentence):
        construct(vllm_config(model, extra=extra))


def test_context_parallelism_is_refused(model: Path) -> None:
    config = vllm_config(model)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2"):
        construct(config)


def test_a_port_that_is_taken_is_refused(model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = vllm_config(model, extra={"provider": "tcp", "port": port})
        with pytest.raises(ConfigError, match=str(port)):
            PushKVConnector(config, KVConnectorRole.SCHEDULER, cache_config(BLOCKS, BLOCK))


# How vLLM finds it.


def test_the_plugin_registers_it_by_name_once_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("PushKVConnector") is PushKVConnector


def test_vllm_finds_the_plugin() -> None:
    found = {entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert "neuron_pushkv.connector.plugin:register" in found


def test_our_log_goes_where_vllms_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, handler = logging.getLogger("neuron_pushkv"), logging.getLogger("vllm"), logging.NullHandler()
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(theirs, "handlers", [handler])
    plugin.follow_vllm_log()
    assert ours.handlers == [handler]


# Two engines.


class Engine(Harness):
    """A live one. Its forward pass leaves a value of its own in every block that it computes."""

    def __init__(self, model: Path, name: str, window: int = 0, granularity: str = "step") -> None:
        self.port = free_port()
        extra = {"provider": "tcp", "port": self.port, "unknown_source_seconds": 1.0, "push_granularity": granularity}
        extra["keep_delivered_seconds"] = 0.0
        sizes: dict[str, Any] = {"blocks": BLOCKS, "block_size": BLOCK, "chunk": 128, "window": window}
        super().__init__(model, live=True, engine_id=name, extra=extra, **sizes)
        count = 2 * LAYERS if window else LAYERS
        layers = torch.zeros(count, BLOCKS, 2, BLOCK, 64)
        self.caches = {f"layers.{index}": layers[index] for index in range(count)}
        self.config.compilation_config.static_forward_context.update(dict.fromkeys(self.caches, ATTENTION))
        self.worker.register_kv_caches(self.caches)

    def forward(self, output: Any) -> None:
        for number, (layer, cache) in enumerate(self.caches.items()):
            for request in output.num_scheduled_tokens:
                for index, block in enumerate(self.table(request, number // LAYERS)):
                    if block != NULL_BLOCK:
                        cache[block] = expected(request, index, number)
            self.worker.save_kv_layer(layer, cache, None)

    def table(self, request: str, group: int = 0) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request)[group])

    def coordinates(self) -> dict[str, Any]:
        return {"remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": self.port, "tp_size": 1}

    def transfers(self) -> dict[str, int]:
        """Those of this engine so far, by outcome."""
        total: Counter[str] = Counter()
        for stats in self.reported:
            total.update(stats.data.get("transfers", {}) if stats else {})
        return dict(total)

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()


def expected(request: str, index: int, layer: int) -> float:
    """What a forward pass leaves in a request's block."""
    return 10_000.0 * ord(request) + 100 * index + layer


@pytest.fixture
def pair(
    model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine, with the settings that the test parametrizes it with."""
    alone = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: alone)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: alone)
    settings = getattr(request, "param", {})
    engines = Engine(model, "p", **settings), Engine(model, "d", **settings)
    yield engines
    for engine in engines:
        engine.close()


def until(engine: Engine, done: Any, seconds: float = 10.0) -> None:
    """Step the engine until ``done()``."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not done within {seconds} s"
        engine.step()
        time.sleep(0.001)  # An engine's forward pass lets other threads have the interpreter.


def test_a_prompt_is_pushed_from_one_engine_to_the_other(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    prompt = [token * 3 % 1000 for token in range(300)]
    free = prefill.free, decode.free
    prefill.add("p", prompt, {**PREFILL, "transfer_id": "t"})
    prefill.step()
    decode.add("d", prompt, {**DECODE, "transfer_id": "t", **prefill.coordinates()}, max_tokens=2)
    decode.step()
    table = decode.table("d")
    until(prefill, lambda: "p" in prefill.answers)
    assert prefill.answers["p"].kv_transfer_params["remote_port"] == prefill.port
    until(decode, lambda: decode.transfers() != {})
    assert decode.transfers() == {"in:completed": 1}
    for index, block in enumerate(table):
        for number, cache in enumerate(decode.caches.values()):
            assert cache[block].unique().tolist() == [expected("p", index, number)]
    until(decode, lambda: "d" in decode.answers)
    assert sum(output.num_scheduled_tokens.get("d", 0) for output in decode.outputs) == 2
    until(prefill, lambda: prefill.free == free[0])
    assert decode.free == free[1]
    assert prefill.transfers() == {"out:completed": 1}


@pytest.mark.parametrize("pair", [{"window": 70}, {"window": 70, "granularity": "layer"}], indirect=True)
@pytest.mark.parametrize("count", [65, 300])
def test_of_a_sliding_window_the_last_part_is_pushed(pair: tuple[Engine, Engine], count: int) -> None:
    """All of the full attention group, and of the other what the last token sees, which vLLM computes itself."""
    prefill, decode = pair
    prompt = [token * 3 % 1000 for token in range(count)]
    free = prefill.free, decode.free
    prefill.add("p", prompt, {**PREFILL, "transfer_id": "t"}, max_tokens=40)
    prefill.add("f", prompt[::-1], max_tokens=60)  # Fills what the other's window leaves behind.
    prefill.step()
    decode.add("d", prompt, {**DECODE, "transfer_id": "t", **prefill.coordinates()})
    decode.step()
    tables = decode.table("d", 0), decode.table("d", 1)
    until(prefill, lambda: "p" in prefill.answers)
    until(decode, lambda: decode.transfers() != {})
    assert decode.transfers() == {"in:completed": 1}
    oldest = max(0, count - 70) // BLOCK
    for number, cache in enumerate(decode.caches.values()):
        for index in range(oldest if number >= LAYERS else 0, -(-(count - 1) // BLOCK)):
            assert cache[tables[number // LAYERS][index]].unique().tolist() == [expected("p", index, number)]
    until(decode, lambda: "d" in decode.answers)
    assert sum(output.num_scheduled_tokens.get("d", 0) for output in decode.outputs) == 1
    until(prefill, lambda: prefill.free == free[0])
    assert decode.free == free[1]


@pytest.mark.parametrize("pair", [{"granularity": "layer"}, {"granularity": "request"}], indirect=True)
def test_a_prompt_is_pushed_by_layers_and_by_requests(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    prompt = [token * 3 % 1000 for token in range(300)]
    engine = prefill.worker._worker._engine
    pushed: list[tuple[str, int]] = []
    push = engine.advance_layer

    def look(layer: str, ready: Sequence[Ready]) -> None:
        pushed.extend((layer, order.tokens) for order in ready)
        push(layer, ready)

    monkeypatch.setattr(engine, "advance_layer", look)
    decode.add("d", prompt, {**DECODE, "transfer_id": "t", **prefill.coordinates()})
    decode.step()
    table = decode.table("d")
    prefill.add("p", prompt, {**PREFILL, "transfer_id": "t"})
    until(prefill, lambda: "p" in prefill.answers)
    until(decode, lambda: decode.transfers() != {})
    assert decode.transfers() == {"in:completed": 1}
    for number, cache in enumerate(decode.caches.values()):
        for index, block in enumerate(table):
            assert cache[block].unique().tolist() == [expected("p", index, number)]
    by_layer = prefill.connector._settings.push_granularity == "layer"
    assert pushed == [(layer, tokens) for tokens in (128, 256, 300) for layer in prefill.caches if by_layer]


def test_what_was_computed_for_a_rejected_request_is_let_go(pair: tuple[Engine, Engine]) -> None:
    """F9, though both engines are idle otherwise."""
    prefill, decode = pair
    free = prefill.free
    prefill.add("p", list(range(100)), {**PREFILL, "transfer_id": "t"})
    prefill.steps()
    assert prefill.free == free - 4
    decode.add("d", [0], {**DECODE, "transfer_id": "t", **prefill.coordinates()}, abort_immediately=True)
    decode.abort("d")
    decode.steps()
    until(prefill, lambda: prefill.free == free, seconds=1.0)


def test_a_prompt_that_nobody_computed_is_computed_here(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    free = decode.free
    decode.add("d", list(range(100)), {**DECODE, "transfer_id": "t", **prefill.coordinates()}, max_tokens=2)
    until(decode, lambda: "d" in decode.answers)
    assert sum(output.num_scheduled_tokens.get("d", 0) for output in decode.outputs) == 101
    assert decode.free == free
    assert decode.transfers() == {"in:failed:unknown_source": 1}


def test_a_client_that_leaves_gets_its_blocks_freed(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    free = decode.free
    decode.add("d", list(range(100)), {**DECODE, "transfer_id": "t", **prefill.coordinates()})
    decode.step()
    decode.step()
    decode.abort("d")
    until(decode, lambda: "d" not in decode.scheduler.requests)
    assert decode.free == free


def test_an_absent_provider_stops_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: alone)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: alone)
    config = vllm_config(model, extra={"provider": "efa", "port": free_port()})
    config.compilation_config.static_forward_context["layers.0"] = ATTENTION
    connector = construct(config)
    with pytest.raises(ConfigError, match=r"EFA device.*\[host.infiniband\]"):
        connector.register_kv_caches({"layers.0": torch.zeros(BLOCKS, 2, BLOCK, 64)})
