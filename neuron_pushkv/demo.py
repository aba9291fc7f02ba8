"""``pushkv demo``: a fleet shown at work, and checked against one engine that does both prefill and decode."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from neuron_pushkv import tinymodel
from neuron_pushkv.config import EngineSettings, FleetSettings
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.fleet import Fleet
from neuron_pushkv.fleet.client import Answer, Metrics, complete
from neuron_pushkv.fleet.commands import TINY, engine_url
from neuron_pushkv.fleet.progress import start_visibly

PROMPT_TOKENS = (1, 20, 32, 100, 256, 512, 513, 1000, 2000, 3000)
ANSWER_TOKENS = 16
METRICS_SECONDS = 5.0
"""Engines report what they did with their next step, a moment after the answer."""


@dataclass(frozen=True)
class Row:
    """One prompt: what was measured, and what should have been."""

    prompt_tokens: int
    answer: Answer
    expected: tuple[int, ...]
    """The tokens of the undivided engine."""
    pushed_bytes: int
    expected_bytes: int
    computed_tokens: int
    """Prompt tokens that the decode engine computed, as vLLM counts them: without the last one, which it always does
    compute again for its logits, unless that is the only one."""

    def faults(self) -> Iterator[str]:
        """What is wrong with it, in words."""
        if self.answer.tokens != self.expected:
            yield "its tokens differ from the undivided engine's"
        if self.pushed_bytes != self.expected_bytes:
            yield f"{self.pushed_bytes} bytes were pushed instead of {self.expected_bytes}"
        if self.computed_tokens != (1 if self.prompt_tokens == 1 else 0):
            yield f"the decode engine computed {self.computed_tokens} of its tokens itself"


def run(settings: FleetSettings, logs: Path, console: Console) -> bool:
    """Start the fleet with an undivided engine next to it, send the prompts, print the table, stop everything.

    True if all is well: every token equal, every byte accounted for, nothing recomputed.
    """
    decode = _one(settings, "decode")
    if settings.model != TINY or settings.router is None:
        raise ConfigError("the demo knows what to expect of the tiny model only: it needs `model: tiny` and a router")
    router_url = f"http://{settings.router.host}:{settings.router.port}"
    alone = undivided_engine(settings)
    console.print(
        f"starting {len(settings.engines)} engines, one undivided engine to compare with, and the router",
        soft_wrap=True,
    )
    with Fleet(settings.model_copy(update={"engines": (*settings.engines, alone)}), logs) as fleet:
        start_visibly(fleet, console)
        with httpx.Client(timeout=120.0, trust_env=False) as client:
            console.print(f"sending {len(PROMPT_TOKENS)} prompts of 1 to {max(PROMPT_TOKENS)} tokens to {router_url}")
            for url in (router_url, engine_url(alone)):  # the first prompt pays for what is set up on first use
                complete(client, url, _prompt(64, seed=1), 2)
            rows = [measure(client, router_url, engine_url(decode), engine_url(alone), n) for n in PROMPT_TOKENS]
    console.print(_table(rows))
    faults = [f"prompt of {row.prompt_tokens} tokens: {fault}" for row in rows for fault in row.faults()]
    for fault in faults:
        console.print(f"[red]{fault}[/red]", soft_wrap=True)
    if not faults:
        verdict = "all tokens are the undivided engine's, every byte is accounted for, nothing was recomputed"
        console.print(verdict, soft_wrap=True)
    return not faults


def undivided_engine(settings: FleetSettings) -> EngineSettings:
    """An engine like the prefill engine, but without the connector, on the next port that the fleet leaves free."""
    taken = {engine.port for engine in settings.engines}
    taken |= {engine.connector.port for engine in settings.engines if engine.connector}
    taken |= {settings.router.port} if settings.router else set()
    like = _one(settings, "prefill")
    port = next(port for port in range(like.port + 1, 65536) if port not in taken)
    return like.model_copy(update={"name": "undivided", "role": "undivided", "connector": None, "port": port})


def _one(settings: FleetSettings, role: str) -> EngineSettings:
    found = [engine for engine in settings.engines if engine.role == role]
    if len(found) != 1:
        raise ConfigError(f"the demo needs exactly one {role} engine in the fleet file, not {len(found)}")
    return found[0]


def measure(client: httpx.Client, router: str, decode: str, alone: str, prompt_tokens: int) -> Row:
    """Send one prompt to the router and to the undivided engine, and read in ``decode``'s metrics what it did."""
    prompt = _prompt(prompt_tokens, seed=0)
    expected = complete(client, alone, prompt, ANSWER_TOKENS).tokens
    before = Metrics.of(client, decode)
    answer = complete(client, router, prompt, ANSWER_TOKENS)
    after = _settled(client, decode, before, prompt_tokens)

    def grown(name: str, **labels: str) -> int:
        return round(after.total(name, **labels) - before.total(name, **labels))

    block = int(after.label("vllm:cache_config_info", "block_size"))
    return Row(
        prompt_tokens=prompt_tokens,
        answer=answer,
        expected=expected,
        pushed_bytes=grown("vllm:pushkv_bytes_total", direction="in"),
        expected_bytes=-(-prompt_tokens // block) * block * tinymodel.BYTES_PER_TOKEN,
        computed_tokens=grown("vllm:prompt_tokens_by_source_total", source="local_compute"),
    )


def _settled(client: httpx.Client, url: str, before: Metrics, prompt_tokens: int) -> Metrics:
    """The engine's metrics once they tell of that prompt and of its transfer, or once time is up."""
    give_up = time.monotonic() + METRICS_SECONDS
    while True:
        now = Metrics.of(client, url)
        told = now.total("vllm:prompt_tokens_total") - before.total("vllm:prompt_tokens_total") >= prompt_tokens
        moved = now.total("vllm:pushkv_transfers_total", direction="in") > before.total(
            "vllm:pushkv_transfers_total", direction="in"
        )
        if (told and moved) or time.monotonic() > give_up:
            return now
        time.sleep(0.05)


def _prompt(tokens: int, seed: int) -> list[int]:
    """Random tokens (no special ones); prompts of unlike lengths or seeds share no beginning."""
    return random.Random(f"{tokens} {seed}").choices(range(3, tinymodel.VOCABULARY), k=tokens)


def _table(rows: list[Row]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("prompt tokens", "TTFT ms", "TPOT ms", "bytes pushed", "tokens equal"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.prompt_tokens:,}",
            f"{row.answer.first_seconds * 1000:.1f}",
            f"{row.answer.seconds_per_token * 1000:.1f}",
            f"{row.pushed_bytes:,}",
            "yes" if row.answer.tokens == row.expected else "[red]NO[/red]",
        )
    return table
