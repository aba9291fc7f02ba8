"""One side of a pair under test: a transport, a buffer registered with it, and what a test wants to do with both.

``NearSide`` runs in the test's process. ``python -m tests.transport.side FD`` serves one in a process of its own,
which ``FarSide`` drives through a pipe: shm can't connect endpoints of one process, and only a process can be stopped
or killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from neuron_pushkv.device.base import Memory, ReadyWord
from neuron_pushkv.transport.base import (
    Event,
    Product,
    Registration,
    Span,
    SpanTable,
    Table,
    Ticket,
    Transport,
    TransportCounters,
)

BUFFER = 8 << 20
PATIENCE = 20.0
"""Seconds until a test gives up on something that should happen at once."""

Window = bytes
"""What a peer must know of a side's buffer: its registration's description."""

Options = tuple[tuple[str, Any], ...]
"""Named arguments of :class:`FabricTransport`."""

Run = tuple[int, int, int]
"""Offset in our buffer, offset in the other's, length."""


def table(runs: Sequence[Run]) -> Table:
    """As a product wants them."""
    return np.array(runs, dtype=np.uint64).reshape(-1, 3)


class NearSide:
    """A transport and a registered buffer in this process."""

    def __init__(self, transport: Transport, size: int = BUFFER) -> None:
        self.transport = transport
        self.buffer = (ctypes.c_ubyte * size)()
        self.start = ctypes.addressof(self.buffer)
        self.registration: Registration = transport.register(Memory(self.start, size))
        self.ready_word = ctypes.c_uint32(0)
        self.seen: list[Event] = []
        self.targets: dict[tuple[int, Window], int] = {}

    @property
    def view(self) -> memoryview:
        return memoryview(self.buffer).cast("B")

    def window(self) -> Window:
        return self.registration.description

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.view[offset : offset + length])

    def fill(self, offset: int, data: bytes) -> None:
        self.view[offset : offset + len(data)] = data

    def open_peer(self) -> tuple[int, bytes]:
        peer = self.transport.open_peer()
        return peer, self.transport.address(peer)

    def connect(self, peer: int, address: bytes) -> None:
        self.transport.connect(peer, address)

    def fence(self, peer: int) -> None:
        self.transport.fence(peer)

    def expect(self, slot: int, epoch: int) -> None:
        self.transport.expect(slot, epoch)

    def goal(self, slot: int, epoch: int, count: int) -> None:
        self.transport.goal(slot, epoch, count)

    def count(self, slot: int, epoch: int) -> int:
        return self.transport.count(slot, epoch)

    def forget(self, slot: int) -> None:
        self.transport.forget(slot)

    def deregister(self) -> None:
        self.transport.deregister(self.registration)

    def poll(self, timeout: float) -> list[Event]:
        return self.transport.poll(timeout)

    def counters(self) -> TransportCounters:
        return self.transport.counters()

    def close(self) -> None:
        self.transport.close()

    def target(self, peer: int, window: Window) -> int:
        """Attached when it is first needed."""
        if (peer, window) not in self.targets:
            self.targets[peer, window] = self.transport.attach(peer, window)
        return self.targets[peer, window]

    def span(self, peer: int, window: Window, local: int = 0, remote: int = 0) -> Span:
        """From ``local`` in our buffer to ``remote`` in the other's."""
        return Span(self.registration, self.start + local, self.target(peer, window), remote)

    def product(self, peer: int, window: Window, runs: Sequence[Run]) -> Product:
        """One span, from start to start."""
        return Product(SpanTable([self.span(peer, window)]), table(runs))

    def write(
        self, peer: int, window: Window, runs: Sequence[Run], immediate: int, ready: ReadyWord | None = None
    ) -> Ticket:
        return self.transport.write(peer, [self.product(peer, window, runs)], immediate, ready)

    def hold(self, value: int = 1) -> ReadyWord:
        """A ready word that is not reached until :meth:`release`."""
        self.ready_word.value = (value - 1) % (1 << 32)
        return ReadyWord(ctypes.addressof(self.ready_word), value)

    def release(self, value: int = 1) -> None:
        self.ready_word.value = value % (1 << 32)

    def events(self, count: int, kind: type[Event] | tuple[type[Event], ...]) -> list[Event]:
        """Poll until ``count`` events of ``kind`` have come, fail if they don't; others stay in ``seen``."""
        deadline = time.monotonic() + PATIENCE
        found: list[Event] = []
        while len(found) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(found)} of {count} events after {PATIENCE} s: {found}, others {self.seen}")
            for event in self.transport.poll(0.2):
                (found if isinstance(event, kind) else self.seen).append(event)
        return found


def eventually(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience} s: {what}"
        time.sleep(0.002)


class FarSide:
    """A side in a process of its own. Has the methods of :class:`NearSide` whose arguments can travel."""

    def __init__(self, provider: str, library: Path | None, options: Options) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.transport.side", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
            )
        self.reopen(provider, library, options)

    def reopen(self, provider: str, library: Path | None, options: Options) -> None:
        """Close the transport in there, if any, and open another."""
        self._call("reopen", provider, library, options)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        if not self._pipe.poll(PATIENCE):
            raise AssertionError(f"the far side did not answer {name} within {PATIENCE} s")
        good, result = self._pipe.recv()
        if not good:
            raise result
        return result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", "the far process is stopped")

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for leftover in Path("/dev/shm").glob(f"{self.process.pid}:*"):  # shm's; nobody else can remove them now
            leftover.unlink()

    def end(self) -> None:
        """Whatever state it is in."""
        self._pipe.close()
        if self.process.poll() is None:
            self.resume()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()


def open_transport(provider: str, library: Path | None = None, options: Options = ()) -> Transport:
    """The transport of that provider; ``library`` and ``options`` are libfabric's."""
    if provider.startswith("nixl/"):
        from neuron_pushkv.transport.nixl import NixlTransport

        return NixlTransport(provider.removeprefix("nixl/"))
    from neuron_pushkv.transport.fabric import FabricTransport

    return FabricTransport(provider, library, **dict(options))


def serve(pipe: Connection) -> None:
    """Carry out what comes through ``pipe`` until it is closed."""
    side: NearSide | None = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            if name == "reopen":
                if side is not None:
                    side.close()
                side = NearSide(open_transport(*arguments))
                answer = None
            else:
                answer = getattr(side, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - handed to the test, which raises it
            pipe.send((False, error))
        else:
            pipe.send((True, answer))
    if side is not None:
        side.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
    os._exit(0)
