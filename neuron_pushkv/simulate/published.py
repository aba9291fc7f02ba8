"""Published figures beside what the model says, and what has to be assumed for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from neuron_pushkv.simulate.replication import Estimate, Result
from neuron_pushkv.simulate.scenario import Scenario, changed
from neuron_pushkv.simulate.tables import ServiceTable

Replicate = Callable[[Scenario, ServiceTable, int], Result]
"""Simulates a scenario with that table so many times."""

PUSH_TTFT, PULL_TTFT, PUSH_TPOT, PULL_TPOT = 540.0, 1744.0, 7.0, 10.4
"""Two P5en, EFA, 1P1D, Qwen3-32B, 8 requests a second, 16k input, 128 output, decode batch at most 8. Milliseconds."""
QWEN_WITHOUT, QWEN_WITH, GLM_WITHOUT, GLM_WITH = 778.0, 460.0, 2334.0, 702.0
"""TTFT without and with a return path, 10 turns, 24k tokens: Qwen3-32B and GLM-5-FP8. Milliseconds."""

LOAD = Scenario.model_validate(
    {"rate": 8.0, "input": 16384, "output": 128, "slots": 8, "block_tokens": 128, "requests": 100, "warm_up": 0}
)
ALL_ASSUME = (
    f"All assume a floor of {LOAD.floor_ms:g} ms and {LOAD.rails * LOAD.rail_gigabytes:g} GB/s per rank (published for "
    f"the return path), blocks of {LOAD.block_tokens} tokens, prefill steps of {LOAD.chunk_tokens:,}, "
    f"{LOAD.posting_us} us to post a descriptor, and that the published figures are means; under load {LOAD.requests} "
    "Poisson arrivals at empty engines."
)
LONGER = 4
"""How many times longer the run is that shows whether a figure grows with it."""
TURN_TOKENS = 2342
"""10 turns of so many tokens and 128 of answer come to a last prompt of 24,572."""
CONVERSATION = Scenario.model_validate(
    {"turns": 10, "input": TURN_TOKENS, "output": 128, "requests": 1, "warm_up": 0, "block_tokens": 128, "mode": "pull"}
)
GLM_KV_BYTES = 78 * (512 + 64) * 2
"""A token's KV of GLM-5 on each rank: 78 layers of a latent of 512 and 64 rotary, two bytes each, alike on all ranks.
Its sparse attention's index cache is not counted."""
GLM_REGIONS = 78


@dataclass(frozen=True)
class Row:
    """One published figure and one way to simulate it. Milliseconds."""

    figure: str
    published: float
    simulated: Estimate
    assumptions: str
    fitted: bool = False
    """An assumption was chosen so that this figure comes out: it says nothing for the model."""


def rows(table: ServiceTable, replicate: Replicate, replications: int) -> list[Row]:
    """The eight published figures, some of them under several assumptions."""

    def run(scenario: Scenario) -> Result:
        return replicate(scenario, table, replications)

    cold_push, cold_pull = run(LOAD), run(changed(LOAD, mode="pull"))
    hit = fitted_hit(run)
    push = run(changed(LOAD, prefix_hit=hit))
    pull = run(changed(LOAD, prefix_hit=hit, mode="pull"))
    longer = run(changed(LOAD, prefix_hit=hit, mode="pull", requests=LOAD.requests * LONGER))
    background = run(changed(LOAD, prefix_hit=hit, mode="pull", posting="background"))
    posting = fitted_posting(run, hit)
    dear = run(changed(LOAD, prefix_hit=hit, mode="pull", posting_us=posting))
    cold = "every prompt cold: P gets 2.8 times what it can do, so TTFT is its queue and grows with the run"
    most = LOAD.slots / (LOAD.output.longest * table.decode_seconds(LOAD.slots) + LOAD.slots * _posting(table))
    short = f"D's slots do {most:.1f} a second at most, so it grows with the run"
    warm = f"{hit:.1%} of each prompt cached on P"
    slow = f"{posting:.1f} us to post a descriptor instead of {LOAD.posting_us} (fitted to the TPOT of pull)"
    return [
        Row("TTFT push", PUSH_TTFT, cold_push["ttft_ms.mean"], cold),
        Row(
            "TTFT push",
            PUSH_TTFT,
            push["ttft_ms.mean"],
            f"{warm}: fitted to this figure as nearly as whole blocks allow",
            fitted=True,
        ),
        Row("TTFT pull", PULL_TTFT, cold_pull["ttft_ms.mean"], cold),
        Row("TTFT pull", PULL_TTFT, pull["ttft_ms.mean"], f"{warm}; D posts its reads inline"),
        Row(
            "TTFT pull",
            PULL_TTFT,
            longer["ttft_ms.mean"],
            f"the same, {LONGER * LOAD.requests} requests: {short}",
        ),
        Row("TTFT pull", PULL_TTFT, dear["ttft_ms.mean"], f"{warm}; inline, {slow}"),
        Row("TPOT push", PUSH_TPOT, push["tpot_ms.mean"], warm),
        Row("TPOT pull", PULL_TPOT, background["tpot_ms.mean"], f"{warm}; reads posted in the background"),
        Row("TPOT pull", PULL_TPOT, pull["tpot_ms.mean"], f"{warm}; D posts its reads inline"),
        Row("TPOT pull", PULL_TPOT, dear["tpot_ms.mean"], f"{warm}; inline, {slow}", fitted=True),
        *_conversations(table, replicate),
    ]


def _posting(table: ServiceTable) -> float:
    """Seconds to post one prompt of :data:`LOAD`."""
    return LOAD.posting_seconds(LOAD.input.longest, table)


def fitted_hit(run: Callable[[Scenario], Result]) -> float:
    """The share of prompts that P must have cached for push's mean TTFT to be the published one."""
    return _bisect(lambda hit: run(changed(LOAD, prefix_hit=hit))["ttft_ms.mean"].mean - PUSH_TTFT, 0.3, 0.95)


def fitted_posting(run: Callable[[Scenario], Result], hit: float) -> float:
    """The microseconds a descriptor must take for pull's mean TPOT to be the published one."""

    def short(microseconds: float) -> float:
        scenario = changed(LOAD, prefix_hit=hit, mode="pull", posting_us=microseconds)
        return PULL_TPOT - run(scenario)["tpot_ms.mean"].mean

    return _bisect(short, 0.5, 10.0)


def _bisect(falling: Callable[[float], float], low: float, high: float) -> float:
    """About where ``falling`` is 0 between ``low`` and ``high``."""
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def _conversations(table: ServiceTable, replicate: Replicate) -> list[Row]:
    """One conversation alone on idle engines: nothing random in it, so one replication says all."""

    def last(scenario: Scenario, which: ServiceTable) -> Estimate:
        return replicate(scenario, which, 1)["ttft_last_turn_ms.mean"]

    back = changed(CONVERSATION, return_path=True)
    factor = glm_factor(table, lambda glm: last(CONVERSATION, glm).mean)
    glm = glm_table(table, factor)
    cold = "last of 10 turns, alone; P cold; KV pulled whole"
    warm = f"the same; D gives P what it has, P computes {TURN_TOKENS:,} tokens and sends only those"
    scaled = f"service times unknown: prefill {factor:.2f} times Qwen's, fitted to the first GLM figure; 78 latents"
    return [
        Row("TTFT Qwen3-32B, no return path", QWEN_WITHOUT, last(CONVERSATION, table), cold),
        Row("TTFT Qwen3-32B, return path", QWEN_WITH, last(back, table), warm),
        Row("TTFT GLM-5-FP8, no return path", GLM_WITHOUT, last(CONVERSATION, glm), f"{cold}; {scaled}", fitted=True),
        Row("TTFT GLM-5-FP8, return path", GLM_WITH, last(back, glm), f"{warm}; {scaled}"),
    ]


def glm_table(table: ServiceTable, factor: float) -> ServiceTable:
    """A stand-in for GLM-5: ``table`` with its prefill times multiplied, and GLM-5's KV. Decode times stay."""
    prefill = tuple((tokens, ms * factor) for tokens, ms in table.prefill_ms)
    return table.model_copy(
        update={
            "name": "glm-5 (stand-in)",
            "prefill_ms": prefill,
            "kv_bytes_per_token": GLM_KV_BYTES,
            "regions": GLM_REGIONS,
        }
    )


def glm_factor(table: ServiceTable, without: Callable[[ServiceTable], float]) -> float:
    """How much slower than Qwen3-32B's prefill GLM-5's must be for the figure without a return path."""
    return _bisect(lambda factor: GLM_WITHOUT - without(glm_table(table, factor)), 1.0, 10.0)
