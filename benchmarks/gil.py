"""How long the GIL of a process is held: a thread that wants it every now and then counts how long it is kept waiting.

The thread sleeps for 50 us in a C function that has let the GIL go, and which notes the time when it wakes. The
function's return takes the GIL again, and the thread then notes the time once more: what lies between the two is how
long another thread kept it waiting (and 1 us or so of our own, which is measured first and taken off). That is
summed over a transfer.

Holds that begin and end while the thread sleeps are not seen, of others the first half a sleep on average. Where the
machine has no CPU for the thread when the GIL is free, that counts too. The thread costs a few per cent of a core:
transfers that are watched are not those that are timed.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from functools import cache
from typing import Any

from cffi import FFI

SLEEP_NS = 50_000
CALIBRATION = 400

_SOURCE = """
#include <stdint.h>
#include <time.h>
static int64_t sleep_and_look(int64_t nanoseconds) {
    struct timespec time = {0, nanoseconds};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, 0);
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}
"""


@cache
def _native() -> Any:
    """The C function, compiled for this run."""
    ffi = FFI()
    ffi.cdef("int64_t sleep_and_look(int64_t nanoseconds);")
    ffi.set_source("_gil_probe", _SOURCE)
    with tempfile.TemporaryDirectory() as folder:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location("_gil_probe", ffi.compile(tmpdir=folder))
        if spec is None or spec.loader is None:
            raise RuntimeError("the GIL probe's C function can't be loaded")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


class Probe:
    """``start`` it before what is to be watched; ``stop`` returns milliseconds."""

    def __init__(self) -> None:
        self._sleep = _native().lib.sleep_and_look
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._calibrated = threading.Event()
        self._held_ns = 0

    def start(self) -> None:
        """Returns when the thread knows what taking the GIL costs while nobody else wants it."""
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
        usual = round(statistics.median(self._wait() for _ in range(CALIBRATION)))
        self._calibrated.set()
        while not self._stop.is_set():
            self._held_ns += max(0, self._wait() - usual)

    def _wait(self) -> int:
        """Nanoseconds from the end of a sleep until the GIL was ours again."""
        woke: int = self._sleep(SLEEP_NS)
        return time.monotonic_ns() - woke
