"""What copies and ready words take on device 0, as JSON. ``python -m tests.gpu.measure``; about half a minute."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from gpu_compat import CudaAccelerator
from gpu_compat.context import Context
from gpu_compat.library import Library
from gpu_compat.steps import EventWords, Marker, StreamWords
from neuron_pushkv.device.base import Copies, Memory
from tests.gpu.hardware import Hardware, reached, until

MIB = 1 << 20
BULK = 256 * MIB
ROUNDS = 7
WORDS = 200


def seconds(action: Callable[[], object]) -> float:
    """The median of some runs, after one that isn't counted."""
    action()
    taken = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def rate(action: Callable[[], object], length: int = BULK) -> float:
    """Gigabytes (1e9) per second."""
    return round(length / seconds(action) / 1e9, 2)


def blocks(slab: Memory, host: NDArray[np.uint8], size: int) -> Copies:
    """All of ``host`` in blocks of that size, in random order on the device."""
    order = np.random.default_rng(1).permutation(BULK // size).astype(np.uint64)
    rows = np.full((len(order), 3), size, dtype=np.uint64)
    rows[:, 0] = slab.address + order * np.uint64(size)
    rows[:, 1] = host.ctypes.data + np.arange(len(order), dtype=np.uint64) * np.uint64(size)
    return rows


def copying(accelerator: CudaAccelerator, hardware: Hardware) -> dict[str, float]:
    """Rates, in GB/s."""
    slab, other = accelerator.allocate(BULK), accelerator.allocate(BULK)
    found = {}
    hosts = {"pinned": hardware.pinned(BULK), "pageable": np.zeros(BULK, dtype=np.uint8)}
    for name, host in hosts.items():
        for size, what in ((BULK, "256M"), (MIB, "1M"), (64 << 10, "64K"), (16 << 10, "16K")):
            rows = blocks(slab, host, size)
            found[f"DtoH {name} {what}"] = rate(lambda rows=rows: accelerator.read(rows))
            found[f"HtoD {name} {what}"] = rate(lambda rows=rows: accelerator.write(rows))
    found["DtoD 256M"] = rate(lambda: hardware.copy_within(other.address, slab.address, BULK))
    for memory in (slab, other):
        accelerator.free(memory)
    return found


def word_latency(marker: Marker, hardware: Hardware) -> dict[str, float]:
    """From the moment that the work before it may end to that at which a spinning reader sees the word, in µs."""
    waited, marking = [], []
    for _ in range(WORDS):
        hardware.block()
        begin = time.perf_counter()
        word = marker.mark(hardware.stream)
        marking.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        hardware.release()
        until(lambda word=word: reached(word), "the step is ready")
        waited.append(time.perf_counter() - begin)
    ordered = sorted(waited)
    return {
        "median": round(statistics.median(ordered) * 1e6, 1),
        "p99": round(ordered[int(0.99 * WORDS)] * 1e6, 1),
        "marking": round(statistics.median(marking) * 1e6, 1),
    }


def exporting(accelerator: CudaAccelerator) -> float | None:
    """Milliseconds for the descriptor of 1 GiB."""
    slab = accelerator.allocate(1 << 30)

    def export() -> None:
        dmabuf = accelerator.export(slab)
        assert dmabuf is not None
        os.close(dmabuf.fd)

    taken = round(seconds(export) * 1e3, 3) if accelerator.facts().dmabuf else None
    accelerator.free(slab)
    return taken


def main() -> None:
    """Print one JSON object."""
    accelerator, hardware = CudaAccelerator(0), Hardware()
    context = Context(Library(), 0)
    markers: dict[str, Marker] = {"event": EventWords(context, "measure")}
    if accelerator.facts().stream_writes:
        markers["stream write"] = StreamWords(context, "cuStreamWriteValue32_v2")
    found = {
        "facts": asdict(accelerator.facts()),
        "copies, GB/s": copying(accelerator, hardware),
        "ready word, us": {name: word_latency(marker, hardware) for name, marker in markers.items()},
        "dmabuf of 1 GiB, ms": exporting(accelerator),
    }
    for marker in markers.values():
        marker.close()
    context.close()
    accelerator.close()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
