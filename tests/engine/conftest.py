"""Pairs of engines over the loopback transport and over libfabric's tcp."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork

from .sides import MODEL, Side


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
    """Makes engines; ends them all. Keywords are settings, but for layout, model and transport."""
    sides: list[Side] = []

    def make(
        name: str, *, transport: Transport | None = None, layout: str = "test", model: str = MODEL, **settings: object
    ) -> Side:
        side = Side(
            name,
            transport or new_transport(),
            ConnectorSettings.model_validate({"port": free_port(), **settings}),
            layout=layout,
            model=model,
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
