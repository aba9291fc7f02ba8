"""What it costs to meet a peer does not depend on the size of its cache."""

from __future__ import annotations

import ctypes
import mmap
import secrets
import threading
from collections.abc import Callable, Iterator

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.directory import Directory
from neuron_pushkv.engine import PushEngine
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.orders import Offer, Ready, StepOrders
from neuron_pushkv.peers.link import Link
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from neuron_pushkv.wire import Rank
from tests.engine.conftest import free_port
from tests.engine.sides import MODEL, content, order, until

REGIONS = 128
BLOCK_BYTES = 16


class Vast:
    """An engine whose cache has 128 regions of very many blocks, next to none of which is ever touched."""

    def __init__(self, name: str, blocks: int, transport: Transport) -> None:
        self.blocks = blocks
        size = REGIONS * blocks * BLOCK_BYTES
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        regions = tuple(
            Region(f"model.layers.{number}", "kv", 0, base + place, BLOCK_BYTES, 0, 0, BLOCK_BYTES)
            for number, place in enumerate(range(0, REGIONS * blocks * BLOCK_BYTES, blocks * BLOCK_BYTES))
        )
        self.settings = ConnectorSettings(port=free_port(), smallest_write_bytes=BLOCK_BYTES)
        incarnation = secrets.randbits(64)
        self.directory = Directory(
            self.settings, engine_id=name, incarnation=incarnation, port=self.settings.port, ranks=1
        )
        self.engine = PushEngine(
            settings=self.settings,
            engine_id=name,
            incarnation=incarnation,
            rank=Rank(),
            model=MODEL,
            layout=Layout("test", blocks, (Group(16),), regions),
            memory=[Memory(base, size)],
            transport=transport,
            accelerator=HostAccelerator(),
            directory=(self.settings.host, self.settings.port),
        )

    def step(self, orders: StepOrders | None = None, ready: tuple[Ready, ...] = ()) -> frozenset[str]:
        """What has been received since the last one."""
        self.engine.begin_step(orders or StepOrders())
        self.engine.advance(ready)
        results = self.engine.take_results()
        self.engine.end_step()
        assert not results.failed
        return results.finished

    def block(self, region: int, block: int) -> slice:
        """Its place in the memory."""
        start = (region * self.blocks + block) * BLOCK_BYTES
        return slice(start, start + BLOCK_BYTES)

    def close(self) -> None:
        self.engine.close()
        self.directory.close()


@pytest.fixture
def new_pair(network: LoopbackNetwork) -> Iterator[Callable[[int], tuple[Vast, Vast]]]:
    made: list[Vast] = []

    def make(blocks: int) -> tuple[Vast, Vast]:
        made.extend(Vast(f"{name}-{blocks}", blocks, network.transport()) for name in ("sender", "receiver"))
        return made[-2], made[-1]

    yield make
    for side in made:
        side.close()


def first_transfer(sender: Vast, receiver: Vast) -> None:
    """Two strangers meet, and the first and last block of a prompt's two arrive in all regions."""
    source, target = [0, sender.blocks - 1], [receiver.blocks - 1, 0]
    for region in range(REGIONS):
        for number, block in enumerate(source):
            sender.memory[sender.block(region, block)] = bytes([region, number + 1]) * (BLOCK_BYTES // 2)
    sender.step(StepOrders(offers=(Offer("p", "t", content(1, 32), 1),)), (Ready("p", 32, (tuple(source),)),))
    receiver.step(StepOrders(receives=(order("d", 1, 32, target, sender.settings, "t"),)))
    until(lambda: "d" in receiver.step(), "the first transfer")
    for region in range(REGIONS):
        for number, block in enumerate(target):
            assert receiver.memory[receiver.block(region, block)] == bytes([region, number + 1]) * (BLOCK_BYTES // 2)


def test_meeting_a_peer_with_a_vast_cache(
    new_pair: Callable[[int], tuple[Vast, Vast]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F17: with 1,000,000 blocks as many bytes are exchanged as with 1,000, a fixed number for each region."""
    lock, exchanged = threading.Lock(), 0
    received = Link.data_received

    def counted(self: Link, data: bytes) -> None:
        nonlocal exchanged
        with lock:
            exchanged += len(data)
        received(self, data)

    monkeypatch.setattr(Link, "data_received", counted)
    sizes = []
    for blocks in (1_000, 1_000_000):
        sender, receiver = new_pair(blocks)
        exchanged = 0
        first_transfer(sender, receiver)
        sizes.append(exchanged)
        writes = sender.engine._transport.counters().writes
        assert writes == 2 * REGIONS
    small, vast = sizes
    # Addresses and counts are longer numbers; pings may come in between.
    assert vast < small + 2 * 16 * REGIONS
    assert vast < 2 * 128 * REGIONS
