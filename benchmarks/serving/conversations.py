"""Conversations, driven by vLLM's own multi-turn benchmark, which lies in vLLM's source but not in its wheel.

Each turn's prompt is all that was said before and a new question. Every turn is prefilled on the prefill engine, which
has what it computed for the turns before in its prefix cache; decode has all of it, and fetches what is new.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.contestants import Engines
from benchmarks.serving.running import Running
from benchmarks.serving.watching import Watch
from neuron_pushkv import tinymodel
from neuron_pushkv.errors import FleetError

SCRIPT = "benchmark_serving_multi_turn.py"
WHERE = (
    "conversations are left out: name the folder benchmarks/multi_turn of vLLM's source with --multi-turn "
    "(its source distribution on PyPI has it; it needs pandas)"
)
SECONDS = 600
WORDS = 60_000
TEXT_SEED = 7
FIELDS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "latency_ms"}
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Cell:
    """``turns``: questions of each conversation. ``first_tokens``: of the first one, beside the ``question_tokens``."""

    conversations: int
    turns: int
    first_tokens: int
    question_tokens: int
    answer_tokens: int
    at_once: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.conversations} conversations of {self.turns} turns, {self.at_once} at once"

    @property
    def tokens(self) -> int:
        """Of a prompt half-way through a conversation."""
        return self.first_tokens + self.turns * (self.question_tokens + self.answer_tokens) // 2


def recipe(cell: Cell, text: Path) -> dict[str, Any]:
    """What the script makes conversations from. It counts questions and answers as turns."""

    def constant(value: int) -> dict[str, Any]:
        return {"distribution": "constant", "value": value}

    return {
        "filetype": "generate_conversations",
        "num_conversations": cell.conversations,
        "text_files": [str(text)],
        "print_stats": False,
        "prompt_input": {
            "num_turns": constant(2 * cell.turns),
            "common_prefix_num_tokens": constant(0),
            "prefix_num_tokens": constant(cell.first_tokens),
            "num_tokens": constant(cell.question_tokens),
        },
        "prompt_output": {"num_tokens": constant(cell.answer_tokens)},
    }


def measure(running: Running, cell: Cell, script: Path, engines: Engines, seed: int) -> dict[str, float]:
    """One run, by name of what was measured; times in milliseconds. Raises :class:`FleetError` if it fails."""
    running.forget_on_decode()
    with Watch(running, engines, cell.tokens) as watch:
        requests = _run(running, cell, script, engines.model, seed)
    return figures(requests) | watch.figures()


def figures(requests: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Percentiles over all turns, and of time to first token also over the first turns and over the later ones."""
    found = {"completed": float(len(requests))}
    for name, key in FIELDS.items():
        found |= _percentiles(name, [request[key] for request in requests])
    first = [request["ttft_ms"] for request in requests if request["input_num_turns"] <= 1]
    later = [request["ttft_ms"] for request in requests if request["input_num_turns"] > 1]
    return found | _percentiles("ttft of first turns", first) | _percentiles("ttft of later turns", later)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name} p{each}": cuts[each - 1] for each in PERCENTILES}


def _run(running: Running, cell: Cell, script: Path, model: Path, seed: int) -> list[dict[str, float]]:
    text, given, result = (running.logs / name for name in ("words.txt", "conversations.json", "turns.json"))
    text.write_text(tinymodel.words(WORDS, TEXT_SEED))
    given.write_text(json.dumps(recipe(cell, text)))
    result.unlink(missing_ok=True)
    command = [sys.executable, str(script), f"--input-file={given}", f"--model={model}", "--served-model-name=tiny"]
    command += [f"--url={running.front}", f"--seed={seed}", f"--num-clients={cell.at_once}"]
    command += [f"--max-active-conversations={cell.at_once}", "--no-early-stop", f"--stats-json-output={result}"]
    command += [f"--limit-min-tokens={cell.answer_tokens}", f"--limit-max-tokens={cell.answer_tokens}"]
    log = running.logs / "conversations.log"
    with log.open("wb") as output:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=SECONDS, check=False
        )
    if ended.returncode or not result.exists():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise FleetError(f"vLLM's multi-turn benchmark has failed: {' '.join(last)} (log: {log})")
    turns: list[dict[str, float]] = json.loads(result.read_text())
    if len(turns) != cell.conversations * cell.turns:
        raise FleetError(f"{running.contestant.name}: {len(turns)} of {cell.conversations * cell.turns} turns answered")
    return turns
