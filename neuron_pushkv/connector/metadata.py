"""What the scheduler side hands to the workers with every engine step, and what comes back with its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

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
    ended: int = 0
    """vLLM has the outputs of all steps up to this one, as far as a worker has asked to hear of it."""


@dataclass(frozen=True)
class StepNumber(KVConnectorWorkerMetadata):
    """Comes back with the outputs of the step of that number; vLLM makes one out of all workers'."""

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Workers are in the same step; if they were not, the earlier one would be what all have ended."""
        return self if not isinstance(other, StepNumber) or self.step <= other.step else other
