from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv.fabric import discovery
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fates import Delay, Depth, Reorder
from neuron_pushkv.transport.faults import FaultyTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from neuron_pushkv.transport.nixl.agent import PACKAGES
from tests.transport.side import FarSide, NearSide, Options, Window, open_transport

FIND_SYSTEM_LIBRARY = """
import ctypes
ctypes.CDLL("libfabric.so.1")
print(next(line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/libfabric.so.1" in line))
"""

OTHER_LIBRARY = "PUSHKV_TEST_OTHER_LIBRARY"
"""Path of a second libfabric, in the process that runs this folder again over that: a process can have only one."""


@cache
def system_library() -> Path | None:
    """The loader's libfabric; looked for in another process, because loading it is for good."""
    found = subprocess.run([sys.executable, "-c", FIND_SYSTEM_LIBRARY], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else None


@cache
def first_library() -> Path:
    """What this process runs the tests over: what it has loaded already, or else the wheel's, or else the system's."""
    if OTHER_LIBRARY in os.environ:
        return Path(os.environ[OTHER_LIBRARY])
    path = discovery.loaded() or discovery.in_wheel() or system_library()
    if path is None:
        pytest.skip("needs a libfabric: pip install mpich, or apt-get install libfabric1")
    return path


@cache
def second_library() -> Path:
    """The other one of the wheel's and the system's."""
    for path in (discovery.in_wheel(), system_library()):
        if path is not None and not path.samefile(first_library()):
            return path
    pytest.skip("needs both: pip install mpich, and apt-get install libfabric1")


@dataclass(frozen=True)
class Kind:
    """What a test runs over."""

    name: str
    provider: str
    options: Options = ()


LOOPBACK_KINDS = [Kind(name, "loopback") for name in ("loopback", "loopback-unordered", "loopback-faulty")]
# Several rails, and memory that takes several registrations; 3 MiB make parts of 2 MiB.
IN_PARTS: Options = (("rails", 3), ("most_registered", 3 << 20))
FABRIC_KINDS = [
    Kind("tcp", "tcp"),
    Kind("shm", "shm"),
    Kind("tcp-rails", "tcp", IN_PARTS),
    Kind("shm-rails", "shm", IN_PARTS),
]
if OTHER_LIBRARY in os.environ:
    FABRIC_KINDS = FABRIC_KINDS[:2]  # rails have tests of their own, in test_rails.py
RAIL_KINDS = [kind for kind in FABRIC_KINDS if kind.options]
NIXL = pytest.param(
    Kind("nixl", "nixl/UCX"),
    marks=pytest.mark.skipif(
        not any(find_spec(name) for name in PACKAGES), reason="needs NIXL: pip install --no-deps nixl-cu12"
    ),
)
PROCESS_KINDS = FABRIC_KINDS if OTHER_LIBRARY in os.environ else [*FABRIC_KINDS, NIXL]
KINDS = FABRIC_KINDS if OTHER_LIBRARY in os.environ else [*LOOPBACK_KINDS, *PROCESS_KINDS]


@dataclass
class Pair:
    """Two sides and a connected pair of endpoints, ours and theirs."""

    kind: Kind
    near: NearSide
    far: Any
    """A :class:`FarSide`, or a second :class:`NearSide` that can do the same but be stopped."""
    ours: int
    theirs: int
    window: Window

    def another(self) -> tuple[int, int]:
        """One more connected pair of endpoints."""
        return join(self.near, self.far)


def join(near: NearSide, far: Any) -> tuple[int, int]:
    """Open an endpoint on either side and connect them."""
    ours, our_address = near.open_peer()
    theirs, their_address = far.open_peer()
    near.connect(ours, their_address)
    far.connect(theirs, our_address)
    return ours, theirs


class FarSides:
    """Far processes, one per kind, kept from test to test as long as they live."""

    def __init__(self) -> None:
        self._sides: dict[str, FarSide] = {}

    def get(self, kind: Kind) -> FarSide:
        side = self._sides.pop(kind.name, None)
        if side is not None and side.process.poll() is None:
            side.reopen(kind.provider, first_library(), kind.options)
        else:
            if side is not None:
                side.end()
            side = FarSide(kind.provider, first_library(), kind.options)
        self._sides[kind.name] = side
        return side

    def end(self) -> None:
        for side in self._sides.values():
            side.end()


@pytest.fixture(scope="session")
def far_sides() -> Iterator[FarSides]:
    sides = FarSides()
    yield sides
    sides.end()


def near_transport(kind: Kind, network: LoopbackNetwork) -> Transport:
    if kind.name == "loopback-faulty":
        # Late, out of order, through a queue that is mostly full: trouble that the contract allows.
        return FaultyTransport(network.transport(), Delay(0, 0.003, share=0.2), Reorder(), Depth(64))
    if kind.provider == "loopback":
        return network.transport()
    return open_transport(kind.provider, first_library(), kind.options)


def make_pair(kind: Kind, far_sides: FarSides) -> Iterator[Pair]:
    network = LoopbackNetwork(unordered=kind.name == "loopback-unordered", seed=1)
    far: Any = NearSide(network.transport()) if kind.provider == "loopback" else far_sides.get(kind)
    near = NearSide(near_transport(kind, network))
    ours, theirs = join(near, far)
    yield Pair(kind, near, far, ours, theirs, far.window())
    near.close()
    if isinstance(far, NearSide):
        far.close()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def pair(request: pytest.FixtureRequest, far_sides: FarSides) -> Iterator[Pair]:
    """A connected pair over every kind of transport."""
    yield from make_pair(request.param, far_sides)


@pytest.fixture(params=PROCESS_KINDS, ids=lambda kind: kind.name)
def process_pair(request: pytest.FixtureRequest, far_sides: FarSides) -> Iterator[Pair]:
    """A connected pair whose far side is a process that may be stopped or killed."""
    yield from make_pair(request.param, far_sides)
