"""What moves and what it costs: prefix hits at every position, retries, memory, idleness."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable

import pytest

from neuron_pushkv.contacts import home
from neuron_pushkv.errors import Reason
from neuron_pushkv.ledger import sources
from neuron_pushkv.ledger.slots import RESTING, SlotTable
from neuron_pushkv.orders import Offer, StepOrders
from neuron_pushkv.transport.fabric import FabricTransport
from tests.engine.sides import BLOCK_BYTES, LAYERS, Side, content, until

from .measures import native_bytes, resident_bytes

NewSide = Callable[..., Side]


@pytest.mark.parametrize("tokens", [65, 72, 80])
@pytest.mark.parametrize("hits", [0, 1, 2, 3, 4])
def test_prefix_hit_at_every_position(sender: Side, receiver: Side, hits: int, tokens: int) -> None:
    """F22: the receiver holds the first blocks already, from none to all but the last: only the rest moves."""
    had, missing = [50, 53, 56, 59, 62][:hits], [90, 87, 84, 81, 78][hits:]
    receiver.fill(77, had)
    sender.prefill("p", 1, tokens, [5, 7, 6, 9, 11])
    receiver.receive("d", 1, tokens, missing, sender, start=16 * hits)
    assert receiver.await_report("d")
    assert receiver.holds(1, missing, first=hits)
    assert receiver.holds(77, had), "what was there already is left alone"
    assert receiver.others_blank(had + missing)
    assert receiver.stats["bytes"]["in"] == (5 - hits) * LAYERS * BLOCK_BYTES
    assert receiver.stats["tokens"]["in"] == tokens - 16 * hits


# F6


def test_retry_under_the_same_id(sender: Side, receiver: Side) -> None:
    """F6: prefill's leg is lost, and all is sent again under the same request id: new blocks, nothing left behind."""
    sender.offer("cmpl-1", 1, 64, "t")
    receiver.receive("cmpl-1-d", 1, 64, [11, 12, 13, 14], sender, "t")
    until(lambda: len(sender.engine._outbound), "the registration")
    sender.finish("cmpl-1", kept=False)
    assert not receiver.await_report("cmpl-1-d")
    receiver.fill(99, [11, 12, 13, 14])
    sender.prefill("cmpl-1", 1, 64, [5, 6, 7, 8], "t")
    receiver.receive("cmpl-1-e", 1, 64, [21, 22, 23, 24], sender, "t")
    assert receiver.await_report("cmpl-1-e")
    assert receiver.holds(1, [21, 22, 23, 24])
    assert receiver.holds(99, [11, 12, 13, 14])
    assert receiver.stats["transfers"] == {"in:completed": 1, f"in:failed:{Reason.PREFILL_FAILED}": 1}
    sender.finish("cmpl-1")
    until(lambda: (sender.step(), sender.freed == ["cmpl-1"])[1], "letting go of the source")
    for side in (sender, receiver):
        tables = (len(side.engine._inbound), len(side.engine._outbound), len(side.engine._outbound.sources))
        assert (*tables, side.directory.kept()) == (0, 0, 0, 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_like_prompts_under_ids_that_are_nearly_alike(sender: Side, receiver: Side, swapped: bool) -> None:
    """F6: same prompt, ids that differ in their last eight digits only: each receiver gets its own sender's blocks."""
    ids = [f"7d1f0c52-9e0b-4f6a-8d1e-3b7a{tail}" for tail in ("00000000", "0000000f")]
    blocks = {ids[0]: ([1, 2, 3, 4], [11, 12, 13, 14]), ids[1]: ([5, 6, 7, 8], [21, 22, 23, 24])}
    for transfer in reversed(ids) if swapped else ids:
        receiver.receive(f"d-{transfer}", 1, 64, blocks[transfer][1], sender, transfer)
    until(lambda: len(sender.engine._outbound) == 2, "both registrations")
    for number, transfer in enumerate(ids):
        sender.step(StepOrders(offers=(Offer(f"p-{transfer}", transfer, content(1, 64), 1),)))
        sender.fill(700 + number, blocks[transfer][0])  # Told apart by their canary, not by their content.
        sender.advance(f"p-{transfer}", 64, blocks[transfer][0])
    for number, transfer in enumerate(ids):
        assert receiver.await_report(f"d-{transfer}")
        assert receiver.holds(700 + number, blocks[transfer][1])


# F34


def test_memory_does_not_grow_with_transfers(
    new_side: NewSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F34: 700 transfers over tcp, every sixteenth of them aborted, leave no memory behind once tables are full."""
    caplog.set_level(logging.ERROR, "neuron_pushkv")  # pytest keeps what is logged.
    # Bounded anyway; so that they are full before we look.
    monkeypatch.setattr(sources, "REMEMBERED_TRANSFERS", 64)
    monkeypatch.setattr(home, "REPEATED_REQUESTS", 64)
    settings = {"keep_delivered_seconds": 0, "keep_unclaimed_seconds": 0.01}
    sender = new_side("sender", transport=FabricTransport(provider="tcp"), **settings)
    receiver = new_side("receiver", transport=FabricTransport(provider="tcp"))
    seen: list[tuple[int, int, int]] = []
    for number in range(1801):
        if number in {1100, 1800}:
            until(lambda: (sender.step(), sender.engine._outbound.sources == [])[1], "letting go of all sources")
            for side in (sender, receiver):
                for told in (side.finished, side.failed, side.freed):
                    told.clear()
            gc.collect()
            seen.append((sys.getallocatedblocks(), native_bytes(), resident_bytes()))
        sender.prefill(f"p{number}", number, 64, [1, 2, 3, 4], f"t{number}")
        receiver.receive(f"d{number}", number, 64, [5, 6, 7, 8], sender, f"t{number}")
        if number % 16 == 0:
            receiver.withdraw(f"d{number}")
        assert receiver.await_report(f"d{number}") or number % 16 == 0
        sender.finish(f"p{number}")
    assert receiver.stats["transfers"]["in:completed"] >= 1680
    objects, native, resident = (after - before for before, after in zip(*seen, strict=True))
    assert objects < 200, "Python objects"
    assert native < 64 * 1024
    # libfabric's pools are taken through in turn, so that their pages appear one after the other.
    assert resident < 2 * 1024 * 1024


def test_slots_are_used_again_and_never_while_taken() -> None:
    """F34: the table of slots stays small, and a slot comes back with another epoch, after all the others."""
    table = SlotTable()
    taken = [table.take() for _ in range(50)]
    for _ in range(10_000):
        fresh = table.take()
        assert fresh is not None
        assert fresh not in taken
        table.give_back(fresh[0])
    last: dict[int, tuple[int, int]] = {}
    for number in range(5_000):
        slot, epoch = table.take() or (-1, -1)
        assert 0 <= slot < 50 + RESTING + 50
        if slot in last:
            before, old = last[slot]
            assert (number - before >= RESTING, epoch) == (True, old + 1)
        last[slot] = (number, epoch)
        table.give_back(slot)


# F37


def test_an_engine_that_keeps_kv_sleeps(new_side: NewSide) -> None:
    """F37: two engines with KV kept for nobody and a receiver that waits use under a tenth of a core each."""
    sender = new_side("sender", transport=FabricTransport(provider="tcp"))
    receiver = new_side("receiver", transport=FabricTransport(provider="tcp"))
    for number in range(8):
        sender.prefill(f"p{number}", number, 64, [4 * number + each for each in range(4)], f"t{number}")
        sender.finish(f"p{number}")
    sender.offer("slow", 100, 64, "slow")
    receiver.receive("waits", 100, 64, [1, 2, 3, 4], sender, "slow")
    until(lambda: len(sender.engine._outbound) == 1, "the registration")
    seconds = 1.5
    before = time.process_time()
    time.sleep(seconds)
    assert time.process_time() - before < 2 * 0.1 * seconds
    assert sender.directory.kept() == 8
    sender.seal("slow", 100, [40, 41, 42, 43])
    assert receiver.await_report("waits")
