"""An engine in its own process, to be stopped, killed and given other clocks: a request a line, an answer a line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 30.0


class RemoteSide:
    """The process as the test sees it. ``wall`` and ``monotonic``: what its clocks show at first, in seconds."""

    def __init__(
        self,
        name: str,
        port: int,
        *,
        provider: str = "tcp",
        wall: float | None = None,
        monotonic: float | None = None,
        **settings: object,
    ) -> None:
        self.port = port
        options = {
            "name": name,
            "provider": provider,
            "wall": wall,
            "monotonic": monotonic,
            "settings": {"port": port, **settings},
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.side_process", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert self.answer() == "ready"
        except BaseException:
            self.kill()
            raise

    def do(self, command: str, *arguments: object) -> Any:
        """Call one of the commands below, wait for it, and return its result."""
        self.ask(command, *arguments)
        return self.answer()

    def ask(self, command: str, *arguments: object) -> None:
        """Call it and don't wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The result of the oldest call without one; EOFError if the process is gone."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("the process has ended")
        return json.loads(line)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing for a while, and doesn't know."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            end = time.monotonic() + ANSWER_SECONDS
            while not self._stands_still():  # The signal is taken thread by thread.
                assert time.monotonic() < end, "the process goes on"
                time.sleep(0.001)
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def _stands_still(self) -> bool:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)

    def kill(self) -> None:
        """As kill -9 does. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def descriptors() -> int:
    """Files and sockets that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def set_clocks(wall: float | None, monotonic: float | None) -> None:
    """Let this process's clocks begin elsewhere; to be called before anything has read them."""
    for name, start in (("time", wall), ("monotonic", monotonic)):
        if start is not None:
            setattr(time, name, _ahead(getattr(time, name), start))


def _ahead(clock: Callable[[], float], start: float) -> Callable[[], float]:
    offset = start - clock()
    return lambda: clock() + offset


def main() -> None:
    options = json.loads(sys.argv[1])
    set_clocks(options["wall"], options["monotonic"])
    from neuron_pushkv.config import ConnectorSettings
    from neuron_pushkv.transport.fabric import FabricTransport
    from tests.engine.sides import Side, order, until

    settings = ConnectorSettings.model_validate(options["settings"])
    with Side(options["name"], FabricTransport(provider=options["provider"]), settings) as side:

        def receive(request: str, prompt: int, tokens: int, blocks: list[int], port: int, transfer: str) -> None:
            from neuron_pushkv.orders import StepOrders

            sender = ConnectorSettings(port=port)
            side.step(StepOrders(receives=(order(request, prompt, tokens, blocks, sender, transfer),)))

        def freed(request: str) -> None:
            until(lambda: (side.step(), request in side.freed)[1], f"letting go of {request}")

        commands: dict[str, Any] = {
            "receive": receive,
            "freed": freed,
            "clocks": lambda: (time.time(), time.monotonic()),
            "tables": lambda: (len(side.engine._inbound), len(side.engine._outbound), side.engine._outbound.sources),
        }
        print('"ready"', flush=True)
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            result = (commands.get(command) or getattr(side, command))(*arguments)
            print(json.dumps(result if isinstance(result, (bool, list, tuple)) else None), flush=True)


if __name__ == "__main__":
    main()
