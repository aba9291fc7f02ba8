"""From "the last KV is ready" to "the receiver's worker reports it", between two processes of this machine.

    python -m benchmarks.transfer --json transfer.json

The work is in ``work.py``. Measured in the same run and in turns, so that whatever else the machine does hits all of
them: our engines over libfabric's shm and tcp, NIXL over UCX as vLLM's push connector drives it (if it can be
imported), and a plain memcpy of as many bytes by one thread. Those whose turn it isn't are stopped, or idle.

Of each row the first transfer is checked byte by byte and not counted. The registration precedes the end of the
prefill, as it does when D is chosen before it. How long the GIL is held is measured in transfers of their own: see
``gil.py``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import platform
import socket
import statistics
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import nixl_push, pushing
from benchmarks.process import Remote
from benchmarks.work import BLOCK_BYTES, BLOCK_TOKENS, ORDERS, REGIONS, Work

LEAD_SECONDS = 0.03
"""How long a registration precedes the end of the prefill."""
PAUSE = 0.0005
"""How often a receiver looks for the end of a transfer that is timed."""
WATCHED_PAUSE = 0.02
"""And of one whose GIL is watched: looking takes the GIL too."""
LOOPBACK = "127.0.0.1"


class Runner(ABC):
    """Something that moves the work's bytes from one place to another."""

    engine: str
    provider: str
    versions: dict[str, str]

    def __init__(self, work: Work) -> None:
        self.work = work
        self.number = 0

    @abstractmethod
    def prepare(self, order: str) -> int:
        """Make one transfer, check its bytes, and return of how many writes it consisted."""

    @abstractmethod
    def run(self) -> float:
        """Make one transfer; seconds."""

    @abstractmethod
    def watch(self) -> float | None:
        """Make one transfer; milliseconds for which the GIL was held at the side where it was held longer."""

    def turn(self, mine: bool) -> None:
        """Whether it is this one's turn."""
        del mine

    @abstractmethod
    def close(self) -> None:
        """End it."""


class Copy(Runner):
    """memcpy, by one thread."""

    engine = "memcpy"
    provider = "libc"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.versions = {"libc": " ".join(platform.libc_ver())}
        self.memory = [mmap.mmap(-1, work.bytes) for _ in range(2)]
        self.source, self.target = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self.memory)

    def prepare(self, order: str) -> int:
        ctypes.memset(self.target, 0, self.work.bytes)
        ctypes.memset(self.source, ORDERS.index(order) + 1, self.work.bytes)
        self.run()
        if self.memory[0] != self.memory[1] and self.memory[0][:] != self.memory[1][:]:
            raise RuntimeError("memcpy does not copy")
        return 1

    def run(self) -> float:
        began = time.perf_counter()
        ctypes.memmove(self.target, self.source, self.work.bytes)
        return time.perf_counter() - began

    def watch(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is open."""


class Pair(Runner):
    """Two processes."""

    sender: Remote
    receiver: Remote

    def move(self, pause: float) -> float:
        """One transfer; seconds."""
        self.number += 1
        self.announce()
        self.receiver.tell("report", self.number, pause)
        ready = self.sender.ask("seal", self.number, pause)
        reported = self.receiver.answer()
        self.conclude()
        return float(reported - ready) / 1e9

    def announce(self) -> None:
        """What precedes the end of the prefill."""

    def conclude(self) -> None:
        """What follows the report."""

    def writes(self) -> int:
        """How many there were since it was opened."""
        return self.number

    def prepare(self, order: str) -> int:
        salt = ORDERS.index(order) + 1
        self.sender.ask("prepare", order, salt)
        self.receiver.ask("prepare", order)
        before = self.writes()
        self.run()
        if not self.receiver.ask("holds", salt):
            raise RuntimeError(f"{self.engine} over {self.provider}: not every byte arrived as it was sent")
        return self.writes() - before

    def run(self) -> float:
        return self.move(PAUSE)

    def watch(self) -> float:
        for side in (self.sender, self.receiver):
            side.ask("watch")
        self.move(WATCHED_PAUSE)
        return max(float(side.ask("watched")) for side in (self.sender, self.receiver))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class Push(Pair):
    """Ours."""

    engine = "pushkv"

    def __init__(self, work: Work, provider: str, library: Path | None) -> None:
        super().__init__(work)
        self.provider = provider
        self.port = free_port()
        self.sender = Remote(pushing.Sender, "sender", provider, library, self.port, work)
        self.receiver = Remote(pushing.Receiver, "receiver", provider, library, free_port(), work)
        self.versions = {"libfabric": self.sender.ask("versions")}

    def announce(self) -> None:
        self.sender.ask("offer", self.number)
        self.receiver.ask("receive", self.number, LOOPBACK, self.port)
        time.sleep(LEAD_SECONDS)

    def conclude(self) -> None:
        self.sender.ask("finish", self.number)

    def writes(self) -> int:
        return int(self.sender.ask("writes"))


class Nixl(Pair):
    """The yardstick."""

    engine = "nixl"
    provider = "UCX"

    def __init__(self, work: Work, version: str) -> None:
        super().__init__(work)
        self.versions = {"nixl": version}
        self.receiver = Remote(nixl_push.Receiver, "receiver", work)
        self.sender = Remote(nixl_push.Sender, "sender", work)
        self.sender.ask("connect", *self.receiver.ask("contact"))

    def turn(self, mine: bool) -> None:
        for side in (self.sender, self.receiver):
            side.pause(not mine)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def measure(runners: list[Runner], repeats: int, console: Console) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    for order in ORDERS:
        writes: dict[Runner, int] = {}
        times: dict[Runner, list[float]] = {runner: [] for runner in runners}
        held: dict[Runner, list[float]] = {runner: [] for runner in runners}
        for repeat in range(repeats + 1):
            for runner in runners:
                runner.turn(True)
                if not repeat:
                    writes[runner] = runner.prepare(order)
                else:
                    times[runner].append(runner.run())
                    milliseconds = runner.watch()
                    if milliseconds is not None:
                        held[runner].append(milliseconds)
                runner.turn(False)
            console.print(f"{order}: {repeat} of {repeats}", highlight=False)
        for runner in runners:
            rows.append(row(runner, order, writes[runner], times[runner], held[runner]))
    return rows


def row(runner: Runner, order: str, writes: int, times: list[float], held: list[float]) -> dict[str, Any]:
    """One line of the JSON file."""
    middle = statistics.median(times)
    return {
        "name": "transfer",
        "engine": runner.engine,
        "provider": runner.provider,
        "order": order,
        "tokens": runner.work.tokens,
        "bytes": runner.work.bytes,
        "writes": writes,
        "seconds_p50": middle,
        "seconds_p90": statistics.quantiles(times, n=10, method="inclusive")[8],
        "gb_per_s": runner.work.bytes / middle / 1e9,
        "gil_ms_p50": statistics.median(held) if held else None,
        "versions": {"python": platform.python_version(), **runner.versions},
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """The table."""
    table = Table()
    for heading in (
        "order",
        "engine",
        "provider",
        "writes",
        "p50 ms",
        "p90 ms",
        "GB/s",
        "x NIXL",
        "x memcpy",
        "GIL ms",
    ):
        table.add_column(heading, justify="left" if heading in ("order", "engine", "provider") else "right")
    for each in rows:

        def times(engine: str, rate: float = each["gb_per_s"], order: str = each["order"]) -> str:
            other = [one["gb_per_s"] for one in rows if (one["engine"], one["order"]) == (engine, order)]
            return f"{rate / other[0]:.2f}" if other else ""

        table.add_row(
            each["order"],
            each["engine"],
            each["provider"],
            f"{each['writes']:,}",
            f"{each['seconds_p50'] * 1e3:.1f}",
            f"{each['seconds_p90'] * 1e3:.1f}",
            f"{each['gb_per_s']:.2f}",
            times("nixl"),
            times("memcpy"),
            "" if each["gil_ms_p50"] is None else f"{each['gil_ms_p50']:.2f}",
        )
    console.print(table)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="Times KV transfers between two processes of this machine.")
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt; a multiple of 16")
    parser.add_argument("--repeats", type=int, default=7, help="counted transfers per row")
    parser.add_argument("--providers", nargs="*", default=["shm", "tcp"], help="libfabric providers")
    parser.add_argument("--libfabric", type=Path, help="libfabric.so.1 to use, if not the one that engines would")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    options = parser.parse_args()
    if options.tokens < BLOCK_TOKENS or options.tokens % BLOCK_TOKENS:
        parser.error(f"--tokens must be a positive multiple of {BLOCK_TOKENS}")
    if options.repeats < 2:
        parser.error("--repeats must be at least 2")
    console = Console(width=None if sys.stdout.isatty() else 120)
    work = Work(options.tokens)
    console.print(
        f"{work.tokens} tokens: {REGIONS} regions x {work.blocks} blocks x {BLOCK_BYTES} bytes = "
        f"{work.bytes >> 20} MiB; medians of {options.repeats}",
        highlight=False,
    )
    runners: list[Runner] = []
    try:
        runners.append(Copy(work))
        for provider in options.providers:
            runners.append(Push(work, provider, options.libfabric))
        version = nixl_push.version()
        if version is None:
            console.print("NIXL is not installed here, so its rows are missing (pip install --no-deps nixl nixl-cu12)")
        else:
            runners.append(Nixl(work, version))
            runners[-1].turn(False)
        rows = measure(runners, options.repeats, console)
    finally:
        for runner in runners:
            runner.close()
    show(rows, console)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
