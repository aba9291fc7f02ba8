"""What the network of an instance should give."""

from __future__ import annotations

from neuron_pushkv.device import topology

GBIT_PER_CARD = {
    "trn1": 100,
    "trn1n": 100,
    "trn2": 200,
    "trn3": 200,
    "trn3pds": 200,
    "p5": 100,
    "p5e": 100,
    "p5en": 200,
    "p6-b200": 400,
    "p6-b300": 400,
}
"""Line rate of one card in Gbit/s, as AWS publishes it for the largest size of each family."""
FLOOR = 0.5
"""Share of the line rate below which something is wrong: 0.9 and more has been published for large writes."""


def line_rate(family: str | None, rails: int) -> int | None:
    """Bytes per second over that many cards; ``None`` where nothing is known, as outside EC2."""
    gbit = GBIT_PER_CARD.get(topology.FAMILIES.get(family or "", family or ""))
    return None if gbit is None else gbit * rails * 10**9 // 8
