"""What can be chosen for a benchmark, and how one is run by itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import targets
from benchmarks.rows import Row, core_to_core, machine
from benchmarks.work import BLOCK_TOKENS, TOKENS

Measure = Callable[["Options"], list[Row]]


@dataclass(frozen=True)
class Options:
    """``repeats``: counted measurements per row; ``providers``: libfabric's, the first one wherever one will do."""

    tokens: int
    repeats: int
    providers: tuple[str, ...]
    libfabric: Path | None
    console: Console

    def say(self, text: str) -> None:
        """One line for whoever waits."""
        self.console.print(text, highlight=False, markup=False)


def run(description: str, parts: Sequence[Measure]) -> None:
    """Read the command line, measure the parts one after the other, write and show what came of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt; a multiple of 256")
    parser.add_argument("--repeats", type=int, default=7, help="counted measurements per row")
    parser.add_argument("--providers", nargs="+", default=["shm", "tcp"], help="libfabric providers")
    parser.add_argument("--libfabric", type=Path, help="libfabric.so.1 to use, if not the one that engines would")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    given = parser.parse_args()
    if given.tokens < BLOCK_TOKENS or given.tokens % (16 * BLOCK_TOKENS):
        parser.error(f"--tokens must be a positive multiple of {16 * BLOCK_TOKENS}")
    if given.repeats < 2:
        parser.error("--repeats must be at least 2")
    console = Console(width=None if sys.stdout.isatty() else 140)
    options = Options(given.tokens, given.repeats, tuple(given.providers), given.libfabric, console)
    options.say(machine())
    rows = [core_to_core()]
    for part in parts:
        rows += part(options)
    rows.append(core_to_core())
    options.say(machine())
    targets.show(rows, console, every_target=len(parts) > 1)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


def alone(measure: Measure) -> None:
    """Run one benchmark by itself."""
    run((sys.modules["__main__"].__doc__ or "").splitlines()[0], [measure])
