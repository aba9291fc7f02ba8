"""vLLM's real scheduler with our connector in it; the workers, the engine's data path and the directory are played.

Runs on every vLLM version that we record (0.28 and 0.32). What is played has the same methods as the real thing and
writes down what it is told, so that tests assert on orders.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from neuron_pushkv.orders import Ready, StepOrders

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
DECODE = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_engine_id": "p1",
    "remote_host": "127.0.0.1",
    "remote_port": 14600,
    "tp_size": 1,
    "pp_size": 1,
}
PROMPT = [7 * token % 1000 for token in range(200)]
"""What legs send, and a prompt of seven blocks of 32."""


@dataclass(frozen=True)
class Results:
    """What PushEngine.take_results() answers."""

    finished: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass
class EngineDouble:
    """Plays one rank's PushEngine."""

    steps: list[StepOrders] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    layers: list[tuple[str, int]] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    stats: dict[str, Any] = field(default_factory=dict)
    patience: float = 0.0
    """Of the last look for results."""

    def begin_step(self, orders: StepOrders) -> None:
        self.calls.append("begin_step")
        self.steps.append(orders)

    def advance(self, ready: Sequence[Ready]) -> None:
        self.calls.append("advance")
        self.ready.extend(ready)

    def advance_layer(self, layer: str, ready: Sequence[Ready]) -> None:
        self.layers.extend((layer, order.tokens) for order in ready)

    def sealed(self, tokens: int) -> list[str]:
        """Requests of which that many tokens, the whole prompt, were ready."""
        return [order.request for order in self.ready if order.tokens == tokens]

    def end_step(self) -> None:
        self.calls.append("end_step")

    def take_results(self, patience: float = 0.0) -> Results:
        self.calls.append("take_results")
        self.patience, finished, failed = patience, frozenset(self.finished), frozenset(self.failed)
        self.finished, self.failed = set(), set()
        return Results(finished, failed)

    def take_stats(self) -> dict[str, Any]:
        return {key: self.stats.pop(key) for key in list(self.stats)}

    def close(self) -> None:
        self.calls.append("close")

    def all(self, kind: str) -> list[Any]:
        """Every order of one kind so far, in order."""
        return [order for orders in self.steps for order in getattr(orders, kind)]


class DirectoryDouble:
    """Plays the engine's Directory: the test says what the ranks have freed."""

    def __init__(self, *_: Any, **settings: Any) -> None:
        self.settings = settings
        self.kept: list[str] = []
        self.freed: list[str] = []
        self.closed = False

    def keep(self, request: str) -> None:
        self.kept.append(request)

    def take_freed(self) -> list[str]:
        freed, self.freed = self.freed, []
        return freed

    def free(self, *requests: str) -> None:
        self.freed.extend(requests)

    def close(self) -> None:
        self.closed = True


def model_folder(folder: Path) -> Path:
    """A model's configuration without weights: all that a scheduler looks at."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def vllm_config(
    model: Path,
    *,
    blocks: int = 128,
    block_size: int = 32,
    chunk: int = 256,
    policy: str = "recompute",
    long_prefill: int = 0,
    asynchronous: bool = False,
    role: str = "kv_both",
    engine_id: str = "p0",
    extra: dict[str, Any] | None = None,
) -> Any:
    """A VllmConfig like the one that an engine core has."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    model_config = ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=4096, seed=0)
    cache = CacheConfig(block_size=block_size, gpu_memory_utilization=0.5, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    return VllmConfig(
        model_config=model_config,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=chunk,
            max_model_len=4096,
            long_prefill_token_threshold=long_prefill,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            scheduler_reserve_full_isl=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PushKVConnector",
            kv_connector_module_path="neuron_pushkv.connector.connector",
            kv_role=role,
            engine_id=engine_id,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra or {"provider": "tcp", "port": 14700},
        ),
    )


def cache_config(blocks: int, block_size: int, window: int = 0) -> Any:
    """A KVCacheConfig with two layers of full attention, and two with a sliding window of that many tokens, if any."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layers.0", "layers.1"], FullAttentionSpec(**shape))]
    if window:
        spec = SlidingWindowSpec(**shape, sliding_window=window)
        groups.append(KVCacheGroupSpec(["layers.2", "layers.3"], spec))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class Harness:
    """One engine: scheduler, both sides of the connector, and the doubles. Steps only when told to.

    ``ahead``: like asynchronous scheduling, a step is scheduled before the one before it has been run. ``live``:
    nothing is played; the caller shows the worker its KV cache. ``window``: there is a second KV cache group, which
    keeps that many tokens.
    """

    def __init__(
        self,
        model: Path,
        *,
        ahead: bool = False,
        v2: bool = False,
        live: bool = False,
        window: int = 0,
        **settings: Any,
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.structured_output import StructuredOutputManager

        from neuron_pushkv.connector import connector
        from neuron_pushkv.connector.worker import WorkerSide

        config = vllm_config(model, asynchronous=ahead, **settings)
        block_size, blocks = config.cache_config.block_size, config.cache_config.num_gpu_blocks
        caches = cache_config(blocks, block_size, window)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        if ahead:
            from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Scheduler
        else:
            from vllm.v1.core.sched.scheduler import Scheduler
        module: Any = connector
        real = module.Directory
        if not live:
            module.Directory = DirectoryDouble
        try:
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=caches,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                log_stats=True,
            )
        finally:
            module.Directory = real
        self.scheduler.use_v2_model_runner = v2
        self.config = config
        self.connector: Any = self.scheduler.connector
        self.directory: DirectoryDouble = self.connector._directory
        self.engine = EngineDouble()
        self.worker: Any = connector.PushKVConnector(config, KVConnectorRole.WORKER, caches)
        if not live:
            self.worker._worker = WorkerSide(self.engine, leads=True, about={})
        self._ahead: deque[Any] = deque()
        self._lag = 1 if ahead else 0
        self.outputs: list[Any] = []
        self.reported: list[Any] = []
        self.answers: dict[str, Any] = {}

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free(self) -> int:
        """Blocks that nobody holds a reference to."""
        return int(self.pool.get_num_free_blocks())

    @property
    def kept(self) -> int:
        """How many finished requests' blocks are held for receivers."""
        return len(self.side._parking)

    @property
    def side(self) -> Any:
        """The connector's scheduler side."""
        return self.connector._scheduler

    def add(self, name: str, prompt: Sequence[int], parameters: Any = None, max_tokens: int = 1, **more: Any) -> Any:
        """Queue a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if parameters is not None:
            sampling.extra_args = {"kv_transfer_params": parameters}
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, *names: str) -> None:
        """The client has left."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def step(self, received: Iterable[str] = (), failed: Iterable[str] = ()) -> Any:
        """One engine step, in the order of vLLM's V1 runner, in which the engine reports those loads as ended."""
        self.engine.finished |= {*received, *failed}
        self.engine.failed |= set(failed)
        self.outputs.append(output := self.scheduler.schedule())
        self._ahead.append(output)
        if len(self._ahead) > self._lag:
            self._run(self._ahead.popleft())
        return output

    def tables_of_step(self, name: str) -> list[list[int]]:
        """Take a step and return the request's block tables in it: later, vLLM may let go of blocks that it filled."""
        tables: list[list[int]] = []
        run = self._run

        def look(output: Any) -> None:
            tables.extend(list(group) for group in self.scheduler.kv_cache_manager.get_block_ids(name))
            run(output)

        with mock.patch.object(self, "_run", look):
            self.step()
        return tables

    def steps(self, limit: int = 200) -> int:
        """Step until nothing is left to do; returns how many steps it took."""
        for count in range(limit):
            if not self.scheduler.has_requests() and not self._ahead:
                return count
            if self.scheduler.has_requests():
                self.step()
            else:
                self._run(self._ahead.popleft())
        raise AssertionError(f"not idle after {limit} steps: {self.scheduler.requests}")

    def forward(self, output: Any) -> None:
        """The forward pass of a step, which computes nothing here."""

    def _run(self, output: Any) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        worker, metadata = self.worker, output.kv_connector_metadata
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        self.forward(output)
        worker.start_load_kv(None)
        worker.wait_for_save()
        reported = KVConnectorOutput()
        if hasattr(reported, "failed_recving"):
            results = worker.get_transfer_results(output.finished_req_ids)
            reported.finished_recving = results.finished_recving
            reported.failed_recving = results.failed_recving
        else:
            _, reported.finished_recving = worker.get_finished(output.finished_req_ids)
        reported.invalid_block_ids = worker.get_block_ids_with_load_errors()
        reported.kv_connector_stats = worker.get_kv_connector_stats()
        self.reported.append(reported.kv_connector_stats)
        reported.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()

        names = list(output.num_scheduled_tokens)
        tokens = [[7] if self._samples(name, output) else [] for name in names]
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=reported,
        )
        for answers in self.scheduler.update_from_output(output, runner).values():
            for answer in answers.outputs:
                if answer.finish_reason is not None:
                    self.answers[answer.request_id] = answer

    def _samples(self, name: str, output: Any) -> bool:
        """Whether the step computes the last token that the request has, so that one more is sampled."""
        request = self.scheduler.requests.get(name)
        if request is None:
            return False
        computed = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return bool(computed[name] + output.num_scheduled_tokens[name] >= request.num_tokens)


def untried(engine: Harness) -> dict[str, int]:
    """Transfers that the workers are told to count as failed without trying, after one more step."""
    engine.add("asker", [1])
    engine.steps()
    stats: dict[str, int] = {}
    for output in engine.outputs:
        for key, count in output.kv_connector_metadata.untried.items():
            stats[key] = stats.get(key, 0) + count
    return stats
