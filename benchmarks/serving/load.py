"""Cells under load, driven by vLLM's own client: what it measures, and beside it what decides that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.contestants import Engines
from benchmarks.serving.running import Running
from benchmarks.serving.watching import Watch
from neuron_pushkv.errors import FleetError

SECONDS = 600
SHARED = 0.5
"""Of a prompt in the ``prefix_repetition`` data set, what it has in common with others."""
TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
THROUGHPUT = ("request_throughput", "output_throughput", "request_goodput", "completed", "failed", "duration")


@dataclass(frozen=True)
class Objective:
    """What a request must keep to for goodput, in milliseconds."""

    ttft: float
    tpot: float


@dataclass(frozen=True)
class Cell:
    """One load. ``rate``: requests a second, at random intervals."""

    dataset: str
    input_tokens: int
    output_tokens: int
    rate: float
    requests: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.dataset} {self.input_tokens}+{self.output_tokens} at {self.rate:g}/s"


def arguments(cell: Cell, objective: Objective, model: Path, url: str, seed: int) -> list[str]:
    """For ``vllm bench serve``."""
    if cell.dataset == "random":
        data = [f"--random-input-len={cell.input_tokens}", f"--random-output-len={cell.output_tokens}"]
    else:
        shared = int(cell.input_tokens * SHARED)
        data = [
            f"--prefix-repetition-prefix-len={shared}",
            f"--prefix-repetition-suffix-len={cell.input_tokens - shared}",
            f"--prefix-repetition-num-prefixes={max(1, cell.requests // 4)}",
            f"--prefix-repetition-output-len={cell.output_tokens}",
        ]
    return [
        "--backend=openai",
        f"--base-url={url}",
        "--endpoint=/v1/completions",
        "--model=tiny",
        f"--tokenizer={model}",
        f"--dataset-name={cell.dataset}",
        *data,
        f"--request-rate={cell.rate:g}",
        f"--num-prompts={cell.requests}",
        f"--seed={seed}",
        "--ignore-eos",
        "--temperature=0",
        "--disable-tqdm",
        "--ready-check-timeout-sec=0",
        f"--percentile-metrics={','.join(TIMES)}",
        f"--metric-percentiles={','.join(map(str, PERCENTILES))}",
        "--goodput",
        f"ttft:{objective.ttft:g}",
        f"tpot:{objective.tpot:g}",
    ]


def measure(running: Running, cell: Cell, objective: Objective, engines: Engines, seed: int) -> dict[str, float]:
    """One run of the cell, by name of what was measured; times in milliseconds. Raises :class:`FleetError` if it fails.

    With it comes what the engines said meanwhile (:meth:`Watch.figures`).
    """
    running.forget_on_decode()
    with Watch(running, engines, cell.input_tokens) as watch:
        result = _run(arguments(cell, objective, engines.model, running.front, seed), running.logs)
    if result["completed"] != cell.requests:
        raise FleetError(f"{running.contestant.name}: {result['completed']} of {cell.requests} requests were answered")
    found = {name: float(result[name] or 0) for name in THROUGHPUT}
    for time in TIMES:
        found |= {f"{time} p{each}": float(result[f"p{each}_{time}_ms"]) for each in PERCENTILES}
    return found | watch.figures()


def _run(given: Iterable[str], logs: Path) -> dict[str, Any]:
    result = logs / "bench.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.serving.client", *given]
    command += ["--save-result", f"--result-dir={logs}", f"--result-filename={result.name}"]
    log = logs / "bench.log"
    with log.open("wb") as output:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=SECONDS, check=False
        )
    if ended.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise FleetError(f"vLLM's client has failed: {' '.join(last)} (log: {log})")
    return dict(json.loads(result.read_text()))
