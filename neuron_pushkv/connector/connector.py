"""``PushKVConnector``: vLLM's connector interface, handed on to the scheduler side or the worker side.

Set in ``--kv-transfer-config``: ``kv_connector: PushKVConnector``, ``kv_role: kv_both`` on every engine, an
``engine_id`` that stays the same over restarts (vLLM makes up a random one otherwise, and appends ``_dp<n>`` with data
parallelism; that whole name is what peers see), ``kv_load_failure_policy: recompute``, and in
``kv_connector_extra_config`` what :class:`~neuron_pushkv.config.ConnectorSettings` describes.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from neuron_pushkv import config
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.connector import caches, compat
from neuron_pushkv.connector.contiguity import Contiguity
from neuron_pushkv.connector.fingerprint import fingerprint
from neuron_pushkv.connector.groups import block_bytes, groups_of
from neuron_pushkv.connector.memory import SlabContext
from neuron_pushkv.connector.metadata import PushKVMetadata, StepNumber
from neuron_pushkv.connector.parameters import AllowedHosts
from neuron_pushkv.connector.parking import Parking
from neuron_pushkv.connector.plugin import follow_vllm_log
from neuron_pushkv.connector.ranks import position
from neuron_pushkv.connector.scheduler import SchedulerSide
from neuron_pushkv.connector.stats import PushKVMetrics, PushKVStats
from neuron_pushkv.connector.worker import WorkerSide
from neuron_pushkv.device import accelerator_for
from neuron_pushkv.device.base import Accelerator, HearsOutputs
from neuron_pushkv.directory import Directory
from neuron_pushkv.doctor import starting
from neuron_pushkv.engine import PushEngine
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.transport.choosing import open_transport

_WHERE = "kv_connector_extra_config"


def new_incarnation() -> int:
    """A number that tells this process from any other that has had, or will have, its name."""
    return secrets.randbits(64)


class PushKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's text. Raises :class:`ConfigError` for what can't work, before any model is loaded."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        follow_vllm_log()
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._settings = config.parse(ConnectorSettings, transfer.kv_connector_extra_config, _WHERE)
        check(vllm_config)
        self._groups = groups_of(kv_cache_config)
        self._model = fingerprint(vllm_config)
        self._by_layer = self._settings.push_granularity == "layer"
        self._port = self._settings.port + parallel.data_parallel_index
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._memory: SlabContext | None = None
        self._directory: Directory | None = None
        self._accelerator: Accelerator | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler(transfer.engine_id, parallel, kv_cache_config)

    def _start_scheduler(self, engine_id: str, parallel: Any, kv_cache_config: Any) -> None:
        settings, tp_size, pp_size = self._settings, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self._directory = Directory(
            settings, engine_id=engine_id, incarnation=new_incarnation(), port=self._port, ranks=tp_size * pp_size
        )
        size, most = block_bytes(kv_cache_config), settings.max_parked_bytes
        limit = kv_cache_config.num_blocks // 2 if most is None else most // size
        self._scheduler = SchedulerSide(
            model=self._model,
            groups=self._groups,
            tp_size=tp_size,
            pp_size=pp_size,
            hosts=AllowedHosts(settings.host, settings.allowed_remote_hosts),
            coordinates={
                "remote_engine_id": engine_id,
                "remote_host": settings.host,
                "remote_port": self._port,
            },
            parking=Parking(self._directory, limit=limit, block_bytes=size),
            fail_refused=self._kv_transfer_config.kv_load_failure_policy == "fail",
            contiguity=Contiguity(settings.block_order),
            by_step=settings.push_granularity != "request",
        )

    # Worker process.

    def get_mem_pool_context(self) -> SlabContext | None:
        """Where vLLM allocates its KV cache. On other devices than the CPU that is for torch's allocator to say."""
        if self._vllm_config.device_config.device_type != "cpu":
            return None
        self._memory = SlabContext(accelerator_for("cpu", -1))
        return self._memory

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache is allocated: register its memory with the network and listen for peers."""
        place = position(self._vllm_config)
        rank = place.rank
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        layout = caches.describe(
            kv_caches,
            self._vllm_config.compilation_config.static_forward_context,
            self._kv_cache_config,
            caches.Shard(rank.tp, place.tp_size, heads),
            packs_keys=compat.packs_keys(self._vllm_config),
        )
        device = caches.device_of(kv_caches)
        self._accelerator = accelerator = accelerator_for(device.type, -1 if device.index is None else device.index)
        settings = self._settings
        starting.before_opening(settings, accelerator)
        memory = caches.storages(kv_caches, accelerator)
        transport = open_transport(settings, accelerator, memory)
        starting.after_opening(settings, transport, accelerator)
        engine = PushEngine(
            settings=settings,
            engine_id=self._kv_transfer_config.engine_id,
            incarnation=new_incarnation(),
            rank=rank,
            model=self._model,
            layout=layout,
            memory=memory,
            transport=transport,
            accelerator=accelerator,
            directory=(settings.host, self._port),
            sizes=(place.pp_size, place.tp_size),
        )
        about = {"provider": transport.provider, "library": transport.library}
        slabs = self._memory.bytes_of(memory) if self._memory is not None else 0
        self._worker = WorkerSide(
            engine,
            leads=(rank.pp, rank.tp) == (0, 0),
            about=about,
            listener=accelerator if isinstance(accelerator, HearsOutputs) else None,
            measured={"slab_bytes": {str(rank): slabs}},
        )

    def handle_preemptions(self, kv_connector_metadata: PushKVMetadata) -> None:
        """The first hook of a step, before any block is overwritten."""
        self._at_work().begin(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: PushKVMetadata) -> None:
        """The step's orders, before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._at_work().begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are under way since the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of the forward pass has been launched. What it computes is pushed out of vLLM's own blocks."""
        if self._by_layer:
            self._at_work().advance_layer(layer_name, self._get_connector_metadata())

    def wait_for_save(self) -> None:
        """The forward pass has been launched."""
        self._at_work().advance(self._get_connector_metadata())

    def build_connector_worker_meta(self) -> StepNumber | None:
        """Comes back to the scheduler process with the step's outputs."""
        return self._at_work().number(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Loads that have ended (vLLM 0.30 and later)."""
        return compat.transfer_results(*self._at_work().take_results())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that have ended (before vLLM 0.30)."""
        finished, _ = self._at_work().take_results()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads (before vLLM 0.30; since then these are named by request)."""
        bad = self._at_work().take_bad_blocks()
        return set() if compat.reports_requests() else bad

    def clear_connector_metadata(self) -> None:
        """The last hook of a step."""
        super().clear_connector_metadata()
        self._at_work().end()

    def get_kv_connector_stats(self) -> PushKVStats | None:
        """What this rank has done since the last step."""
        data = self._worker.take_stats() if self._worker is not None else {}
        return PushKVStats(data=data) if data else None

    def _at_work(self) -> WorkerSide:
        if self._worker is None:
            raise ConfigError("vLLM has shown no KV cache to PushKVConnector; is the model without one?")
        return self._worker

    # Scheduler process.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Where references to kept blocks are held."""
        self._deciding().bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """A request has been queued."""
        self._deciding().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens will be pushed to us, if any."""
        answer: tuple[int, bool] = self._deciding().get_num_new_matched_tokens(request, num_computed_tokens)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Its blocks have been allocated."""
        self._deciding().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PushKVMetadata:
        """The step's orders."""
        return self._deciding().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What all workers have reported."""
        number = connector_output.kv_connector_worker_meta
        ended = number.step if isinstance(number, StepNumber) else 0
        self._deciding().update_connector_output(connector_output.finished_recving or (), ended)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same, where vLLM has turned off hybrid KV caches and there is one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Never asks vLLM to keep its blocks: an engine that does steps without pause."""
        return False, self._deciding().request_finished(request, compat.tables(block_ids))

    def has_pending_push_work(self) -> bool:
        """Nothing that we do needs the engine to step."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups are loaded; vLLM would zero the blocks of others after they have been registered."""
        return tuple(range(len(self._groups)))

    def _deciding(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ConfigError("a scheduler-side hook of PushKVConnector was called in a worker process")
        return self._scheduler

    # Either.

    def shutdown(self) -> None:
        """End all transfers and connections, then what they used."""
        with ExitStack() as closing:
            for part in (self._directory, self._accelerator, self._worker):
                if part is not None:
                    closing.callback(part.close)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether hooks have to run between a model's layers."""
        return bool(extra_config.get("push_granularity") == "layer")

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PushKVStats:
        """For vLLM's log."""
        return PushKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PushKVMetrics:
        """For vLLM's Prometheus endpoint."""
        return PushKVMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def check(vllm_config: Any) -> None:
    """Raise :class:`ConfigError` for a configuration that this connector can't serve."""
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ConfigError(f'kv_role is "{role}"; set "kv_role": "kv_both" in --kv-transfer-config on every engine')
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        if size != 1:
            raise ConfigError(f"{name} is {size}; context parallelism can't be combined with PushKVConnector yet")
