"""An engine with its cache in device memory of the stand-in for libnrt: commands from stdin, a line for each.

The runtime is loaded first, then libfabric, as it must be. Nothing here touches the cache but the accelerator.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import numpy as np

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.neuron import NeuronAccelerator
from neuron_pushkv.directory import Directory
from neuron_pushkv.engine import PushEngine, Results
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.orders import Ready, StepOrders
from neuron_pushkv.transport.choosing import open_transport
from neuron_pushkv.wire import Rank

from .sides import BLANK, BLOCK_BYTES, BLOCK_SIZE, BLOCKS, LAYERS, MODEL, Side, order, pattern

SLAB = 2 * BLOCKS * BLOCK_BYTES
"""Bytes of a slab, which two layers share."""


class NeuronSide(Side):
    """As its base, with layers in two slabs of device memory."""

    def __init__(self, name: str, settings: ConnectorSettings, accelerator: NeuronAccelerator) -> None:
        self.name, self.settings, self.accelerator = name, settings, accelerator
        self.slabs = [accelerator.allocate(SLAB) for _ in range(LAYERS // 2)]
        self._blank(self.slabs)
        regions = tuple(
            Region(f"layer.{layer}", "kv", 0, self._address(layer, 0), BLOCK_BYTES, 0, 0, BLOCK_BYTES)
            for layer in range(LAYERS)
        )
        self.transport = open_transport(settings, accelerator, self.slabs)
        incarnation = secrets.randbits(64)
        self.directory = Directory(settings, engine_id=name, incarnation=incarnation, port=settings.port, ranks=1)
        self.engine = PushEngine(
            settings=settings,
            engine_id=name,
            incarnation=incarnation,
            rank=Rank(),
            model=MODEL,
            layout=Layout("test", BLOCKS, (Group(BLOCK_SIZE),), regions),
            memory=[accelerator.describe(slab.address, slab.length) for slab in self.slabs],
            transport=self.transport,
            accelerator=accelerator,
            directory=(settings.host, settings.port),
        )
        self.finished, self.failed, self.freed = [], [], []
        self.stats, self.gauges = {}, {}
        self.steps = 0

    def step(self, orders: StepOrders | None = None, ready: tuple[Ready, ...] = ()) -> Results:
        """As under vLLM without asynchronous scheduling: when a step begins, the outputs of all before it are there."""
        self.steps += 1
        self.accelerator.begin_step(self.steps, self.steps - 1)
        return super().step(orders, ready)

    def idle_step(self) -> None:
        """One that has nothing to say."""
        self.step()

    def _address(self, layer: int, block: int) -> int:
        return self.slabs[layer // 2].address + (layer % 2 * BLOCKS + block) * BLOCK_BYTES

    def _blank(self, slabs: list[Any]) -> None:
        filler = ctypes.create_string_buffer(bytes([BLANK]) * SLAB, SLAB)
        rows = [(slab.address, ctypes.addressof(filler), SLAB) for slab in slabs]
        self.accelerator.write(np.array(rows, dtype=np.uint64))

    def fill(self, prompt: int, blocks: list[int], first: int = 0) -> None:
        for index, block in enumerate(blocks, first):
            for layer in range(LAYERS):
                content = ctypes.create_string_buffer(pattern(prompt, layer, index), BLOCK_BYTES)
                row = (self._address(layer, block), ctypes.addressof(content), BLOCK_BYTES)
                self.accelerator.write(np.array([row], dtype=np.uint64))

    def _block(self, layer: int, block: int) -> memoryview:
        content = ctypes.create_string_buffer(BLOCK_BYTES)
        row = (self._address(layer, block), ctypes.addressof(content), BLOCK_BYTES)
        self.accelerator.read(np.array([row], dtype=np.uint64))
        return memoryview(content).cast("B")

    def ask(self, request: str, prompt: int, tokens: int, blocks: list[int], port: int) -> None:
        sender = ConnectorSettings(port=port)
        self.step(StepOrders(receives=(order(request, prompt, tokens, blocks, sender, "t"),)))

    def links(self) -> int:
        """How many peers are connected."""
        return len(self.engine._contacts.links)

    def about(self) -> dict[str, Any]:
        """What a test wants to know of the process."""
        facts = self.accelerator.facts()
        return {
            "kinds": sorted({f"{slab.kind}/{'mapped' if slab.mapped else 'unmapped'}" for slab in self.slabs}),
            "hint": facts.hint,
            "initialised_here": facts.initialised_here,
            "flushes": self.transport.counters().extra.get("flushes"),
        }

    def close(self) -> None:
        super().close()
        self.accelerator.close()


def answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ.update(options["environment"])
    accelerator = NeuronAccelerator(0, Path(options["library"]))
    settings = ConnectorSettings(port=options["port"], provider="tcp")
    with NeuronSide(options["name"], settings, accelerator) as side:
        answer("ready")
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            answer(getattr(side, command)(*arguments))
    answer(ctypes.CDLL(options["library"]).fake_tensors())


if __name__ == "__main__":
    main()
