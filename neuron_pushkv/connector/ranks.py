"""Which of the model's workers this process is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from neuron_pushkv.wire import Rank

_NXD = "neuronx_distributed.parallel_layers.parallel_state"


@dataclass(frozen=True)
class Position:
    """``rank`` among ``pp_size`` x ``tp_size`` workers of its engine."""

    rank: Rank
    pp_size: int
    tp_size: int


def position(vllm_config: Any) -> Position:
    """By neuronx-distributed, where it is loaded and has made its groups, which shard the model then; else by vLLM.

    An engine that neuronx-distributed knows no other replicas of has vLLM's number among them.
    """
    parallel = vllm_config.parallel_config
    state: Any = sys.modules.get(_NXD)
    if state is None or not state.model_parallel_is_initialized():
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        rank = Rank(parallel.data_parallel_index, get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        return Position(rank, parallel.pipeline_parallel_size, parallel.tensor_parallel_size)
    replicated = state.get_data_parallel_size() > 1
    replica = state.get_data_parallel_rank() if replicated else parallel.data_parallel_index
    rank = Rank(replica, state.get_pipeline_model_parallel_rank(), state.get_tensor_model_parallel_rank())
    return Position(rank, state.get_pipeline_model_parallel_size(), state.get_tensor_model_parallel_size())
