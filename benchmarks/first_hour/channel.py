"""How the two processes tell each other what to do: one line of JSON for a question, one for its answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0
"""Seconds until somebody gives up waiting for the other."""


class Channel:
    """One connection. Whoever asks may do its own part between :meth:`start` and :meth:`finish`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection = connection
        self._lines = connection.makefile("rw")

    def start(self, name: str, **arguments: Any) -> None:
        """Ask for it."""
        self._lines.write(json.dumps([name, arguments]) + "\n")
        self._lines.flush()

    def finish(self) -> Any:
        """Its answer. Raises RuntimeError with what went wrong over there."""
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the other side has gone; see what it printed")
        good, answer = json.loads(line)
        if not good:
            raise RuntimeError(f"the other side: {answer}")
        return answer

    def ask(self, name: str, **arguments: Any) -> Any:
        """Both."""
        self.start(name, **arguments)
        return self.finish()

    def serve(self, calls: dict[str, Callable[..., Any]]) -> None:
        """Do what is asked for until the connection ends."""
        self._connection.settimeout(None)
        for line in self._lines:
            name, arguments = json.loads(line)
            try:
                answer = [True, calls[name](**arguments)]
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                answer = [False, f"{type(error).__name__}: {error}"]
            self._lines.write(json.dumps(answer) + "\n")
            self._lines.flush()

    def close(self) -> None:
        """Ends the other side's serving."""
        self._lines.close()
        self._connection.close()
