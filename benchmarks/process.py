"""A benchmark's other processes: an object in each, whose methods are called from here."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 60
CALL_SECONDS = 60


class Remote:
    """``factory(*arguments)`` makes the object, in a process of its own; it has a method ``close``."""

    def __init__(self, factory: Callable[..., Any], *arguments: object) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.answer(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: object) -> Any:
        """Call it and wait for what it returns."""
        self.tell(method, *arguments)
        return self.answer()

    def tell(self, method: str, *arguments: object) -> None:
        """Call it; :meth:`answer` waits for what it returns."""
        self._pipe.send((method, arguments))

    def answer(self, seconds: float = CALL_SECONDS) -> Any:
        """Raises :class:`RuntimeError` with the other process's words if it failed, or has not answered in time."""
        if not self._pipe.poll(seconds):
            raise RuntimeError(f"a process of the benchmark has not answered for {seconds} s")
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def pause(self, paused: bool) -> None:
        """Keep the process from running, or let it."""
        os.kill(self._process.pid or 0, signal.SIGSTOP if paused else signal.SIGCONT)

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self.pause(False)
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(10)
            if self._process.is_alive():
                self._process.kill()
        self._pipe.close()


def _serve(pipe: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        served = factory(*arguments)
    except Exception:  # noqa: BLE001 whatever it is, the benchmark's own process shows it
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (call := pipe.recv()) is not None:
            method, given = call
            try:
                pipe.send((True, getattr(served, method)(*given)))
            except Exception:  # noqa: BLE001 as above
                pipe.send((False, traceback.format_exc()))
    served.close()
