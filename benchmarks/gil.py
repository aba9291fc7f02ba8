"""How long the GIL of a process is held: a thread that wants it every now and then counts how long it is kept waiting.

The thread sleeps for 50 us, again and again. A sleep ends with taking the GIL, so it lasts longer by as long as another
thread holds that. It also lasts longer where the thread has to wait for a CPU, which the kernel counts for each
thread (``schedstat``); that part is taken off, and so is what a sleep overruns by when the process is otherwise
idle (its median, taken first). What remains is summed over a transfer.

Holds shorter than the sleep are seen only when one ends during them, so what is reported leans to the low side by up to
half a sleep each, and to the high side by what little a wake-up now and then takes longer. The thread costs a few
per cent of a core: transfers that are watched are not the ones that are timed.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time

SLEEP_NS = 50_000
CALIBRATION = 400
_PR_SET_TIMERSLACK = 29


class Probe:
    """``start`` it before what is to be watched; ``stop`` returns milliseconds."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._calibrated = threading.Event()
        self._held_ns = 0

    def start(self) -> None:
        """Returns when the thread knows what a sleep takes while nothing goes on."""
        self._held_ns = 0
        self._stop.clear()
        self._calibrated.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._calibrated.wait()

    def stop(self) -> float:
        """Milliseconds for which the GIL was not to be had."""
        if self._thread is None:
            return 0.0
        self._stop.set()
        self._thread.join()
        self._thread = None
        return self._held_ns / 1e6

    def _watch(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        statistics_file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        try:
            usual = statistics.median(self._overrun(statistics_file) for _ in range(CALIBRATION))
            self._calibrated.set()
            while not self._stop.is_set():
                self._held_ns += max(0, round(self._overrun(statistics_file) - usual))
        finally:
            os.close(statistics_file)

    @staticmethod
    def _overrun(statistics_file: int) -> int:
        """Nanoseconds by which a sleep was too long for another reason than that there was no CPU to be had."""
        queued = int(os.pread(statistics_file, 100, 0).split()[1])
        began = time.monotonic_ns()
        time.sleep(SLEEP_NS / 1e9)
        queued -= int(os.pread(statistics_file, 100, 0).split()[1])
        return time.monotonic_ns() - began - SLEEP_NS + queued
