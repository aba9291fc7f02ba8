"""Measures the fabric transport between two processes of this machine: writes per second, bytes per second, idle cost.

    python benchmarks/transport.py tcp shm

The receiving process does nothing but count. Each figure is the best and the median of several rounds, so that what
else runs on the machine shows as the difference between them.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from neuron_pushkv.device.base import Memory
from neuron_pushkv.transport.base import Product, Span, SpanTable, Written, immediate
from neuron_pushkv.transport.fabric import FabricTransport

SIZES = ((4096, 16384), (65536, 2048), (1 << 20, 128))
"""Bytes per write, and writes per round."""
ROUNDS = 9
BUFFER = 128 << 20
QUIET_SECONDS = 3.0


class End:
    """One process's end: a transport, a buffer, an endpoint."""

    def __init__(self, provider: str, library: Path | None) -> None:
        self.transport = FabricTransport(provider, library)
        self.buffer = (ctypes.c_ubyte * BUFFER)()
        self.start = ctypes.addressof(self.buffer)
        ctypes.memset(self.start, 1, BUFFER)
        self.registration = self.transport.register(Memory(self.start, BUFFER))
        self.peer = self.transport.open_peer()

    def cpu(self, seconds: float) -> float:
        """Per cent of one core that this process uses while nobody asks it for anything."""
        before, began = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return 100 * (time.process_time() - before) / (time.monotonic() - began)


def receive(pipe: Connection, provider: str, library: Path | None) -> None:
    """The other process."""
    end = End(provider, library)
    pipe.send((end.transport.address(end.peer), end.registration.description))
    end.transport.connect(end.peer, pipe.recv())
    end.transport.expect(0, 0)
    pipe.send(None)
    pipe.recv()
    pipe.send(end.cpu(QUIET_SECONDS))
    end.transport.forget(0)
    pipe.send(end.cpu(QUIET_SECONDS))
    pipe.recv()
    end.transport.close()


def measure(provider: str, library: Path | None) -> None:
    """One provider, one table."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=receive, args=(theirs, provider, library))
    other.start()
    end = End(provider, library)
    address, description = pipe.recv()
    end.transport.connect(end.peer, address)
    pipe.send(end.transport.address(end.peer))
    pipe.recv()
    print(f"{provider} ({end.transport.library}, {end.transport.provider})")
    spans = SpanTable([Span(end.registration, end.start, end.transport.attach(end.peer, description), 0)])
    one = Product(spans, np.array([(0, 0, 8)], dtype=np.uint64))
    for _ in range(200):
        end.transport.write(end.peer, [one], immediate(0, 0))
        end.transport.poll(5)
    times = []
    for _ in range(500):
        began = time.perf_counter()
        end.transport.write(end.peer, [one], immediate(0, 0))
        end.transport.poll(5)
        times.append(time.perf_counter() - began)
    print(f"  one write of 8 bytes, from the call to its event: median {statistics.median(times) * 1e6:.0f} us")
    for size, count in SIZES:
        places = np.arange(count, dtype=np.uint64) * np.uint64(size) % np.uint64(BUFFER)
        product = Product(spans, np.stack([places, places, np.full_like(places, size)], axis=1))
        times, calls = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            ticket = end.transport.write(end.peer, [product], immediate(0, 0))
            calls.append(time.perf_counter() - began)
            while Written(ticket.id) not in end.transport.poll(5):
                pass
            times.append(time.perf_counter() - began)
        best, middle = min(times), statistics.median(times)
        print(
            f"  {size:>8} bytes x {count:>5}: "
            f"best {count / best:>9,.0f} writes/s {count * size / best / 1e9:5.2f} GB/s, "
            f"median {count / middle:>9,.0f} writes/s {count * size / middle / 1e9:5.2f} GB/s, "
            f"call {statistics.median(calls) * 1e6:.0f} us"
        )
    pipe.send(None)
    ours = end.cpu(QUIET_SECONDS)
    expecting = pipe.recv()
    idle = pipe.recv()
    print(f"  CPU of a core: sender idle {ours:.2f} %, receiver expecting {expecting:.2f} %, idle {idle:.2f} %")
    pipe.send(None)
    other.join()
    end.transport.close()


if __name__ == "__main__":
    chosen = [argument for argument in sys.argv[1:] if "/" not in argument]
    path = next((Path(argument) for argument in sys.argv[1:] if "/" in argument), None)
    for name in chosen or ["tcp", "shm"]:
        measure(name, path)
