"""What the workers hear of a prompt that is computed in several steps."""

from __future__ import annotations

import pytest

from neuron_pushkv.connector.compat import Scheduled, StepView
from neuron_pushkv.connector.parameters import PrefillLeg
from neuron_pushkv.connector.parking import Parking
from neuron_pushkv.connector.sending import Sending
from neuron_pushkv.content import Content
from neuron_pushkv.layout import Group
from neuron_pushkv.orders import Ready
from tests.connector.harness import DirectoryDouble


@pytest.mark.parametrize(
    ("by_step", "told"),
    [
        (True, [Ready("p", 40, ((1, 2),)), Ready("p", 80, ((1, 2, 3),)), Ready("p", 100, ((1, 2, 3, 4),))]),
        (False, [Ready("p", 100, ((1, 2, 3, 4),))]),
    ],
)
def test_granularity(by_step: bool, told: list[Ready]) -> None:
    """By step: every chunk, though it may end inside a block. By request: only the whole prompt, once."""
    sending = Sending((Group(32),), {}, Parking(DirectoryDouble(), limit=9, block_bytes=1), by_step=by_step)
    assert sending.arrived("p", PrefillLeg("t", 1), Content.of(b"", list(range(100))))
    heard: list[Ready] = []
    for computed, count, table in (
        (0, 40, (1, 2)),
        (40, 40, (1, 2, 3)),
        (80, 20, (1, 2, 3, 4)),
        (100, 1, (1, 2, 3, 4)),
    ):
        scheduled = Scheduled("p", computed, count, (table,), whole=True)
        _, ready = sending.step(StepView((), (scheduled,), (), frozenset()))
        heard += ready
    assert heard == told
