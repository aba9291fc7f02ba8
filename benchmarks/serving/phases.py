"""Where our own transfers' time goes, by the lines that engines log of each."""

from __future__ import annotations

import re
from collections import defaultdict

SECONDS = re.compile(r"(\w+)_seconds=([\d.]+)")


def phases(log: str, event: str) -> dict[str, list[float]]:
    """Seconds of each phase of all transfers with that event (``kv_received``, ``kv_sent``) in a log, in order."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for line in log.splitlines():
        if f"event={event} " in line:
            for phase, seconds in SECONDS.findall(line):
                found[phase].append(float(seconds))
    return dict(found)
