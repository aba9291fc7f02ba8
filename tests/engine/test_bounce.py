"""Caches that the network can't be shown: every byte passes through the staging cache, and the right ones arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.orders import StepOrders
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from tests.engine.bouncing import FRAME, SOURCE, TARGET, TOKENS, NewSide, compute, idle
from tests.engine.conftest import NewEngine, free_port
from tests.engine.hidden import HiddenAccelerator
from tests.engine.ranks import ranks, table
from tests.engine.sides import BLOCK_SIZE, BLOCKS, Side, order, until
from tests.engine.test_layouts import push, two_groups
from tests.engine.test_processes import Sender

# The way through.


@pytest.mark.parametrize("bounced", ["sender", "receiver", "both"])
def test_every_byte_arrives(
    new_side: NewSide, device: HiddenAccelerator, other: HiddenAccelerator, bounced: str
) -> None:
    sender = new_side("sender", hidden=device if bounced != "receiver" else None)
    receiver = new_side("receiver", hidden=other if bounced != "sender" else None)
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    for tokens in (40, 80, TOKENS):
        compute(sender, tokens, SOURCE)
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    assert receiver.others_blank(TARGET)
    assert receiver.stats["bytes"] == {"in": len(TARGET) * FRAME}
    assert device.copied == (len(SOURCE) * FRAME if bounced != "receiver" else 0)
    assert other.copied == (len(TARGET) * FRAME if bounced != "sender" else 0)
    idle(sender, receiver)


def test_from_one_process_to_another() -> None:
    """Over tcp, with both caches hidden; and what was there before a prefix hit stays."""
    hidden = HiddenAccelerator()
    sender = Sender("tcp", free_port(), hidden=True)
    try:
        with Side(
            "receiver", FabricTransport(provider="tcp"), ConnectorSettings(port=free_port()), hidden=hidden
        ) as receiver:
            sender.do("prefill", "p", 1, TOKENS, SOURCE)
            receiver.step(StepOrders(receives=(order("d", 1, TOKENS, TARGET[2:], sender.settings, "t", 32),)))
            assert receiver.await_report("d")
            assert receiver.holds(1, TARGET[2:], first=2)
            assert receiver.others_blank(TARGET[2:])
    finally:
        sender.close()
        hidden.close()


@pytest.mark.parametrize("tokens", [40 * BLOCK_SIZE, 37 * BLOCK_SIZE + 5])
def test_prompt_through_a_small_part_of_it(
    new_side: NewSide, device: HiddenAccelerator, other: HiddenAccelerator, tokens: int
) -> None:
    """Ready at once, and several times as long as the room for sending; a second one shares that room."""
    sender = new_side("sender", hidden=device, bounce_bytes=20 * FRAME)
    receiver = new_side("receiver", hidden=other, bounce_bytes=160 * FRAME)
    assert sender.engine._bounce is not None
    assert sender.engine._bounce.cache.sending.blocks == 5
    count = -(-tokens // BLOCK_SIZE)
    source, target = list(range(2, 2 + count)), list(reversed(range(7, 7 + count)))
    second, its_target = list(range(60, 68)), list(range(80, 88))
    sender.prefill("p", 1, tokens, source)
    sender.prefill("q", 2, 128, second, "u")
    receiver.receive("d", 1, tokens, target, sender)
    receiver.receive("e", 2, 128, its_target, sender, "u")
    assert receiver.await_report("d")
    if "e" not in receiver.finished:
        assert receiver.await_report("e")
    assert receiver.holds(1, target)
    assert receiver.holds(2, its_target)
    assert receiver.others_blank(target + its_target)
    idle(sender, receiver)


SHAPES: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"order": "LBHNC"}, {"order": "LBHNC"}),
    ({"order": "BLNHC", "kv": "rows"}, {"order": "BLHNC", "kv": "together", "gap": 8}),
    ({"order": "LBNHC", "gap": 12}, {"order": "LBNHC", "kv": "rows", "block_size": 24}),
    ({"kv": "latent"}, {"kv": "latent", "block_size": 32}),
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (1, 4)])
def test_any_layout_into_any_other(
    new_engine: NewEngine,
    device: HiddenAccelerator,
    other: HiddenAccelerator,
    shapes: tuple[dict[str, object], dict[str, object]],
    senders: int,
    receivers: int,
) -> None:
    ours, theirs = ({"heads": 4, "blocks": 16, **shape} for shape in shapes)
    sender = new_engine("sender", ranks(senders, **ours), hidden=device, bounce_bytes=1 << 16)
    receiver = new_engine("receiver", ranks(receivers, **theirs), hidden=other, bounce_bytes=1 << 16)
    push(sender, receiver, table(75, 16, 1, 2), table(75, int(theirs.get("block_size", 16)), 2))


@pytest.mark.parametrize("smallest", [0, 64])
def test_several_groups(
    new_engine: NewEngine, device: HiddenAccelerator, other: HiddenAccelerator, smallest: int
) -> None:
    """A window moves once, from its own blocks; where heads and tokens are kept in unlike orders it is packed too."""
    shape = {"heads": 4, "blocks": 32}
    sender = new_engine(
        "sender",
        two_groups(1, order="LBNHC", **shape),
        hidden=device,
        smallest_write_bytes=smallest,
        bounce_bytes=20 * 6 * 256,
    )
    receiver = new_engine("receiver", two_groups(1, **shape), hidden=other)
    source, target = [table(150, 16, 1, 2), [-1] * 6 + [9, 7, 5, 3]], [table(150, 16, 2, 3), [30, 1, 4, 0]]
    sender.offer("p", 1, 150)
    receiver.receive("d", 1, 150, target, sender)
    for done in (50, 101, 150):
        sender.compute("p", 1, done, [source[0], source[1] if done == 150 else []])
    sender.finish("p")
    assert receiver.received("d")
    receiver.check(1, 0, 150, target)


def test_layers_go_with_their_step(new_engine: NewEngine, device: HiddenAccelerator, other: HiddenAccelerator) -> None:
    sender = new_engine("sender", ranks(1, layers=["a", "b"]), hidden=device, push_granularity="layer")
    receiver = new_engine("receiver", ranks(1, layers=["a", "b"]), hidden=other)
    sender.offer("p", 1, 75)
    receiver.receive("d", 1, 75, [table(75, 16, 2)], sender)
    for done in (33, 75):
        sender.compute("p", 1, done, [table(75, 16, 1)], layers=["a", "b"])
    assert receiver.received("d")
    receiver.check(1, 0, 75, [table(75, 16, 2)])


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Side, Side]]:
    """Two sides that are both bounced, through little room."""
    network = LoopbackNetwork(unordered=True, seed=3)
    devices = HiddenAccelerator(), HiddenAccelerator()
    made = [
        Side(
            name,
            network.transport(),
            ConnectorSettings(port=free_port(), bounce_bytes=60 * FRAME, keep_delivered_seconds=0),
            hidden=hidden,
        )
        for name, hidden in zip(("sender", "receiver"), devices, strict=True)
    ]
    yield made[0], made[1]
    for side, hidden in zip(made, devices, strict=True):
        side.close()
        hidden.close()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_block_tables(pair: tuple[Side, Side], data: st.DataObject) -> None:
    sender, receiver = pair
    prompt = len(receiver.finished) + 1
    tokens = data.draw(st.integers(1, 40 * BLOCK_SIZE), "tokens")
    count = -(-tokens // BLOCK_SIZE)
    skipped = data.draw(st.integers(0, count - 1), "skipped")
    chance = random.Random(data.draw(st.integers(0, 1 << 30), "seed"))
    source, target = chance.sample(range(BLOCKS), count), chance.sample(range(BLOCKS), count - skipped)
    steps = sorted({*data.draw(st.lists(st.integers(1, tokens), max_size=3), "steps"), tokens})
    late = data.draw(st.booleans(), "late")
    transfer, request = f"t{prompt}", f"d{prompt}"
    receiver.fill(1 << 20, list(range(BLOCKS)))
    sender.offer(f"p{prompt}", prompt, tokens, transfer)

    def receive() -> None:
        receiver.receive(request, prompt, tokens, target, sender, transfer, start=skipped * BLOCK_SIZE)

    if not late:
        receive()
    for done in steps:
        used = source[: -(-done // BLOCK_SIZE)]
        sender.fill(prompt, used)
        sender.advance(f"p{prompt}", done, used)
    if late:
        receive()
    assert receiver.await_report(request)
    assert receiver.holds(prompt, target, first=skipped)
    for block in set(range(BLOCKS)) - set(target):
        assert not receiver.holds(prompt, [block])
    sender.finish(f"p{prompt}")


def test_where_it_is_asked_for(new_engine: NewEngine) -> None:
    """Also memory that the network could be shown, so that small writes from any device can be packed."""
    sender = new_engine("sender", ranks(1, heads=4, order="LBNHC"), smallest_write_bytes=64, bounce="always")
    receiver = new_engine("receiver", ranks(1, heads=4), bounce="always")
    push(sender, receiver, table(75, 16, 1), table(75, 16, 2))
    assert sender.writes <= 10 * 4 * 4 + 16, "heads and layers, K and V: not one for each token"
    for engine in (*sender.ranks.values(), *receiver.ranks.values()):
        assert engine._bounce is not None


# The step has to be over.


def test_nothing_is_read_before_its_step_has_ended(new_side: NewSide, stepping: HiddenAccelerator) -> None:
    """Each step by its own word: the next one being under way holds nothing up, and nothing is taken too early."""
    sender, receiver = new_side("sender", hidden=stepping), new_side("receiver")
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, TARGET, sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    sender.advance("p", 64, SOURCE[:4])
    sender.advance("p", TOKENS, SOURCE)
    sender.fill(1, SOURCE[:4])
    assert stepping.copied == 0
    stepping.finish_step()
    until(lambda: receiver.holds(1, TARGET[:4]), "what the first step has filled")
    assert receiver.blank(TARGET[4:])
    sender.fill(1, SOURCE)
    stepping.finish_step()
    assert receiver.await_report("d")
    assert receiver.holds(1, TARGET)
    assert stepping.copied == len(SOURCE) * FRAME


def test_packing_waits_for_the_step_too(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the first step of all, when nobody has asked for anything to be packed yet."""
    steps = HiddenAccelerator(held=True)
    monkeypatch.setattr("neuron_pushkv.device.host.HostAccelerator.mark_step", lambda _: steps.mark_step())
    sender = new_engine("sender", ranks(1, heads=4, order="LBNHC"), smallest_write_bytes=64)
    receiver = new_engine("receiver", ranks(1, heads=4))
    target = [table(75, 16, 2)]
    sender.offer("p", 1, 75)
    sender.compute("p", 7, 40, [table(75, 16, 1)[2:]])  # Not yet what it is going to be.
    receiver.receive("d", 1, 75, target, sender)
    until(lambda: sender.ranks and all(len(one._outbound) for one in sender.ranks.values()), "the registration")
    sender.compute("p", 7, 75, [table(75, 16, 1)])
    sender.fill(1, 75, [table(75, 16, 1)])
    steps.finish_step()
    steps.finish_step()
    assert receiver.received("d")
    receiver.check(1, 0, 75, target)
