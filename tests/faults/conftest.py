"""Engines over the loopback transport, and engines in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from tests.engine.conftest import free_port
from tests.engine.sides import Side

from .side_process import RemoteSide


@pytest.fixture
def network() -> LoopbackNetwork:
    """What joins the transports of one test."""
    return LoopbackNetwork(unordered=True, seed=11)


@pytest.fixture
def new_side(network: LoopbackNetwork) -> Iterator[Callable[..., Side]]:
    """Makes engines; ends them all. Keywords but for ``transport`` are settings."""
    sides: list[Side] = []

    def make(name: str, *, transport: Transport | None = None, **settings: object) -> Side:
        chosen = ConnectorSettings.model_validate({"port": free_port(), **settings})
        sides.append(Side(name, transport or network.transport(), chosen))
        return sides[-1]

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
def new_process() -> Iterator[Callable[..., RemoteSide]]:
    """Makes engines in processes of their own; kills them all."""
    processes: list[RemoteSide] = []

    def make(name: str, port: int | None = None, **options: object) -> RemoteSide:
        processes.append(RemoteSide(name, port or free_port(), **options))  # type: ignore[arg-type]
        return processes[-1]

    yield make
    for process in processes:
        process.kill()
