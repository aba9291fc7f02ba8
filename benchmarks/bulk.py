"""A whole prompt, from "the last KV is ready" to "the receiver's worker reports it": ours, NIXL's, and a plain memcpy.

    python -m benchmarks.bulk

The runners take turns, so that whatever else the machine does hits all of them; those whose turn it isn't are stopped,
or idle. Of each row the first transfer is checked byte by byte and not counted. The registration precedes the end of
the prefill, as it does when D is chosen before it, and nothing is pushed before that end. How long the GIL is held is
measured in transfers of their own: see ``gil.py``.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import statistics
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from benchmarks import nixl_push, pushing
from benchmarks.options import Options, alone
from benchmarks.process import Remote
from benchmarks.rows import Row, free_port, row
from benchmarks.work import ORDERS, Work

PAUSE = 0.0005
"""How often a receiver looks for the end of a transfer that is timed."""


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

    def watch(self) -> dict[str, float]:
        """Make two transfers: "GIL" and "CPU" of either side, as :func:`benchmarks.gil.watch` takes them."""
        return {}

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

    def close(self) -> None:
        """Nothing is open."""


class Pair(Runner):
    """Two processes."""

    sender: Remote
    receiver: Remote

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
        self.number += 1
        self.announce()
        self.receiver.tell("report", self.number, PAUSE)
        ready = self.sender.ask("seal", self.number, PAUSE)
        reported = self.receiver.answer()
        self.conclude()
        return float(reported - ready) / 1e9

    def watch(self) -> dict[str, float]:
        taken = {}
        for sender, receiver in (("GIL", "CPU"), ("CPU", "GIL")):
            self.number += 1
            self.receiver.tell("watch", self.number, receiver == "GIL", *self.place())
            taken[f"{sender} sender"] = float(self.sender.ask("watch", self.number, sender == "GIL"))
            taken[f"{receiver} receiver"] = float(self.receiver.answer())
        return taken

    def place(self) -> tuple[int, ...]:
        """What the receiver must know to ask the sender for a prompt."""
        return ()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class Push(Pair):
    """Ours."""

    engine = "pushkv"
    sides: tuple[type[pushing.Sender], type[pushing.Receiver]] = pushing.Sender, pushing.Receiver

    def __init__(self, work: Work, provider: str, library: Path | None) -> None:
        super().__init__(work)
        self.provider = provider
        self.port = free_port()
        self.sender = Remote(self.sides[0], "sender", provider, library, self.port, work)
        self.receiver = Remote(self.sides[1], "receiver", provider, library, free_port(), work)
        self.versions = {"libfabric": self.sender.ask("versions")}

    def announce(self) -> None:
        self.sender.ask("offer", self.number)
        self.receiver.ask("receive", [self.number], self.port)
        time.sleep(pushing.LEAD_SECONDS)

    def conclude(self) -> None:
        self.sender.ask("finish", self.number)

    def place(self) -> tuple[int, ...]:
        return (self.port,)

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


def measure(options: Options) -> list[Row]:
    """Every engine, in every order."""
    work = Work(options.tokens)
    runners: list[Runner] = []
    try:
        runners.append(Copy(work))
        for provider in options.providers:
            runners.append(Push(work, provider, options.libfabric))
        version = nixl_push.version()
        if version is None:
            options.say(nixl_push.INSTALL)
        else:
            runners.append(Nixl(work, version))
            runners[-1].turn(False)
        return [each for order in ORDERS for each in _measure(runners, order, options)]
    finally:
        for runner in runners:
            runner.close()


def _measure(runners: list[Runner], order: str, options: Options) -> list[Row]:
    writes: dict[Runner, int] = {}
    times: dict[Runner, list[float]] = {runner: [] for runner in runners}
    watched: dict[Runner, list[dict[str, float]]] = {runner: [] for runner in runners}
    for repeat in range(options.repeats + 1):
        for runner in runners:
            runner.turn(True)
            if not repeat:
                writes[runner] = runner.prepare(order)
            else:
                times[runner].append(runner.run())
                watched[runner].append(runner.watch())
            runner.turn(False)
    options.say(f"whole prompts, {order}: done")
    rows = []
    for runner in runners:
        common: dict[str, Any] = {
            "order": order,
            "tokens": runner.work.tokens,
            "size": runner.work.bytes,
            "versions": runner.versions,
        }
        held, used = (_longer(watched[runner], what) for what in ("GIL", "CPU"))
        rows.append(
            row(
                "transfer",
                runner.engine,
                runner.provider,
                writes=writes[runner],
                seconds=times[runner],
                rate=True,
                gil_ms=held,
                **common,
            )
        )
        if used:
            seconds = [each / 1e3 for each in used]
            rows.append(row("CPU time of Python's threads", runner.engine, runner.provider, seconds=seconds, **common))
    return rows


def _longer(watched: list[dict[str, float]], what: str) -> list[float]:
    """The values of the side with the larger median."""
    sides = [[each[key] for each in watched] for key in watched[0] if key.startswith(what)]
    return max(sides, key=statistics.median, default=[])


if __name__ == "__main__":
    alone(measure)
