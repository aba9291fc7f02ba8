"""Just enough of server-sent events to know how a stream begins.

vLLM answers a streamed request with status 200 before it knows whether the KV load succeeds. If it fails, the first
event is an error; in chat the events that only name the assistant's role come even before that.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")
_LINE = re.compile(rb"\r?\n")


class Kind(Enum):
    """What one event means for how the answer begins."""

    SILENT = "silent"
    """A comment (keep-alive) or nothing at all."""
    PREAMBLE = "preamble"
    """Chat's opening: a role, and nothing that the model has said."""
    CONTENT = "content"
    ERROR = "error"


class Beginning:
    """Reads the start of a stream, byte by byte or all at once, up to the first event that says how it goes."""

    def __init__(self) -> None:
        self.kind = Kind.SILENT
        """PREAMBLE, CONTENT or ERROR once such an event has been read."""
        self.data = b""
        """Data of the event that decided."""
        self._rest = b""

    @property
    def decided(self) -> bool:
        """Whether the answer may begin (or the error be told)."""
        return self.kind in (Kind.CONTENT, Kind.ERROR)

    def feed(self, chunk: bytes) -> None:
        """Take in what has come next."""
        self._rest += chunk
        while not self.decided and (end := _END.search(self._rest)):
            event, self._rest = self._rest[: end.start()], self._rest[end.end() :]
            data = _data(event)
            kind = _kind(data)
            if kind is not Kind.SILENT:
                self.kind, self.data = kind, data


def is_whole(tail: bytes) -> bool:
    """Whether a stream that ends in ``tail`` ends with a whole event."""
    return not tail or tail.endswith((b"\n\n", b"\n\r\n"))


def _data(event: bytes) -> bytes:
    lines = (line for line in _LINE.split(event) if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def _kind(data: bytes) -> Kind:
    if not data:
        return Kind.SILENT
    try:
        value = json.loads(data)
    except ValueError:
        return Kind.CONTENT
    if not isinstance(value, dict):
        return Kind.CONTENT
    if value.get("error"):
        return Kind.ERROR
    return Kind.PREAMBLE if _only_names_roles(value.get("choices")) else Kind.CONTENT


def _only_names_roles(choices: Any) -> bool:
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason"):
            return False
        if any(value for key, value in delta.items() if key != "role"):
            return False
    return True
