"""Whether moving a token's KV beats computing it, by what this fleet's engines have measured."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from neuron_pushkv.config import FleetSettings
from neuron_pushkv.doctor.findings import Finding, Id, fine, warning

ASK_SECONDS = 2.0


def worth(fleet: FleetSettings, bytes_per_second: float) -> Finding:
    """From the metrics of the fleet's prefill engines, if they run and have served something."""
    for engine in fleet.engines:
        if engine.role != "prefill":
            continue
        try:
            with httpx.Client(trust_env=False, timeout=ASK_SECONDS) as client:
                answer = client.get(f"http://{engine.host}:{engine.port}/metrics")
            seen = judge(answer.text, bytes_per_second) if answer.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError):  # It doesn't run, or something else does.
            seen = None
        if seen is not None:
            return seen
    what = "how long prefill takes is not known until an engine of this fleet has served requests"
    return fine(Id.TRANSFER_WORTH, what, bytes_per_second=round(bytes_per_second))


def judge(metrics: str, bytes_per_second: float) -> Finding | None:
    """From one engine's metrics; ``None`` while they say nothing of prefill or of KV that was moved."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.labels.get("direction", "out") == "out":
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    prompt, prefill = totals.get("vllm:prompt_tokens_total", 0), totals.get("vllm:request_prefill_time_seconds_sum", 0)
    moved, tokens = totals.get("vllm:pushkv_bytes_total", 0), totals.get("vllm:pushkv_tokens_total", 0)
    if not (prompt and prefill and moved and tokens):
        return None
    computing, moving = prefill / prompt, moved / tokens / bytes_per_second
    about = {
        "compute_microseconds_per_token": round(1e6 * computing, 3),
        "move_microseconds_per_token": round(1e6 * moving, 3),
        "bytes_per_token": round(moved / tokens),
    }
    shown = f"moving a token takes {1e6 * moving:.3g} us here, computing it {1e6 * computing:.3g} us"
    if moving >= computing:
        fix = "compute prompts where they are decoded, or find out why the network is slow (transfer.bandwidth)"
        return warning(Id.TRANSFER_WORTH, shown, fix, **about)
    return fine(Id.TRANSFER_WORTH, shown, **about)
