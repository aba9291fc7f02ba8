"""Pairs of engines over the loopback transport and over libfabric's tcp."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from neuron_pushkv.wire import Rank
from tests.layouts import Cache

from .hidden import HiddenAccelerator
from .ranks import Engine
from .sides import MODEL, Side

NewEngine: TypeAlias = Callable[..., Engine]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["loopback", "tcp"])
def new_transport(request: pytest.FixtureRequest) -> Callable[[], Transport]:
    """Makes transports that can reach each other."""
    if request.param == "loopback":
        return LoopbackNetwork().transport
    return lambda: FabricTransport(provider="tcp")


@pytest.fixture
def new_side(new_transport: Callable[[], Transport]) -> Iterator[Callable[..., Side]]:
    """Makes engines; ends them all. Keywords are settings, but for layout, model, transport and hidden."""
    sides: list[Side] = []

    def make(
        name: str,
        *,
        transport: Transport | None = None,
        layout: str = "test",
        model: str = MODEL,
        hidden: HiddenAccelerator | None = None,
        **settings: object,
    ) -> Side:
        side = Side(
            name,
            transport or new_transport(),
            ConnectorSettings.model_validate({"port": free_port(), **settings}),
            layout=layout,
            model=model,
            hidden=hidden,
        )
        sides.append(side)
        return side

    yield make
    for side in sides:
        side.close()


@pytest.fixture
def sender(new_side: Callable[..., Side]) -> Side:
    return new_side("sender")


@pytest.fixture
def receiver(new_side: Callable[..., Side]) -> Side:
    return new_side("receiver")


@pytest.fixture
def network() -> LoopbackNetwork:
    """Whose writes land in any order."""
    return LoopbackNetwork(unordered=True, seed=1)


@pytest.fixture
def new_engine(network: LoopbackNetwork) -> Iterator[NewEngine]:
    made: list[Engine] = []

    def make(
        name: str,
        caches: dict[Rank, Cache],
        transport: Callable[[], Transport] = network.transport,
        hidden: HiddenAccelerator | None = None,
        **changes: object,
    ) -> Engine:
        settings = ConnectorSettings.model_validate({"port": free_port(), "smallest_write_bytes": 0, **changes})
        made.append(Engine(name, caches, transport, settings, hidden))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def device() -> Iterator[HiddenAccelerator]:
    """A device; its steps are ready at once."""
    with_memory = HiddenAccelerator()
    yield with_memory
    with_memory.close()


@pytest.fixture
def other() -> Iterator[HiddenAccelerator]:
    """Another one."""
    with_memory = HiddenAccelerator()
    yield with_memory
    with_memory.close()


@pytest.fixture
def stepping() -> Iterator[HiddenAccelerator]:
    """One whose steps end when they are told to."""
    with_memory = HiddenAccelerator(held=True)
    yield with_memory
    with_memory.close()
