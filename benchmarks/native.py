"""C functions of a few lines that benchmarks need, compiled when the first of them is asked for."""

from __future__ import annotations

import tempfile
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from cffi import FFI

_DECLARATIONS = """
int64_t take_gil_now_and_then(int64_t sleep_ns, int *stop, int64_t *waits, int64_t room);
double core_to_core(int64_t rounds);
void copy_rows(const uint64_t *rows, int64_t count, int to_host);
"""

_SOURCE = """
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Until *stop, but once at least, sleep and then take the GIL: how long each taking took, in nanoseconds. Returns how
 * many there were. */
static int64_t take_gil_now_and_then(int64_t sleep_ns, int *stop, int64_t *waits, int64_t room) {
    struct timespec time = {0, sleep_ns};
    struct sched_param urgent = {.sched_priority = 1};
    int64_t count = 0;

    prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0); /* or a sleep is 50 us longer than asked for */
    pthread_setschedparam(pthread_self(), SCHED_FIFO, &urgent); /* where we may not, we go without */
    do {
        clock_nanosleep(CLOCK_MONOTONIC, 0, &time, 0);
        int64_t woke = now();
        PyGILState_STATE state = PyGILState_Ensure();
        waits[count++] = now() - woke;
        PyGILState_Release(state);
    } while (!__atomic_load_n(stop, __ATOMIC_ACQUIRE) && count < room);
    return count;
}

/* Rows of (device's address, host's address, bytes). */
static void copy_rows(const uint64_t *rows, int64_t count, int to_host) {
    for (const uint64_t *row = rows; row < rows + 3 * count; row += 3)
        memcpy((void *)row[to_host], (const void *)row[!to_host], row[2]);
}

struct court { _Alignas(128) atomic_llong ball; int64_t rounds; cpu_set_t place; };

static void *other_side(void *argument) {
    struct court *court = argument;
    pthread_setaffinity_np(pthread_self(), sizeof court->place, &court->place);
    for (int64_t i = 0; i < court->rounds; i++) {
        while (atomic_load_explicit(&court->ball, memory_order_acquire) != 2 * i + 1)
            ;
        atomic_store_explicit(&court->ball, 2 * i + 2, memory_order_release);
    }
    return 0;
}

/* Nanoseconds that a cache line takes from one of this process's first two CPUs to the other; 0 if it has only one. */
static double core_to_core(int64_t rounds) {
    struct court court = {.rounds = rounds};
    cpu_set_t before, mine;
    pthread_t thread;
    int found = 0;

    sched_getaffinity(0, sizeof before, &before);
    CPU_ZERO(&mine);
    CPU_ZERO(&court.place);
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, found++ ? &court.place : &mine);
    if (found < 2 || pthread_create(&thread, 0, other_side, &court))
        return 0;
    pthread_setaffinity_np(pthread_self(), sizeof mine, &mine);
    int64_t began = now();
    for (int64_t i = 0; i < rounds; i++) {
        atomic_store_explicit(&court.ball, 2 * i + 1, memory_order_release);
        while (atomic_load_explicit(&court.ball, memory_order_acquire) != 2 * i + 2)
            ;
    }
    double took = (double)(now() - began);
    pthread_join(thread, 0);
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
    return took / (double)rounds / 2;
}
"""


@cache
def native() -> Any:
    """``lib`` has the functions, each of which lets the GIL go while it runs; ``ffi`` makes what they take."""
    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    ffi.set_source("_benchmark_native", _SOURCE, extra_compile_args=["-O2", "-pthread"], extra_link_args=["-pthread"])
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_from_file_location("_benchmark_native", ffi.compile(tmpdir=folder))
        if spec is None or spec.loader is None:
            raise RuntimeError("the benchmarks' C functions can't be loaded")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
