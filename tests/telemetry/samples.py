"""Transfers that have ended, as an engine describes them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from neuron_pushkv.errors import Reason
from neuron_pushkv.telemetry import Transfer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def received(**changes: Any) -> Transfer:
    """One that has arrived here, and was started a second ago."""
    transfer = Transfer(
        way="in",
        request="cmpl-r-0-aaaa",
        transfer="t1",
        traceparent=TRACEPARENT,
        peer="prefill-0",
        reason=None,
        detail="",
        tokens=128,
        writes=4,
        bytes=8192,
        started=time.monotonic() - 1.0,
        moments={"connected": 0.1, "accepted": 0.15, "committed": 0.5, "arrived": 0.625, "seen": 0.75},
    )
    return dataclasses.replace(transfer, **changes)


def sent(**changes: Any) -> Transfer:
    """The same on the other side."""
    moments = {
        "registered": 0.0,
        "matched": 0.125,
        "first_write": 0.25,
        "posted": 0.375,
        "last_write": 0.5,
        "done": 0.75,
    }
    return received(**{"way": "out", "request": "cmpl-r-0-bbbb", "peer": "decode-0", "moments": moments, **changes})


def failed(**changes: Any) -> Transfer:
    """One whose sender is lost before anything comes."""
    moments = {"connected": 0.25, "accepted": 0.5, "seen": 0.75}
    return received(
        **{
            "reason": Reason.PEER_LOST,
            "detail": 'it said "bye"\nand left',
            "tokens": 0,
            "writes": 0,
            "bytes": 0,
            "moments": moments,
            **changes,
        }
    )
