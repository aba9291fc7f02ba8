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
from tests.connector.test_recorded import Pool


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
        heard += sending.step(StepView((), (scheduled,), (), frozenset())).ready
    assert heard == told


def others(*requests: Scheduled) -> tuple[Scheduled, ...] | None:
    return requests


@pytest.mark.parametrize(
    ("beside", "hits"),
    [
        (others(), [Ready("p", 64, ((1, 2),))]),
        (others(Scheduled("reads them too", 70, 1, ((1, 2, 9),), whole=True)), [Ready("p", 64, ((1, 2),))]),
        (others(Scheduled("fills the second", 40, 24, ((1, 2),), whole=True)), [Ready("p", 32, ((1,),))]),
        (others(Scheduled("fills both", 0, 64, ((1, 2),), whole=True)), []),
        (None, []),
    ],
)
def test_prefix_hits_are_ready_before_the_step_unless_it_fills_them(
    beside: tuple[Scheduled, ...] | None, hits: list[Ready]
) -> None:
    sending = Sending((Group(32),), {}, Parking(DirectoryDouble(), limit=9, block_bytes=1))
    assert sending.arrived("p", PrefillLeg("t", 1), Content.of(b"", list(range(100))))
    new = Scheduled("p", 64, 36, ((1, 2, 3, 4),), whole=True)
    step = sending.step(StepView((new,), (), (), frozenset(), beside))
    assert step.cached == tuple(hits)
    assert step.ready == (Ready("p", 100, ((1, 2, 3, 4),)),)


def test_of_a_sliding_window_nothing_is_ready_before_the_step() -> None:
    sending = Sending((Group(32, 64), Group(32)), {}, Parking(DirectoryDouble(), limit=9, block_bytes=1))
    sending.bind_pool(Pool())
    assert sending.arrived("p", PrefillLeg("t", 1), Content.of(b"", list(range(100))))
    new = Scheduled("p", 64, 36, ((5, 6, 7, 8), (1, 2, 3, 4)), whole=True)
    step = sending.step(StepView((new,), (), (), frozenset(), ()))
    assert step.cached == (Ready("p", 64, ((), (1, 2))),)
    assert [order.tokens for order in step.ready] == [100]


def test_by_request_prefix_hits_wait_for_the_whole_prompt() -> None:
    sending = Sending((Group(32),), {}, Parking(DirectoryDouble(), limit=9, block_bytes=1), by_step=False)
    assert sending.arrived("p", PrefillLeg("t", 1), Content.of(b"", list(range(100))))
    step = sending.step(StepView((Scheduled("p", 64, 36, ((1, 2, 3, 4),), whole=True),), (), (), frozenset(), ()))
    assert not step.cached
