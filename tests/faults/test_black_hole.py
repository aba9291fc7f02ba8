"""An engine that can't be reached, seen from a whole engine: requests for it fail, and nobody else waits."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import StepOrders
from tests.engine.sides import Side, order, until

NewSide = Callable[..., Side]
CONNECT_SECONDS = 0.6
REQUESTS = 32


class Hole:
    """A listener that never says a word. ``calls``: connections that it has seen."""

    def __init__(self, listening: socket.socket) -> None:
        self.port = listening.getsockname()[1]
        self.calls: list[socket.socket] = []
        self._listening = listening
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.calls.append(self._listening.accept()[0])

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        for call in self.calls:
            call.close()


@pytest.fixture
def silent() -> Iterator[Hole]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hole = Hole(listening)
        yield hole
        hole.close()


@pytest.fixture
def full() -> Iterator[int]:
    """Its queue is full, so that the kernel drops every further SYN."""
    with socket.socket() as listening, contextlib.ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(64):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


def ask(receiver: Side, port: int, first: int) -> list[str]:
    """A few requests for what the engine at that port is said to have."""
    nobody = ConnectorSettings(port=port)
    names = [f"bad-{number}" for number in range(first, first + REQUESTS)]
    orders = [order(name, 9, 16, [first % 100], nobody, name) for name in names]
    receiver.step(StepOrders(receives=tuple(orders)))
    return names


def others_go_on(sender: Side, receiver: Side, bad: list[str]) -> None:
    """A first transfer from another peer is over while all of those still wait."""
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    receiver.receive("d", 1, 64, [111, 112, 113, 114], sender)
    assert receiver.await_report("d")
    assert receiver.holds(1, [111, 112, 113, 114])
    assert not set(receiver.finished) & set(bad)


def all_fail(receiver: Side, names: list[str], began: float) -> None:
    until(lambda: (receiver.step(), set(names) <= set(receiver.failed))[1], "all failures", CONNECT_SECONDS + 3)
    assert time.monotonic() - began >= CONNECT_SECONDS
    assert receiver.stats["transfers"][f"in:failed:{Reason.UNREACHABLE}"] >= len(names)


def test_handshake_that_is_never_answered(new_side: NewSide, silent: Hole) -> None:
    """F13: 32 requests make one attempt, and 32 more that come while it is remembered none."""
    sender = new_side("sender")
    receiver = new_side("receiver", connect_seconds=CONNECT_SECONDS, unreachable_seconds=30)
    began = time.monotonic()
    names = ask(receiver, silent.port, 0)
    others_go_on(sender, receiver, names)
    all_fail(receiver, names, began)
    assert len(silent.calls) == 1
    again = ask(receiver, silent.port, REQUESTS)
    until(lambda: (receiver.step(), set(again) <= set(receiver.failed))[1], "all failures", CONNECT_SECONDS / 2)
    assert len(silent.calls) == 1


def test_packets_that_are_dropped(new_side: NewSide, full: int) -> None:
    """F13: not even the SYN is answered."""
    sender = new_side("sender")
    receiver = new_side("receiver", connect_seconds=CONNECT_SECONDS, unreachable_seconds=30)
    began = time.monotonic()
    names = ask(receiver, full, 0)
    others_go_on(sender, receiver, names)
    all_fail(receiver, names, began)
