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
    """The process as the test sees it.

    ``wall`` and ``monotonic``: what its clocks show at first, in seconds. ``trouble``: the seed of its transport's
    faults, if it is to have any; such an engine logs errors only.
    """

    def __init__(
        self,
        name: str,
        port: int,
        *,
        provider: str = "tcp",
        wall: float | None = None,
        monotonic: float | None = None,
        trouble: int | None = None,
        **settings: object,
    ) -> None:
        self.port = port
        options = {
            "name": name,
            "provider": provider,
            "wall": wall,
            "monotonic": monotonic,
            "trouble": trouble,
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
    from tests.faults.commands import serve

    serve(**options)


if __name__ == "__main__":
    main()
