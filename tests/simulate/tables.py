"""Service times for tests: so simple that what must come out can be computed by hand."""

from __future__ import annotations

from typing import Any

from neuron_pushkv.simulate.scenario import Scenario, scenario
from neuron_pushkv.simulate.tables import ServiceTable

PREFILL_TOKENS = 10_000


def table(prefill_ms: float = 1000.0, decode_ms: float = 10.0, sequences: int = 64) -> ServiceTable:
    """A prompt of 10,000 tokens takes ``prefill_ms``, others in proportion; every decode step takes ``decode_ms``.

    A token weighs 1,000 bytes and has 10 regions a block.
    """
    return ServiceTable(
        name="by hand",
        model="none",
        machine="none",
        source="a test",
        prefill_ms=((PREFILL_TOKENS // 2, prefill_ms / 2), (PREFILL_TOKENS, prefill_ms)),
        decode_ms=((1, decode_ms), (sequences, decode_ms)),
        kv_bytes_per_token=1000,
        regions=10,
    )


def plain(**settings: Any) -> Scenario:
    """One request to two idle engines, over a network that costs nothing; ``settings`` change that."""
    free = {"floor_ms": 0, "rails": 1, "rail_gigabytes": 1e9, "posting_us": 0, "block_tokens": 1}
    return scenario({"requests": 1, "warm_up": 0, "input": PREFILL_TOKENS, "output": 11, **free, **settings})
