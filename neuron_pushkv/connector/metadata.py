"""What the scheduler side hands to the workers with every engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from neuron_pushkv.orders import Blocks, StepOrders


@dataclass(frozen=True)
class Refused:
    """A load that is not even tried: the workers report it as failed, and vLLM's policy decides what follows."""

    request: str
    blocks: Blocks


@dataclass(frozen=True)
class PushKVMetadata(KVConnectorMetadata):
    """One step's orders. ``step`` grows by one, so that a worker carries each of them out once."""

    step: int
    orders: StepOrders
    refused: tuple[Refused, ...] = ()
    untried: dict[str, int] = field(default_factory=dict)
    """Transfers that were refused before they began, keyed like the workers' own: ``in:failed:bad_parameters``."""
    gauges: dict[str, int] = field(default_factory=dict)
    """What the scheduler side measures, by metric, where it has changed since the last step."""
    empty: bool = False
    """Whether the step computes nothing: vLLM only looks whether a load has ended."""
