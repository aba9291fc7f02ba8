"""What is recorded: short lives of requests in vLLM's real scheduler, and how each hook call is written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.connector.harness import Harness

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "p1",
    "remote_host": "127.0.0.1",
    "remote_port": 14600,
}


class Recorder(Harness):
    """A harness that writes down every call of a scheduler-side hook, with what it was shown and what it answered.

    Blocks are in vLLM's own order.
    """

    def __init__(self, model: Path, **settings: Any) -> None:
        super().__init__(model, extra={"provider": "tcp", "port": 14700, "block_order": "vllm"}, **settings)
        self.prompts: dict[str, tuple[int, int]] = {}
        self.events: list[dict[str, Any]] = []
        for hook, shown in _SHOWN.items():
            setattr(self.side, hook, self._recording(hook, getattr(self.side, hook), shown))

    def queue(self, name: str, first: int, count: int, parameters: Any = None, max_tokens: int = 1) -> None:
        """Queue a request whose prompt is the numbers from ``first``."""
        self.prompts[name] = (first, count)
        self.add(name, [token % 1000 for token in range(first, first + count)], parameters, max_tokens)

    def _recording(
        self, hook: str, call: Callable[..., Any], shown: Callable[..., dict[str, Any]]
    ) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            event = {"hook": hook, **shown(self, *args)}
            answer = call(*args)
            if hook == "get_num_new_matched_tokens":
                event["answer"] = list(answer)
            if hook == "request_finished":
                event["kept"] = answer is not None
            self.events.append(event)
            return answer

        return recorded


def _shown_output(recorder: Recorder, output: Any) -> dict[str, Any]:
    cached = output.scheduled_cached_reqs
    tables = {
        name: _ids(recorder.scheduler.kv_cache_manager.get_block_ids(name)) for name in output.num_scheduled_tokens
    }
    fields = {
        "scheduled_new_reqs": [
            {"req_id": data.req_id, "num_computed_tokens": data.num_computed_tokens, "block_ids": _ids(data.block_ids)}
            for data in output.scheduled_new_reqs
        ],
        "scheduled_cached_reqs": {
            "req_ids": list(cached.req_ids),
            "resumed_req_ids": sorted(cached.resumed_req_ids),
            "num_computed_tokens": list(cached.num_computed_tokens),
            "new_block_ids": [_ids(blocks) for blocks in cached.new_block_ids],
        },
        "num_scheduled_tokens": dict(output.num_scheduled_tokens),
        "preempted_req_ids": sorted(output.preempted_req_ids or ()),
    }
    state = getattr(output, "kv_connector_block_state", None)
    if state is not None:
        fields["kv_connector_block_state"] = {name: _ids(state.get_block_ids(name)) for name in sorted(state.req_ids)}
    return {"output": fields, "tables": tables}


_SHOWN: dict[str, Callable[..., dict[str, Any]]] = {
    "on_new_request": lambda self, request: {
        "request": request.request_id,
        "parameters": request.kv_transfer_params,
    },
    "get_num_new_matched_tokens": lambda self, request, computed: {"request": request.request_id, "computed": computed},
    "update_state_after_alloc": lambda self, request, blocks, external: {
        "request": request.request_id,
        "blocks": _ids(blocks.get_block_ids()),
        "external": external,
    },
    "build_connector_meta": _shown_output,
    "update_connector_output": lambda self, finished, ended=0: {"finished": sorted(finished)},
    "request_finished": lambda self, request, tables: {"request": request.request_id, "blocks": list(tables[0])},
}


def _ids(blocks: Any) -> list[list[int]] | None:
    return None if blocks is None else [list(group) for group in blocks]


def chunked(model: Path, **settings: Any) -> Recorder:
    """1,000 tokens in chunks of 256, and the same prompt again, which the prefix cache has."""
    run = Recorder(model, chunk=256, **settings)
    run.queue("first", 0, 1000, {**PREFILL, "transfer_id": "t1"})
    run.steps()
    run.queue("again", 0, 1000, {**PREFILL, "transfer_id": "t2", "deliveries": 2})
    run.queue("plain", 500, 70)
    run.steps()
    run.directory.free("first", "again")
    run.queue("last", 700, 33, PREFILL)
    run.steps()
    return run


def preempted(model: Path, **settings: Any) -> Recorder:
    """Three prompts of 500 tokens that go on decoding, in a cache that can't hold them all."""
    run = Recorder(model, chunk=256, long_prefill=64, blocks=44, **settings)
    for index, name in enumerate(("one", "two", "three")):
        run.queue(name, 300 * index, 500, {**PREFILL, "transfer_id": name}, max_tokens=4)
    for _ in range(300):
        if not run.scheduler.has_requests():
            break
        run.step()
        run.directory.free(*run.directory.kept)
        run.directory.kept.clear()
    run.steps()
    return run


def sealed_first(model: Path, **settings: Any) -> Recorder:
    """A prompt is sealed, goes on decoding, and is preempted then."""
    run = Recorder(model, chunk=256, blocks=18, **settings)
    run.queue("elder", 0, 250, max_tokens=12)
    run.queue("leg", 300, 250, {**PREFILL, "transfer_id": "t1"}, max_tokens=12)
    run.steps()
    run.directory.free("leg")
    run.queue("last", 700, 33, PREFILL)
    run.steps()
    return run


def loads(model: Path, **settings: Any) -> Recorder:
    """Decode legs: whole, behind a prefix hit, and one that fails and is computed instead."""
    run = Recorder(model, chunk=256, **settings)
    run.queue("whole", 0, 300, {**DECODE, "transfer_id": "t1"}, max_tokens=3)
    run.step()
    run.step(received=["whole"])
    run.steps()
    run.queue("tail", 0, 420, {**DECODE, "transfer_id": "t2"}, max_tokens=2)
    run.step()
    run.step(received=["tail"])
    run.steps()
    run.queue("lost", 600, 130, {**DECODE, "transfer_id": "t3"}, max_tokens=2)
    run.step()
    run.step(failed=["lost"])
    run.steps()
    return run


def aborted(model: Path, **settings: Any) -> Recorder:
    """Clients that leave: before the first step, in mid-prefill, while a load is awaited, and after it."""
    run = Recorder(model, chunk=64, **settings)
    run.queue("queued", 0, 200, {**PREFILL, "transfer_id": "t1"})
    run.abort("queued")
    run.queue("running", 250, 200, {**PREFILL, "transfer_id": "t2"})
    run.step()
    run.step()
    run.abort("running")
    run.queue("waiting", 500, 200, {**DECODE, "transfer_id": "t3"})
    run.step()
    run.abort("waiting")
    run.step()
    run.step(received=["waiting"])
    run.queue("loaded", 750, 200, {**DECODE, "transfer_id": "t4"}, max_tokens=50)
    run.step()
    run.step(received=["loaded"])
    run.step()
    run.abort("loaded")
    run.steps()
    return run


def ahead(model: Path, **settings: Any) -> Recorder:
    """Asynchronous scheduling: a step is scheduled before the one before it has been run."""
    run = Recorder(model, chunk=256, ahead=True, **settings)
    run.queue("first", 0, 700, {**PREFILL, "transfer_id": "t1"})
    run.queue("second", 100, 300, {**PREFILL, "transfer_id": "t2"}, max_tokens=3)
    run.steps()
    return run


def resumed_as_new(model: Path, **settings: Any) -> Recorder:
    """As the V2 model runner has it: a request that was preempted comes back among the new ones."""
    return preempted(model, v2=True, **settings)


SCENARIOS: dict[str, Callable[..., Recorder]] = {
    "chunked": chunked,
    "preempted": preempted,
    "sealed_first": sealed_first,
    "loads": loads,
    "aborted": aborted,
    "ahead": ahead,
    "resumed_as_new": resumed_as_new,
}


def record(model: Path) -> dict[str, Any]:
    """All scenarios with the vLLM that can be imported."""
    import vllm

    scenarios = {}
    for name, scenario in SCENARIOS.items():
        run = scenario(model)
        scenarios[name] = {"prompts": run.prompts, "events": run.events, "free": run.free}
    return {"vllm": vllm.__version__.partition("+")[0], "block_size": 32, "scenarios": scenarios}
