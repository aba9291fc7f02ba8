"""Log lines that people and programs read: ``key=value`` pairs as the text, and the same as fields of the record.

A formatter that writes JSON gets the fields by name and need not take the text apart.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import TypeAlias

from neuron_pushkv.telemetry.transfer import Transfer

Fields: TypeAlias = Mapping[str, str | int | float]

_PLAIN = re.compile(r"[!#-<>-~]+")
"""Printable ASCII without space, quote and equals sign: what needs no quotes."""
_EVENTS = {
    ("in", True): "kv_received",
    ("in", False): "kv_receive_failed",
    ("out", True): "kv_sent",
    ("out", False): "kv_send_failed",
}


def log(logger: logging.Logger, level: int, fields: Fields) -> None:
    """Write one line with these fields; times to the microsecond."""
    if logger.isEnabledFor(level):
        extra = {key: round(value, 6) if isinstance(value, float) else value for key, value in fields.items()}
        logger.log(level, "%s", rendered(fields), extra=extra)


def rendered(fields: Fields) -> str:
    """Pairs in the order of ``fields``. Text that isn't plain is quoted as in JSON: nobody's id can forge a line."""
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def transfer_fields(transfer: Transfer, seconds: float, engine: str, rank: str) -> dict[str, str | int | float]:
    """What is to be said about a transfer that took ``seconds``; fields that it has nothing for are left out."""
    fields: dict[str, str | int | float] = {"event": _EVENTS[transfer.way, transfer.reason is None]}
    texts = {
        "reason": transfer.reason or "",
        "detail": transfer.detail,
        "request": transfer.request,
        "transfer": transfer.transfer,
        "engine": engine,
        "rank": rank,
        "peer": transfer.peer,
        "trace": trace_id(transfer.traceparent),
    }
    fields |= {key: str(text) for key, text in texts.items() if text}
    fields |= {"tokens": transfer.tokens, "bytes": transfer.bytes, "writes": transfer.writes}
    fields["seconds"] = seconds
    fields |= {f"{phase}_seconds": end - begin for phase, (begin, end) in transfer.phases.items()}
    return fields


def trace_id(traceparent: str) -> str:
    """The trace's id in a W3C ``traceparent``, "" if it isn't one."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and re.fullmatch("[0-9a-f]{32}", parts[1]) else ""


def _value(value: str | int | float) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    return f"{value:.6f}" if isinstance(value, float) else str(value)
