"""The only place that knows how vLLM's versions differ. Made for 0.24, 0.28 and 0.32, and held to them by a test.

Requests are read here too, so that what the rest of the connector takes from vLLM's objects is one short list.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_pushkv import content
from neuron_pushkv.content import Content
from neuron_pushkv.orders import Blocks

NULL_BLOCK = 0
"""What vLLM writes into a sliding window group's block table in place of a block that has left the window: the id of
``BlockPool.null_block``, which is the pool's first block."""
MAX_TRACEPARENT = 128
"""Longest ``traceparent`` that is handed on, in characters; version 00 of W3C Trace Context has 55."""


@dataclass(frozen=True)
class Scheduled:
    """One request in one step. Counts are tokens before the step; after it ``computed + scheduled`` are there."""

    request: str
    computed: int
    scheduled: int
    blocks: Blocks
    """Prefix hits included; :data:`NULL_BLOCK` for what a window has left behind."""
    whole: bool
    """Whether ``blocks`` are the request's whole tables; otherwise they are what this step adds to them."""


@dataclass(frozen=True)
class StepView:
    """The facts of one engine step, whatever vLLM version they come from."""

    new: tuple[Scheduled, ...]
    running: tuple[Scheduled, ...]
    resumed: tuple[Scheduled, ...]
    """After a preemption. The V2 model runner shows these among ``new``."""
    preempted: frozenset[str]
    """Their blocks are vLLM's again, and are overwritten in this step at the earliest."""
    others: tuple[Scheduled, ...] | None = None
    """Everybody else's requests in this step, where a new one of ours has prefix hits; ``None`` if their tables can't
    be told, or nobody needs to know."""
    empty: bool = False
    """Whether nothing is computed in this step."""

    @property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """Everything that is computed in this step."""
        return self.new + self.running + self.resumed


def step_view(output: Any, wanted: Container[str]) -> StepView:
    """Read the ``wanted`` requests out of vLLM's SchedulerOutput (there may be hundreds of others in a step)."""
    counts = output.num_scheduled_tokens
    new = tuple(
        Scheduled(data.req_id, data.num_computed_tokens, counts[data.req_id], tables(data.block_ids), whole=True)
        for data in output.scheduled_new_reqs
        if data.req_id in wanted
    )
    # 0.32 offers the whole table of every scheduled request; before, a running request only shows what is added.
    state = getattr(output, "kv_connector_block_state", None)
    cached = output.scheduled_cached_reqs
    running: list[Scheduled] = []
    resumed: list[Scheduled] = []
    for index, request in enumerate(cached.req_ids):
        if request not in wanted:
            continue
        is_resumed = request in cached.resumed_req_ids
        whole = state.get_block_ids(request) if state is not None else None
        blocks = whole if whole is not None else cached.new_block_ids[index]
        scheduled = Scheduled(
            request,
            cached.num_computed_tokens[index],
            counts[request],
            tables(blocks) if blocks is not None else (),
            whole=is_resumed or whole is not None,
        )
        (resumed if is_resumed else running).append(scheduled)
    preempted = frozenset(request for request in output.preempted_req_ids or () if request in wanted)
    others = _others(output, wanted) if any(scheduled.computed for scheduled in new) else None
    return StepView(new, tuple(running), tuple(resumed), preempted, others, empty=not counts)


def _others(output: Any, wanted: Container[str]) -> tuple[Scheduled, ...] | None:
    counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    found = [
        Scheduled(data.req_id, data.num_computed_tokens, counts[data.req_id], tables(data.block_ids), whole=True)
        for data in output.scheduled_new_reqs
        if data.req_id not in wanted
    ]
    state = getattr(output, "kv_connector_block_state", None)
    for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request in wanted:
            continue
        whole = state.get_block_ids(request) if state is not None else None
        if whole is None:
            return None
        found.append(Scheduled(request, computed, counts[request], tables(whole), whole=True))
    return tuple(found)


def tables(blocks: Sequence[Sequence[int]]) -> Blocks:
    """vLLM's block ids per group, as ours."""
    return tuple(tuple(group) for group in blocks)


def is_phantom(request: Any) -> bool:
    """Whether vLLM made it up to say that a request was rejected before it was admitted; it has no prompt."""
    return bool(request.abort_immediately)


def unsupported(request: Any) -> str | None:
    """Why this request's prompt can't be named by its content, or ``None`` if it can."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "its prompt has embeddings instead of tokens"
    if request.resumable:
        return "its prompt may still grow (streaming input)"
    return None


def content_of(model: str, request: Any) -> Content:
    """The request's prompt and everything else that its KV depends on; equal on the two engines that serve it."""
    lora = request.lora_request
    adapter = f"{lora.lora_name}\0{lora.lora_path}" if lora is not None else ""
    features = [f"{feature.identifier}@{feature.mm_position.offset}" for feature in request.mm_features]
    seed = content.seed(model, adapter, request.cache_salt or "", *features)
    return Content.of(seed, request.prompt_token_ids)


def traceparent(request: Any) -> str:
    """The request's W3C trace context, or "". Clients may send anything; what is no plausible header is dropped."""
    for name, value in (request.trace_headers or {}).items():
        if isinstance(name, str) and name.lower() == "traceparent":
            plausible = isinstance(value, str) and len(value) <= MAX_TRACEPARENT and value.isprintable()
            return value if plausible else ""
    return ""


def packs_keys(vllm_config: Any) -> bool:
    """Whether vllm-neuron keeps K of two tokens in turns, to be loaded faster. Nothing in the cache's shape shows it.

    ``_kv_cache_is_fp8_packed`` of its ``neuron_model_runner.py`` (0.24): asked for, and a K of type float8_e4m3fn.
    """
    neuron = (getattr(vllm_config, "additional_config", None) or {}).get("neuron_config") or {}
    kept = str(vllm_config.cache_config.cache_dtype)
    return bool(neuron.get("fp8_packed_kv")) and ("fp8" in kept or "float8" in kept) and "e5m2" not in kept


def reports_requests() -> bool:
    """Whether vLLM takes failed loads by request (0.30 and later) and not by block."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base.KVConnectorBase_V1, "get_transfer_results")


def transfer_results(finished: Iterable[str], failed: Iterable[str]) -> Any:
    """vLLM's answer to ``get_transfer_results``; only where :func:`reports_requests`."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_recving=set(finished), failed_recving=set(failed))
