"""Both sides of the connector against what vLLM 0.24, 0.28 and 0.32 really show a connector, and against live 0.32."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_pushkv.connector.contiguity import Contiguity
from neuron_pushkv.connector.metadata import PushKVMetadata
from neuron_pushkv.connector.parameters import AllowedHosts
from neuron_pushkv.connector.parking import Parking
from neuron_pushkv.connector.scheduler import SchedulerSide
from neuron_pushkv.connector.worker import WorkerSide
from neuron_pushkv.content import Content, seed
from neuron_pushkv.layout import Group
from neuron_pushkv.orders import Receive
from tests.connector.harness import DirectoryDouble, EngineDouble, model_folder
from tests.connector.recorded import scenarios

FOLDER = Path(__file__).parent / "recorded"
VERSIONS = ("0.24.0", "0.28.0", "0.32.0")
SCENARIOS = tuple(scenarios.SCENARIOS)
BLOCK = 32


class Blocks:
    """A KVCacheBlocks or a KVConnectorBlockState out of a recording."""

    def __init__(self, recorded: Any) -> None:
        self._recorded = recorded

    def get_block_ids(self, request: str | None = None) -> Any:
        return self._recorded if request is None else self._recorded.get(request)


class Pool:
    """Counts references as vLLM's block pool does."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number) for number in range(1000)]
        self.held: Counter[int] = Counter()

    def touch(self, blocks: Iterable[Any]) -> None:
        self.held.update(block.block_id for block in blocks)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        self.held.subtract(block.block_id for block in blocks)


class Replay:
    """A scheduler side that is told a recording. ``steps`` pairs what a step was with what was ordered for it."""

    def __init__(self, recording: dict[str, Any]) -> None:
        self.directory, self.pool = DirectoryDouble(), Pool()
        self.side = SchedulerSide(
            model="m",
            groups=(Group(BLOCK),),
            tp_size=1,
            pp_size=1,
            hosts=AllowedHosts("127.0.0.1", ()),
            coordinates={"remote_engine_id": "p0", "remote_host": "127.0.0.1", "remote_port": 14700},
            parking=Parking(self.directory, limit=1000, block_bytes=1),
            fail_refused=False,
            contiguity=Contiguity("vllm"),
        )
        self.side.bind_pool(self.pool)
        self.requests: dict[str, Any] = {}
        self.prompts = recording["prompts"]
        self.steps: list[tuple[dict[str, Any], PushKVMetadata]] = []
        self.answers: dict[str, dict[str, Any] | None] = {}
        for event in recording["events"]:
            getattr(self, event["hook"])(event)

    def tokens(self, name: str) -> list[int]:
        first, count = self.prompts[name]
        return [token % 1000 for token in range(first, first + count)]

    def content(self, name: str) -> Content:
        return Content.of(seed("m", "", ""), self.tokens(name))

    def on_new_request(self, event: dict[str, Any]) -> None:
        prompt = self.tokens(event["request"])
        self.requests[event["request"]] = SimpleNamespace(
            request_id=event["request"],
            kv_transfer_params=event["parameters"],
            prompt_token_ids=prompt,
            num_prompt_tokens=len(prompt),
            prompt_embeds=None,
            resumable=False,
            abort_immediately=False,
            lora_request=None,
            trace_headers=None,
            cache_salt=None,
            mm_features=[],
        )
        self.side.on_new_request(self.requests[event["request"]])

    def get_num_new_matched_tokens(self, event: dict[str, Any]) -> None:
        answer = self.side.get_num_new_matched_tokens(self.requests[event["request"]], event["computed"])
        assert list(answer) == event["answer"]

    def update_state_after_alloc(self, event: dict[str, Any]) -> None:
        self.side.update_state_after_alloc(self.requests[event["request"]], Blocks(event["blocks"]), event["external"])

    def build_connector_meta(self, event: dict[str, Any]) -> None:
        fields = dict(event["output"])
        fields["scheduled_new_reqs"] = [SimpleNamespace(**data) for data in fields["scheduled_new_reqs"]]
        fields["scheduled_cached_reqs"] = SimpleNamespace(**fields["scheduled_cached_reqs"])
        if "kv_connector_block_state" in fields:
            fields["kv_connector_block_state"] = Blocks(fields["kv_connector_block_state"])
        self.steps.append((event, self.side.build_connector_meta(SimpleNamespace(**fields))))

    def update_connector_output(self, event: dict[str, Any]) -> None:
        self.side.update_connector_output(event["finished"])

    def request_finished(self, event: dict[str, Any]) -> None:
        answer = self.side.request_finished(self.requests[event["request"]], (event["blocks"],))
        assert (answer is not None) == event["kept"]
        self.answers[event["request"]] = answer

    def seals(self) -> list[Any]:
        """Orders that make a whole prompt ready."""
        return [order for order in self.orders("ready") if order.tokens == self.prompts[order.request][1]]

    def orders(self, kind: str) -> list[Any]:
        return [order for _, metadata in self.steps for order in getattr(metadata.orders, kind)]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same scenarios in the vLLM that is installed, now."""
    recorded: dict[str, Any] = json.loads(json.dumps(scenarios.record(model_folder(tmp_path_factory.mktemp("model")))))
    return recorded


@pytest.fixture(params=[*VERSIONS, "live"])
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each version's recording, and a fresh one."""
    if request.param == "live":
        return dict(request.getfixturevalue("live")["scenarios"])
    return dict(json.loads((FOLDER / f"vllm-{request.param}.json").read_text())["scenarios"])


def test_the_recording_is_what_vllm_still_shows(live: dict[str, Any]) -> None:
    """A recording whose version is installed is reproduced event for event."""
    assert live == json.loads((FOLDER / f"vllm-{live['vllm']}.json").read_text())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_prompts_are_ready_as_far_as_each_step_computes_them(recorded: dict[str, Any], scenario: str) -> None:
    replay = Replay(recorded[scenario])
    legs = {
        name for name, request in replay.requests.items() if (request.kv_transfer_params or {}).get("do_remote_decode")
    }
    sealed: dict[str, bool] = {}
    for event, metadata in replay.steps:
        output, orders = event["output"], metadata.orders
        assert set(orders.preempted) == {name for name in output["preempted_req_ids"] if name in legs}
        for name in orders.preempted:
            sealed[name] = False
        cached = output["scheduled_cached_reqs"]
        computed = {data["req_id"]: data["num_computed_tokens"] for data in output["scheduled_new_reqs"]}
        computed.update(zip(cached["req_ids"], cached["num_computed_tokens"], strict=True))
        due = {}
        for name in legs & set(computed):
            count = replay.prompts[name][1]
            if not sealed.get(name):
                ready = min(computed[name] + output["num_scheduled_tokens"][name], count)
                due[name] = ready, tuple(event["tables"][name][0][: -(-ready // BLOCK)])
                sealed[name] = ready == count
        assert {order.request: (order.tokens, order.blocks[0]) for order in orders.ready} == due


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_orders_are_given_once_and_in_their_order(recorded: dict[str, Any], scenario: str) -> None:
    replay = Replay(recorded[scenario])
    known: set[str] = set()
    for index, (_, metadata) in enumerate(replay.steps):
        assert metadata.step == index + 1
        for offer in metadata.orders.offers:
            assert offer.request not in known
            assert offer.content == replay.content(offer.request)
            known.add(offer.request)
        for named in (*metadata.orders.preempted, *(order.request for order in metadata.orders.ready)):
            assert named in known
        for finish in metadata.orders.finished:
            assert finish.kept == (replay.answers[finish.request] is not None)
            known.remove(finish.request)
    assert not replay.orders("counters")
    assert replay.directory.kept == [name for name, answer in replay.answers.items() if answer is not None]
    replay.directory.free(*replay.directory.kept)
    replay.side.update_connector_output(())
    assert len(replay.side._parking) == replay.side._parking.bytes == 0
    assert not +replay.pool.held
    assert not -replay.pool.held


def test_chunked_prefill_and_prefix_hit(recorded: dict[str, Any]) -> None:
    replay = Replay(recorded["chunked"])
    assert [(offer.request, offer.transfer, offer.deliveries) for offer in replay.orders("offers")] == [
        ("first", "t1", 1),
        ("again", "t2", 2),
        ("last", "", 1),
    ]
    first, again, last = replay.seals()
    assert first.blocks[0][:31] == again.blocks[0][:31]
    assert len(first.blocks[0]) == len(again.blocks[0]) == 32
    assert len(last.blocks[0]) == 2
    assert replay.answers["again"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p0",
        "remote_host": "127.0.0.1",
        "remote_port": 14700,
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": "again",
        "transfer_id": "t2",
        "remote_num_tokens": 1000,
    }


@pytest.mark.parametrize("scenario", ["preempted", "resumed_as_new"])
def test_a_preempted_prompt_is_sealed_once_it_is_computed_again(recorded: dict[str, Any], scenario: str) -> None:
    replay = Replay(recorded[scenario])
    assert replay.orders("preempted") == ["three"]
    assert sorted(seal.request for seal in replay.seals()) == ["one", "three", "two"]
    assert all(replay.answers.values())


def test_a_sealed_prompt_that_is_preempted_is_sealed_again(recorded: dict[str, Any]) -> None:
    replay = Replay(recorded["sealed_first"])
    assert replay.orders("preempted") == ["leg"]
    assert [seal.request for seal in replay.seals()] == ["leg", "leg", "last"]
    assert replay.answers["leg"] is not None


def test_a_load_asks_for_what_is_missing(recorded: dict[str, Any]) -> None:
    replay = Replay(recorded["loads"])
    whole, tail, lost = replay.orders("receives")
    assert (whole.start_token, whole.end_token, len(whole.blocks[0])) == (0, 300, 10)
    assert (tail.start_token, tail.end_token, len(tail.blocks[0])) == (288, 420, 5)
    assert (lost.start_token, lost.end_token, len(lost.blocks[0])) == (0, 130, 5)
    for order in (whole, tail, lost):
        content = replay.content(order.request)
        assert order.start_content == content.at(order.start_token)
        assert order.end_content == content.at(order.end_token)
    assert [order.transfer for order in (whole, tail, lost)] == ["t1", "t2", "t3"]
    assert not replay.orders("withdrawn")


def test_clients_that_leave(recorded: dict[str, Any]) -> None:
    replay = Replay(recorded["aborted"])
    assert [offer.request for offer in replay.orders("offers")] == ["running"]
    assert [(finish.request, finish.kept) for finish in replay.orders("finished")] == [("running", False)]
    assert [order.request for order in replay.orders("receives")] == ["waiting", "loaded"]
    assert replay.orders("withdrawn") == ["waiting"]
    assert not replay.directory.kept


@pytest.mark.parametrize("order", ["V1", "V2", "speculative", "no forward"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_workers_carry_out_each_order_once(recorded: dict[str, Any], scenario: str, order: str) -> None:
    """In every order in which vLLM's runners call a worker's hooks."""
    replay = Replay(recorded[scenario])
    engine = EngineDouble()
    worker = WorkerSide(engine, leads=True, about={})
    waiting: dict[str, Receive] = {}
    reported: list[str] = []
    for _, metadata in replay.steps:
        worker.begin(metadata)
        worker.begin(metadata)
        waiting.update({receive.request: receive for receive in metadata.orders.receives})
        engine.finished = {name for name in waiting if name not in reported}
        forward = order != "no forward" or metadata.orders.ready
        if order in ("V1", "V2") and forward:
            worker.advance(metadata)
        finished, failed = worker.take_results()
        reported += finished
        assert not failed
        if order == "speculative":
            worker.advance(metadata)
        worker.end()
    assert sorted(reported) == sorted(waiting)
    assert engine.ready == (replay.orders("ready") if order != "no forward" else [])
    assert len(engine.steps) == len(replay.steps)
    for given, (_, metadata) in zip(engine.steps, replay.steps, strict=True):
        assert [offer.request for offer in given.offers] == [offer.request for offer in metadata.orders.offers]
        assert given.finished == metadata.orders.finished
    grouped = [name for name, _ in itertools.groupby(engine.calls) if name != "advance"]
    assert grouped == ["begin_step", "take_results", "end_step"] * len(replay.steps)
