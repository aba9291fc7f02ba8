"""A sender that is killed or stopped, as a real process, over libfabric's tcp and shm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.orders import StepOrders
from neuron_pushkv.transport.fabric import FabricTransport

from .conftest import free_port
from .sides import Side, order, until

TARGET = [11, 12, 13, 14]


class Sender:
    """The process, driven line by line."""

    def __init__(self, provider: str, port: int, delay: float = 0.0, hidden: bool = False) -> None:
        options = {"name": "sender", "provider": provider, "port": port, "delay": delay, "hidden": hidden}
        self.settings = ConnectorSettings(port=port)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.sender_process", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, *command: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["tcp", "shm"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def receiver(provider: str) -> Iterator[Side]:
    with Side("receiver", FabricTransport(provider=provider), ConnectorSettings(port=free_port())) as side:
        yield side


@pytest.fixture
def start(provider: str) -> Iterator[Callable[..., Sender]]:
    senders: list[Sender] = []

    def make(port: int | None = None, delay: float = 0.0) -> Sender:
        senders.append(Sender(provider, port or free_port(), delay))
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()


def ask(receiver: Side, sender: Sender, request: str, prompt: int = 1, transfer: str = "t") -> None:
    receiver.step(StepOrders(receives=(order(request, prompt, 64, TARGET, sender.settings, transfer),)))


def test_push_between_processes(start: Callable[..., Sender], receiver: Side) -> None:
    sender = start()
    sender.do("prefill", "p", 1, 64, [1, 2, 3, 4])
    ask(receiver, sender, "d")
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    assert receiver.others_blank(TARGET)


@pytest.mark.parametrize("stage", ["before prefill", "before the write", "during the write", "after the write"])
def test_sender_killed(start: Callable[..., Sender], receiver: Side, stage: str) -> None:
    """F5, F12: bounded and told once; nothing lands afterwards; the restarted sender is found at the same address."""
    sender = start(delay=30.0 if stage == "during the write" else 0.0)
    if stage != "before prefill":
        sender.do("offer", "p", 1, 64)
    ask(receiver, sender, "d")
    until(lambda: len(receiver.engine._contacts.links), "the connection")
    if stage in ("during the write", "after the write"):
        sender.do("seal", "p", 1, [1, 2, 3, 4])
    if stage == "during the write":
        until(lambda: sender.do("reading", "p") == "True", "the write")
    if stage == "after the write":
        assert receiver.await_report("d")
    sender.signal(signal.SIGKILL)
    before = time.monotonic()
    succeeded = receiver.await_report("d") if "d" not in receiver.finished else "d" not in receiver.failed
    assert time.monotonic() - before < 2.0
    assert succeeded == (stage == "after the write")
    receiver.fill(99, TARGET)
    again = start(sender.settings.port)
    again.do("prefill", "p", 2, 64, [1, 2, 3, 4])
    receiver.step(StepOrders(receives=(order("again", 2, 64, [21, 22, 23, 24], again.settings, "t"),)))
    assert receiver.await_report("again")
    assert receiver.holds(2, [21, 22, 23, 24])
    assert receiver.holds(99, TARGET)


def test_sender_stopped(provider: str, start: Callable[..., Sender]) -> None:
    """A stopped sender says nothing and its connection stays; silence ends it within its ten seconds."""
    settings = ConnectorSettings(port=free_port())
    with Side("receiver", FabricTransport(provider=provider), settings) as receiver:
        sender = start()
        sender.do("offer", "p", 1, 64)
        ask(receiver, sender, "d")
        until(lambda: len(receiver.engine._contacts.links), "the connection")
        sender.signal(signal.SIGSTOP)
        assert not receiver.await_report("d", 15.0)
        receiver.fill(99, TARGET)
        sender.signal(signal.SIGCONT)
        sender.do("seal", "p", 1, [1, 2, 3, 4])
        time.sleep(0.2)
        assert receiver.holds(99, TARGET)
