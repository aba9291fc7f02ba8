"""What Python does for a transfer, counted: it holds the GIL for that, whatever the native core does without it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.orders import Offer, Ready, StepOrders
from neuron_pushkv.transport.base import Batch
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.wire import Rank
from tests.engine.conftest import free_port
from tests.engine.ranks import Engine
from tests.engine.sides import content, until
from tests.layouts import cache

LAYERS = 64
BLOCKS = 1024


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    made = [
        Engine(
            name,
            {Rank(): cache(layers=LAYERS, heads=1, blocks=BLOCKS, dim_bytes=4)},
            lambda: FabricTransport(provider="tcp"),
            ConnectorSettings(port=free_port(), smallest_write_bytes=0),
        )
        for name in ("sender", "receiver")
    ]
    yield made[0], made[1]
    for engine in made:
        engine.close()


def operations(function: Callable[[], object]) -> int:
    """Lines of Python that this thread runs for it."""
    count = 0

    def traced(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)  # type: ignore[arg-type]
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_python_does_as_much_for_few_writes_as_for_many(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F33: 16,384 tokens in 64 layers by random block tables: 2,048 and 131,072 writes take as many lines of Python."""
    sender, receiver = pair
    (engine,) = sender.ranks.values()
    chance, lines, writes = random.Random(33), [], []
    batches: list[Batch] = []
    write = engine._transport.write

    def noted(peer: int, batch: Batch, immediate: int, ready: object) -> object:
        batches.append(batch)
        return write(peer, batch, immediate, ready)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._transport, "write", noted)
    for number, blocks in enumerate((16, 16, 256, 1024)):
        source, target = chance.sample(range(BLOCKS), blocks), chance.sample(range(BLOCKS), blocks)
        transfer, tokens = f"t{number}", 16 * blocks
        text = Offer(f"p{number}", transfer, content(number, tokens), 1)
        sender.step(StepOrders(offers=(text,)))
        receiver.receive(f"d{number}", number, tokens, [target], sender, transfer)
        until(lambda: len(engine._outbound) == 1, "the registration")
        order = Ready(f"p{number}", tokens, (tuple(source),))
        engine.begin_step(StepOrders())
        with engine._lock:
            lines.append(operations(lambda order=order: engine.advance((order,))))
        engine.end_step()
        (batch,) = batches
        batches.clear()
        writes.append(sum(len(product.spans) * len(product.runs) for product in batch))
        assert sum(len(product.spans) + len(product.runs) for product in batch) <= 2 * LAYERS + blocks
        assert receiver.received(f"d{number}")
        until(lambda: len(engine._outbound) == 0, "DONE")
    assert writes[-1] > 50 * writes[1], writes
    assert lines[1] > 50
    assert max(lines[1:]) <= lines[1] + 20, lines
