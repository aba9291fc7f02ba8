"""How long the GIL of a process is held: a thread that wants it every now and then counts how long it is kept waiting.

    python -m benchmarks.gil

The thread stays in C, sleeps for 20 us without the GIL, notes the time, takes the GIL, notes the time again and lets it
go. Taking it lasts a tenth of a microsecond while nobody else has it; what is longer is how long it was kept waiting.

That sees nothing of what is held while the thread sleeps, so it is read as a clock would be that ticks as often as the
thread wakes (every 25 to 60 us): a tick at which the GIL was held by others stands for one period, and so does every
further period of the wait, less what it takes to wake a thread. On average that comes to the time for which the GIL was
held, however short or long the single holds were; for one transfer it is as exact as counting some ten ticks can be.
Run by itself this module holds the GIL for known times, and prints what the thread says of them.

The thread has real time priority where it may: it would otherwise sleep on while the holder has its CPU, and see too
little. And while it watches, Python's threads have one CPU for themselves and native threads the others, because a
holder whose CPU is taken from it holds the GIL for as long as that lasts, which says more of the machine than of the
holder. Transfers that are watched are therefore not those that are timed, and of the
two sides one is watched at a time; at the other one, the CPU time of Python's threads is taken for comparison.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.native import native

SLEEP_NS = 20_000
ROOM = 1_000_000
"""Ticks, enough for half a minute."""
NOTICEABLE_NS = 3_000
"""A wait that is this much longer than usual is somebody's holding; cold caches alone make it one or two longer."""
WAKE_NS = 50_000
"""How long a thread may take to run again once the GIL is its own, in a virtual machine."""
SHOWN = ((10, 100), (30, 100), (100, 50), (1000, 10))
"""Microseconds, and how many times."""


ALLOWED_CPUS = os.sched_getaffinity(0)


class Probe:
    """``start`` it before what is to be watched; ``stop`` returns milliseconds."""

    def __init__(self) -> None:
        module = native()
        self._library = module.lib
        self._stop = module.ffi.new("int *")
        self._waits = module.ffi.new("int64_t[]", ROOM)
        self._count = 0
        self._thread: threading.Thread | None = None
        self._running = threading.Event()
        self._began = 0

    def start(self) -> None:
        """Watch from now on."""
        self._stop[0] = 0
        _separate(True)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._running.clear()
        self._thread.start()
        self._running.wait()

    def stop(self) -> float:
        """Milliseconds for which the GIL was not to be had."""
        if self._thread is None:
            return 0.0
        self._stop[0] = 1
        self._thread.join()
        self._thread = None
        _separate(False)
        waits = self._waits[0 : self._count]
        usual = statistics.median(waits)
        held = [wait for wait in waits if wait > usual + NOTICEABLE_NS]
        period = (time.monotonic_ns() - self._began - sum(held)) / len(waits)
        return float(sum(period * (1 + max(0, wait - WAKE_NS) // period) for wait in held)) / 1e6

    def _watch(self) -> None:
        """The thread; it inherits the CPU of the one that started it."""
        self._began = time.monotonic_ns()
        self._running.set()
        self._count = self._library.take_gil_now_and_then(SLEEP_NS, self._stop, self._waits, ROOM)


def cpu_ms() -> float:
    """CPU time of this process's Python threads so far: more than they have held the GIL for, if little was waited for.

    It counts what they do without the GIL too (system calls, mostly), but not what others do to them.
    """
    ours = [thread.native_id for thread in threading.enumerate()]
    used = 0
    for task in ours:
        with contextlib.suppress(FileNotFoundError):
            used += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0])
    return used / 1e6


def watch(transfer: Callable[[], object], *, probed: bool) -> float:
    """Milliseconds for which the GIL was held during a transfer, or else the CPU time of Python's threads in it."""
    if not probed:
        before = cpu_ms()
        transfer()
        return cpu_ms() - before
    probe = Probe()
    probe.start()
    transfer()
    return probe.stop()


def _separate(apart: bool) -> None:
    """Keep Python's threads on one CPU and all others away from it, or let all of them go anywhere."""
    first = {min(ALLOWED_CPUS)}
    ours = {thread.native_id for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        place = (
            ALLOWED_CPUS
            if not apart or len(ALLOWED_CPUS) == 1
            else first
            if int(task.name) in ours
            else ALLOWED_CPUS - first
        )
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), place)


def show() -> None:
    """Hold the GIL for known times and print what the probe says of them."""
    probe = Probe()
    for microseconds, count in SHOWN:
        seen = []
        for _ in range(7):
            probe.start()
            for _ in range(count):
                end = time.perf_counter_ns() + microseconds * 1000
                while time.perf_counter_ns() < end:
                    pass
                time.sleep(0.002)
            seen.append(probe.stop())
        print(
            f"{count} x {microseconds} us: {count * microseconds / 1e3:.1f} ms, seen {statistics.median(seen):.1f} ms"
        )


if __name__ == "__main__":
    show()
