"""The engine with CUDA caches: nothing goes out before the device says so; and what a network without CUDA is told."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from gpu_compat import CudaAccelerator
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.directory import Directory
from neuron_pushkv.engine import PushEngine
from neuron_pushkv.errors import FabricError
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.choosing import open_transport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from neuron_pushkv.wire import Rank
from tests.engine.conftest import free_port
from tests.engine.sides import BLANK, BLOCK_BYTES, BLOCK_SIZE, BLOCKS, LAYERS, MODEL, Side, until
from tests.fakes.cuda import Open

CACHE_BYTES = LAYERS * BLOCKS * BLOCK_BYTES


class CudaSide(Side):
    """An engine whose cache is a slab of the stand-in's memory, registered like any tensor of torch's."""

    def __init__(self, name: str, transport: Transport, accelerator: CudaAccelerator) -> None:
        slab = accelerator.allocate(CACHE_BYTES)
        memory = accelerator.describe(slab.address, slab.length)
        regions = tuple(
            Region(
                f"layer.{layer}", "kv", 0, slab.address + layer * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, 0, 0, BLOCK_BYTES
            )
            for layer in range(LAYERS)
        )
        self.name = name
        self.cache = (ctypes.c_char * CACHE_BYTES).from_address(slab.address)
        ctypes.memset(slab.address, BLANK, CACHE_BYTES)
        self.settings = ConnectorSettings.model_validate({"port": free_port()})
        self.transport = transport
        incarnation = secrets.randbits(64)
        here = (self.settings.host, self.settings.port)
        self.directory = Directory(self.settings, engine_id=name, incarnation=incarnation, port=here[1], ranks=1)
        self.engine = PushEngine(
            settings=self.settings,
            engine_id=name,
            incarnation=incarnation,
            rank=Rank(),
            model=MODEL,
            layout=Layout("test", BLOCKS, (Group(BLOCK_SIZE),), regions),
            memory=[memory],
            transport=transport,
            accelerator=accelerator,
            directory=here,
        )
        self.finished, self.failed, self.freed = [], [], []
        self.stats, self.gauges = {}, {}


@pytest.fixture
def new_side() -> Iterator[Callable[[str, CudaAccelerator], CudaSide]]:
    network = LoopbackNetwork(unordered=True, seed=1)
    sides: list[CudaSide] = []

    def make(name: str, accelerator: CudaAccelerator) -> CudaSide:
        sides.append(CudaSide(name, network.transport(), accelerator))
        return sides[-1]

    yield make
    for side in sides:
        side.close()


@pytest.mark.parametrize("writes", [1, 0])
def test_writes_are_held_back_until_the_stream_has_got_there(
    start: Open, new_side: Callable[[str, CudaAccelerator], CudaSide], writes: int
) -> None:
    accelerator, cuda = start(writes=writes)
    sender, receiver = new_side("sender", accelerator), new_side("receiver", accelerator)
    blocks, into = [3, 4, 5, 9], [7, 20, 21, 2]
    cuda.launch()  # The forward pass.
    sender.prefill("p", prompt=1, tokens=64, blocks=blocks)
    receiver.receive("d", prompt=1, tokens=64, blocks=into, sender=sender)
    until(lambda: held(sender), "the sender has handed its writes over")
    for _ in range(50):
        sender.step()
        receiver.step()
    assert held(sender)
    assert receiver.blank(into)
    assert "d" not in receiver.finished
    cuda.finish()
    assert receiver.await_report("d")
    assert receiver.holds(1, into)
    assert receiver.others_blank(into)
    assert cuda.counts()["depth"] == 0


def held(side: Side) -> bool:
    """Whether writes wait in the transport."""
    return any(peer.tasks for peer in side.transport._peers.values())  # type: ignore[attr-defined]


def test_a_network_that_copies_with_the_cpu_is_refused(start: Open) -> None:
    accelerator, _ = start()
    memory = accelerator.allocate(1 << 20)
    settings = ConnectorSettings.model_validate({"provider": "tcp", "transport": "fabric"})
    with (
        pytest.raises(FabricError, match="cuda memory"),
        closing(open_transport(settings, accelerator, [memory])) as tcp,
    ):
        tcp.register(memory)
