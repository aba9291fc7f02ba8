"""The questions, each as a function of both sides that returns its answer and the evidence for it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.first_hour.channel import Channel
from benchmarks.first_hour.ends import BACK, FENCED, THERE, End, Said, pattern
from neuron_pushkv.device.base import MemoryKind
from neuron_pushkv.errors import PushKVError
from neuron_pushkv.transport.base import Failed, Written

Answer: TypeAlias = tuple[Any, dict[str, Any]]


class Skipped(Exception):
    """This machine can't answer; says why."""


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    rounds: int
    bandwidth_bytes: int
    registered_bytes: int
    endpoints: int
    cut_off_bytes: int


@dataclass(frozen=True)
class Both:
    """This side, and the way to the other."""

    end: End
    other: Channel
    scale: Scale

    def meet(self, here: list[str] | None = None, there: list[str] | None = None, flush: bool | None = None) -> Any:
        """Open and connect both sides; what was opened here."""
        theirs = self.other.ask("open", nics=there, flush=flush)
        ours = self.end.open(here, flush)
        self.other.start("connect", address=ours["address"], description=ours["description"])
        self.end.connect(theirs["address"], theirs["description"])
        self.other.finish()
        return ours


def what_is_here(both: Both) -> Answer:
    """What do the two machines have?"""
    opened = both.meet()
    told = {name: opened[name] for name in ("library", "provider", "nics", "announces_arrivals", "takes_dmabufs")}
    return opened["provider"], {"here": both.end.about() | told, "there": both.other.ask("about")}


def dmabuf(both: Both) -> Answer:
    """Can the device's memory be registered by a descriptor (dmabuf) with the installed runtime and driver?"""
    end = both.end
    if end.memory.kind is MemoryKind.HOST:
        raise Skipped("host memory is registered by its address")
    exported = end.accelerator.export(end.memory)
    if exported is None:
        return False, {"export": "the runtime gave none"}
    os.close(exported.fd)
    said = Said()
    opened = end.open()
    by_address = [text for text in said.texts if "not registered by descriptors" in text]
    evidence = {"export_offset": exported.offset, "takes_dmabufs": opened["takes_dmabufs"], "refused": by_address}
    return bool(opened["takes_dmabufs"]) and not by_address, evidence


def registration_time(both: Both) -> Answer:
    """How long does registering take, up to all of the memory that a KV cache may have?"""
    end = both.end
    end.open()
    steps: list[dict[str, Any]] = []
    size = end.settings.size
    while size <= both.scale.registered_bytes:
        try:
            memory = end.accelerator.allocate(size)
        except PushKVError as error:
            steps.append({"bytes": size, "stopped": str(error)})
            break
        try:
            began = time.perf_counter()
            registration = end.open_transport.register(memory)
            seconds = time.perf_counter() - began
            keys = (len(registration.description) - 24) // 8
            parts = keys // len(end.open_transport.core.facts.nics)
            began = time.perf_counter()
            end.open_transport.deregister(registration)
            undone = time.perf_counter() - began
            steps.append({"bytes": size, "seconds": seconds, "parts": parts, "deregister_seconds": undone})
        except PushKVError as error:
            steps.append({"bytes": size, "stopped": str(error)})
            break
        finally:
            end.accelerator.free(memory)
        last = size == both.scale.registered_bytes
        size = size * 4 if last else min(size * 4, both.scale.registered_bytes)
    done = [step for step in steps if "seconds" in step]
    return (done[-1]["seconds"] if done else None), {"steps": steps}


def latency(both: Both) -> Answer:
    """How long does a write with its immediate take, from the call to the event at the other side?"""
    found: dict[str, Any] = {}
    for length in (8, 4096, 65536):
        if length > both.end.settings.size:
            continue
        times = []
        both.meet()
        both.other.start("echo", count=both.scale.rounds, length=length)
        for sent in range(1, both.scale.rounds + 1):
            began = time.perf_counter()
            both.end.write([(0, 0, length)], THERE)
            both.end.arrived(BACK, sent)
            times.append((time.perf_counter() - began) / 2)
        both.other.finish()
        kept = sorted(times[len(times) // 10 :])
        micro = {"p50_us": statistics.median(kept) * 1e6, "p99_us": kept[int(len(kept) * 0.99)] * 1e6}
        found[str(length)] = {name: round(value, 2) for name, value in micro.items()}
    return found["8"]["p50_us"], {"half_round_trip_by_bytes": found, "rounds": both.scale.rounds}


def bandwidth(both: Both) -> Answer:
    """What does each card carry by itself, and what do the device's own together?"""
    here, there = both.end.about(), both.other.ask("about")
    pairs: list[tuple[str, list[str] | None, list[str] | None]] = [("nearest", None, None)]
    if both.end.settings.provider.startswith("efa"):
        cards = zip(here["efa_nics"], there["efa_nics"], strict=False)
        pairs += [(f"{ours} to {theirs}", [ours], [theirs]) for ours, theirs in cards]
    found: dict[str, Any] = {}
    piece = min(1 << 20, both.end.settings.size)
    places = np.arange(both.end.settings.size // piece, dtype=np.uint64) * np.uint64(piece)
    runs = np.stack([places, places, np.full_like(places, piece)], axis=1)
    for name, ours, theirs in pairs:
        both.meet(ours, theirs)
        both.end.write(runs, THERE)
        both.end.until(Written)
        rounds = max(1, both.scale.bandwidth_bytes // both.end.settings.size)
        began = time.perf_counter()
        for _ in range(rounds):
            both.end.write(runs, THERE)
        for _ in range(rounds):
            both.end.until(Written)
        seconds = time.perf_counter() - began
        found[name] = round(rounds * len(runs) * piece / seconds / 1e9, 3)
    return found["nearest"], {"gb_per_s": found, "bytes_each": rounds * len(runs) * piece}


def flush(both: Both) -> Answer:
    """Must a received write be flushed before the device may be read?"""
    length, pieces = min(1 << 16, both.end.settings.size // 2), 16
    found: dict[str, Any] = {}
    for flushed in (False, True):
        both.meet(flush=flushed)
        both.other.start("watch", rounds=both.scale.rounds, length=length, pieces=pieces)
        size = length // pieces
        runs = [(place * size, place * size, size) for place in range(pieces)]
        for number in range(1, both.scale.rounds + 1):
            both.end.store(pattern(number, length))
            both.end.write(runs, THERE)
            both.end.arrived(BACK, number)
        found["with" if flushed else "without"] = both.other.finish()
    needed = found["without"]["wrong_rounds"] > 0
    note = "read back through the runtime's copies; what a kernel on the device sees may differ"
    return needed, {**found, "bytes_a_round": length, "note": note}


def closed_endpoint(both: Both) -> Answer:
    """How many bytes still land after the receiver has closed the endpoint, and how soon does the sender know?"""
    both.meet()
    end, size = both.end, both.end.settings.size
    end.store(np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8))
    piece = min(1 << 16, size // 4)
    numbers: NDArray[np.uint64] = np.arange(both.scale.cut_off_bytes // piece, dtype=np.uint64)
    # From and to ever other places, so that each write changes what is there.
    sources = numbers * np.uint64(4096 + 64) % np.uint64(size - piece)
    places = numbers % np.uint64(size // piece) * np.uint64(piece)
    runs = np.stack([sources, places, np.full_like(places, piece)], axis=1)
    both.other.start("cut_off", after=max(1, len(runs) // 20))
    ticket = end.write(runs, FENCED)
    began = time.perf_counter()
    event = end.until(Written, Failed)
    seconds = time.perf_counter() - began
    there = both.other.finish()
    if not isinstance(event, Failed):
        raise Skipped("everything was written before the endpoint was closed; give --cut-off-bytes a larger number")
    evidence = {"posted": ticket.writes, "written": event.written, "in_doubt": event.in_doubt}
    return there["bytes_changed_after_it"], {**there, **evidence, "sender_knew_after_seconds": seconds}


def endpoints(both: Both) -> Answer:
    """How many endpoints can be open at once, and how long does one take?"""
    end = both.end
    end.open()
    peers: list[int] = []
    why = "as many as were asked for"
    began = time.perf_counter()
    while len(peers) < both.scale.endpoints:
        try:
            peers.append(end.open_transport.open_peer())
        except PushKVError as error:
            why = str(error)
            break
    opened = time.perf_counter() - began
    began = time.perf_counter()
    for peer in peers:
        end.open_transport.fence(peer)
    closed = time.perf_counter() - began
    each = {"open_seconds_each": opened / max(1, len(peers)), "close_seconds_each": closed / max(1, len(peers))}
    return len(peers), {"stopped_by": why, "rails": len(end.open_transport.core.facts.nics), **each}


QUESTIONS: tuple[Callable[[Both], Answer], ...] = (
    what_is_here,
    dmabuf,
    registration_time,
    latency,
    bandwidth,
    flush,
    closed_endpoint,
    endpoints,
)
