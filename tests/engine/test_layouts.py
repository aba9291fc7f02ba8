"""KV between engines whose caches differ, on real engines: every row is compared, and all else must stay blank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.transport.fates import Fail
from neuron_pushkv.transport.faults import FaultyTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from neuron_pushkv.wire import Rank
from tests.engine.conftest import NewEngine
from tests.engine.ranks import Engine, ranks, table
from tests.engine.sides import until
from tests.layouts import Cache, cache, grouped

TOKENS = 75


def push(sender: Engine, receiver: Engine, source: Sequence[int], target: Sequence[int], tokens: int = TOKENS) -> None:
    """In three chunks that divide no block, with a receiver that is there from the start."""
    sender.offer("p", 1, tokens)
    receiver.receive("d", 1, tokens, [target], sender)
    for done in (tokens // 3, 2 * tokens // 3 + 1, tokens):
        sender.compute("p", 1, done, [source])
    sender.finish("p")
    assert receiver.received("d")
    receiver.check(1, 0, tokens, [target])


def let_go(sender: Engine) -> None:
    """All ranks have let go of it, long before what nobody asked for would be."""
    until(lambda: (sender.step(), sender.freed == ["p"])[1], "the sender's blocks", 4.0)


# F23: other numbers of ranks.


@pytest.mark.parametrize(
    ("senders", "receivers", "heads"),
    [(4, 1, 4), (1, 4, 4), (2, 4, 8), (4, 2, 4), (4, 1, 2), (1, 4, 2), (2, 8, 4), (8, 2, 4), (4, 4, 2), (8, 4, 1)],
)
@pytest.mark.parametrize("order", ["LBHNC", "BLNHC"])
def test_other_numbers_of_ranks(new_engine: NewEngine, senders: int, receivers: int, heads: int, order: str) -> None:
    """Heads split, put together and, where there are fewer of them than ranks, taken from one of several copies."""
    sender = new_engine("sender", ranks(senders, heads=heads, order=order))
    receiver = new_engine("receiver", ranks(receivers, heads=heads, order="LBNHC", kv="together"))
    push(sender, receiver, table(TOKENS, 16, 1), table(TOKENS, 16, 2))
    let_go(sender)


@pytest.mark.parametrize(("senders", "receivers"), [(4, 1), (1, 4), (4, 4), (2, 4)])
def test_latents_are_the_same_on_all_ranks(new_engine: NewEngine, senders: int, receivers: int) -> None:
    """MLA: each receiver takes it from one sender; senders that nobody asks let go with the others."""
    sender = new_engine("sender", ranks(senders, kv="latent"))
    receiver = new_engine("receiver", ranks(receivers, kv="latent"))
    push(sender, receiver, table(TOKENS, 16, 1), table(TOKENS, 16, 2))
    assert sender.writes <= 2 * 5 * receivers * 3, "no receiver takes it twice"
    let_go(sender)


def test_layers_from_pipeline_ranks(new_engine: NewEngine) -> None:
    """A sender of two stages and two tensor ranks; the receiver has all layers and half as many ranks."""
    stages = {0: ["a", "b", "c"], 1: ["d"]}
    caches = {
        Rank(pp=pp, tp=tp): cache(layers=names, heads=4, tp=(tp, 2)) for pp, names in stages.items() for tp in range(2)
    }
    sender = new_engine("sender", caches)
    receiver = new_engine("receiver", ranks(1, layers=["a", "b", "c", "d"], heads=4, order="BLNHC"))
    push(sender, receiver, table(TOKENS, 16, 1), table(TOKENS, 16, 2))
    let_go(sender)


def test_layers_that_no_rank_has_are_refused_by_name(new_engine: NewEngine) -> None:
    sender = new_engine("sender", ranks(1, layers=["a", "b"]))
    receiver = new_engine("receiver", ranks(1, layers=["a", "b", "c"]))
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, [table(TOKENS, 16, 2)], sender)
    assert not receiver.received("d")
    receiver.check(1, 0, 0, [[]])


def test_one_of_several_ranks_fails_late(new_engine: NewEngine, network: LoopbackNetwork) -> None:
    """No part of the receiver's memory is given back before all of it is quiet, and nobody reports a success."""
    transports = iter([network.transport(), FaultyTransport(network.transport(), Fail(7))])
    sender = new_engine("sender", ranks(2, heads=4, blocks=16), transport=lambda: next(transports))
    receiver = new_engine("receiver", ranks(1, heads=4, blocks=16))
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, [table(TOKENS, 16, 2)], sender)
    sender.compute("p", 1, TOKENS, [table(TOKENS, 16, 0, 2)])
    sender.finish("p")
    assert not receiver.received("d")
    (engine,) = receiver.ranks.values()
    assert len(engine._inbound) == 0
    until(lambda: (sender.step(), all(not len(one._outbound) for one in sender.ranks.values()))[1], "both ends")
    # Another receiver takes its place, from the rank that had delivered its half too.
    receiver.receive("again", 1, TOKENS, [table(TOKENS, 16, 2)], sender)
    assert receiver.received("again")
    receiver.check(1, 0, TOKENS, [table(TOKENS, 16, 2)])


# F24, F25: other block sizes and orders.


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 16), (32, 128), (16, 24), (24, 16)])
def test_other_block_sizes(new_engine: NewEngine, ours: int, theirs: int) -> None:
    sender = new_engine("sender", ranks(1, block_size=ours, blocks=16))
    receiver = new_engine("receiver", ranks(1, block_size=theirs, blocks=16))
    push(sender, receiver, table(150, ours, 1), table(150, theirs, 2), tokens=150)


def test_prefix_hit_with_other_block_sizes(new_engine: NewEngine) -> None:
    sender = new_engine("sender", ranks(1, block_size=16, blocks=16))
    receiver = new_engine("receiver", ranks(1, block_size=24, blocks=16))
    sender.offer("p", 1, 100)
    sender.compute("p", 1, 100, [table(100, 16, 1)])
    receiver.receive("d", 1, 100, [table(100 - 48, 24, 2)], sender, start=48)
    assert receiver.received("d")
    receiver.check(1, 48, 100, [table(100 - 48, 24, 2)])


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("kv", ["apart", "together", "rows"])
def test_other_orders(new_engine: NewEngine, order: str, kv: str) -> None:
    sender = new_engine("sender", ranks(2, heads=4, order=order, kv=kv))
    receiver = new_engine("receiver", ranks(2, heads=4, order="BLHNC", kv="together"))
    push(sender, receiver, table(TOKENS, 16, 1), table(TOKENS, 16, 2))


# Small writes are packed, or refused.


@pytest.mark.parametrize("staging", [1 << 20, 4096])
@pytest.mark.parametrize("groups", [False, True])
def test_small_writes_are_packed(new_engine: NewEngine, staging: int, groups: bool) -> None:
    """Tokens first into heads first: rows of 4 bytes each. With room for one block at a time too."""
    shape = two_groups if groups else ranks
    sender = new_engine(
        "sender",
        shape(1, heads=4, order="LBNHC", blocks=32),
        smallest_write_bytes=64,
        staging_bytes=staging,
    )
    receiver = new_engine("receiver", shape(1, heads=4, blocks=32))
    tokens, target = 150, [table(150, 16, 2, 3), *([[30, 1, 4, 0]] if groups else [])]
    source = [table(150, 16, 1, 2), *([[-1] * 6 + [9, 7, 5, 3]] if groups else [])]
    sender.offer("p", 1, tokens)
    receiver.receive("d", 1, tokens, target, sender)
    for done in (50, 101, tokens):
        sender.compute("p", 1, done, [source[0], *([source[1] if done == tokens else []] if groups else [])])
    sender.finish("p")
    assert receiver.received("d")
    receiver.check(1, 0, tokens, target)
    let_go(sender)
    assert sender.writes <= 10 * 4 * 4 + 16, "heads and layers, K and V: not one for each token"
    (engine,) = sender.ranks.values()
    pool = engine._posting.pool
    assert pool is not None
    assert pool.largest == pool.total, "all room is free again"
    assert pool.held == 0


def test_writes_that_stay_small_are_refused_with_both_layouts(
    new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sender = new_engine("sender", ranks(4, heads=4, order="LBNHC"), smallest_write_bytes=64)
    receiver = new_engine("receiver", ranks(1, heads=4, order="LBNHC"))
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, [table(TOKENS, 16, 2)], sender)
    assert not receiver.received("d")
    lines = until(
        lambda: [one for one in (record.getMessage() for record in caplog.records) if "request=d " in one], "a line"
    )
    assert "smallest_write_bytes (64)" in lines[0]


# F26: several groups.


def two_groups(tp: int = 1, window: int = 40, **shape: object) -> dict[Rank, Cache]:
    """Layers with full attention and layers with a sliding window."""
    full, sliding = ranks(tp, layers=["f0", "f1"], **shape), ranks(tp, layers=["s0"], window=window, **shape)
    return {rank: grouped(full[rank], sliding[rank]) for rank in full}


def test_window_moves_when_the_prompt_is_complete(new_engine: NewEngine) -> None:
    """Full attention streams; of a window only what the next token sees is moved, from blocks that vLLM still has."""
    sender = new_engine("sender", two_groups(2, heads=4, blocks=32))
    receiver = new_engine("receiver", two_groups(1, heads=4, blocks=32, order="BLNHC"))
    tokens, sliding = 150, sender.groups[1]
    begins = sliding.first_token(0, tokens) // 16
    assert begins == 6
    full, window = table(tokens, 16, 1), table(tokens, 16, 14)
    target = [table(tokens, 16, 2), list(range(20, 20 + 10 - begins))]
    sender.offer("p", 1, tokens)
    receiver.receive("d", 1, tokens, target, sender)
    for done in (50, 101):
        sender.compute("p", 1, done, [full, []])
    sender.compute("p", 1, tokens, [full, [-1] * begins + window[begins:]])
    sender.finish("p")
    assert receiver.received("d")
    receiver.check(1, 0, tokens, target)
    let_go(sender)


def test_window_that_the_sender_has_lost_fails_the_whole(new_engine: NewEngine) -> None:
    sender, receiver = new_engine("sender", two_groups()), new_engine("receiver", two_groups())
    target = [table(TOKENS, 16, 0), [5, 6, 7]]
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, target, sender)
    sender.compute("p", 1, TOKENS, [table(TOKENS, 16, 1), [-1, -1, -1, 6, 7]])
    assert not receiver.received("d")


def test_one_group_fails(new_engine: NewEngine, network: LoopbackNetwork) -> None:
    """No partial success: the window's write fails, after all else has arrived."""
    faulty = FaultyTransport(network.transport(), Fail(20))
    sender = new_engine("sender", two_groups(blocks=16), transport=lambda: faulty)
    receiver = new_engine("receiver", two_groups(blocks=16))
    sender.offer("p", 1, TOKENS)
    receiver.receive("d", 1, TOKENS, [table(TOKENS, 16, 0), [8, 9, 10]], sender)
    sender.compute("p", 1, TOKENS, [table(TOKENS, 16, 0, 2), [-1, -1, 8, 9, 10]])
    assert not receiver.received("d")


# What can't be mapped is refused at connect, with both values.


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"heads": 8}, ("4", "8")),
        ({"dim_bytes": 8, "heads": 4}, ("4", "8")),
        ({"kernel": "another", "heads": 4, "kv": "packed"}, ("rows", "another")),
    ],
)
def test_mismatch_names_both(
    new_engine: NewEngine, caplog: pytest.LogCaptureFixture, shape: dict[str, object], said: tuple[str, str]
) -> None:
    sender, receiver = new_engine("sender", ranks(1, heads=4)), new_engine("receiver", ranks(1, **shape))
    text = receiver.groups[0].block_size
    sender.offer("p", 1, 16)
    receiver.receive("d", 1, text, [[2]], sender)
    assert not receiver.received("d")
    line = until(
        lambda: [one for one in (record.getMessage() for record in caplog.records) if "request=d " in one], "a line"
    )[0]
    assert str(Reason.LAYOUT_MISMATCH) in line
    assert all(value in line for value in said)


def test_ranks_that_do_not_divide_the_heads(new_engine: NewEngine) -> None:
    caches = {Rank(tp=rank): cache(tp=(0, 1), heads=4) for rank in range(3)}
    sender, receiver = new_engine("sender", caches), new_engine("receiver", ranks(1, heads=4))
    receiver.receive("d", 1, 16, [[2]], sender)
    assert not receiver.received("d")
