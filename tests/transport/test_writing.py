"""Writes: bytes exact, tickets that end once, ready words, many peers at once."""

from __future__ import annotations

import random
import threading

import pytest

from neuron_pushkv.transport.base import Arrived, Failed, Product, SpanTable, Written, immediate
from tests.transport.conftest import Pair
from tests.transport.side import BUFFER, PATIENCE, eventually, table

PAGE = 4096
ENDED = (Written, Failed)


def pattern(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def test_bytes_and_counts_are_exact_over_many_regions_and_runs(pair: Pair) -> None:
    near, far = pair.near, pair.far
    rng = random.Random(7)
    data = pattern(1, BUFFER)
    near.fill(0, data)
    canary = pattern(2, BUFFER)
    far.fill(0, canary)
    expected = bytearray(canary)

    regions, region = 16, BUFFER // 16
    pages = region // PAGE
    sources, targets = rng.sample(range(pages), 24), rng.sample(range(pages), 24)
    lengths = [rng.choice((1, 3, 64, 100, 1000, PAGE)) for _ in sources]
    runs = [
        (source * PAGE, target * PAGE, length) for source, target, length in zip(sources, targets, lengths, strict=True)
    ]
    spans = []
    for index, other in enumerate(rng.sample(range(regions), regions)):
        spans.append(near.span(pair.ours, pair.window, index * region, other * region))
        for source, target, length in zip(sources, targets, lengths, strict=True):
            place = other * region + target * PAGE
            expected[place : place + length] = data[index * region + source * PAGE :][:length]
    product = Product(SpanTable(spans), table(runs))

    far.expect(5, 9)
    far.goal(5, 9, product.writes)
    ticket = near.transport.write(pair.ours, [product], immediate(5, 9))
    assert (ticket.peer, ticket.writes, ticket.bytes) == (pair.ours, product.writes, product.bytes)
    assert near.events(1, ENDED) == [Written(ticket.id)]
    assert far.events(1, Arrived) == [Arrived(5, 9, product.writes)]
    assert far.read(0, BUFFER) == bytes(expected)
    assert far.count(5, 9) == product.writes
    ours, theirs = near.counters(), far.counters()
    assert (ours.writes, ours.bytes, ours.errors) == (product.writes, product.bytes, 0)
    assert (theirs.arrivals, theirs.stale_arrivals, theirs.errors) == (product.writes, 0, 0)


def test_a_batch_of_several_products_is_one_ticket(pair: Pair) -> None:
    near, far = pair.near, pair.far
    near.fill(0, pattern(3, 64 * PAGE))
    far.expect(0, 0)
    products = [near.product(pair.ours, pair.window, [(i * PAGE, (63 - i) * PAGE, PAGE)]) for i in range(64)]
    ticket = near.transport.write(pair.ours, products, immediate(0, 0))
    assert near.events(1, ENDED) == [Written(ticket.id)]
    eventually(lambda: far.count(0, 0) == ticket.writes == 64, "all counted")
    for i in range(64):
        assert far.read((63 - i) * PAGE, PAGE) == near.read(i * PAGE, PAGE)


def test_large_writes_arrive_whole(pair: Pair) -> None:
    near, far = pair.near, pair.far
    data = pattern(4, 7 << 20)
    near.fill(0, data)
    far.fill(0, bytes(BUFFER))
    far.expect(1, 1)
    ticket = near.write(pair.ours, pair.window, [(0, 1000, len(data))], immediate(1, 1))
    assert near.events(1, ENDED) == [Written(ticket.id)]
    eventually(lambda: far.count(1, 1) == ticket.writes, "all counted")
    assert far.read(0, BUFFER) == bytes(1000) + data + bytes(BUFFER - 1000 - len(data))


def test_an_empty_batch_is_written(pair: Pair) -> None:
    ticket = pair.near.transport.write(pair.ours, [], immediate(0, 0))
    assert (ticket.writes, ticket.bytes) == (0, 0)
    assert pair.near.events(1, ENDED) == [Written(ticket.id)]


def test_a_ticket_ends_exactly_once(pair: Pair) -> None:
    near = pair.near
    tickets = [near.write(pair.ours, pair.window, [(0, 0, 64), (64, 64, 64)], immediate(3, 0)) for _ in range(200)]
    ended = near.events(200, ENDED)
    assert sorted(event.ticket for event in ended if isinstance(event, Written)) == [ticket.id for ticket in tickets]
    pair.near.fence(pair.ours)
    assert near.poll(0.05) == []
    assert near.seen == []


def test_both_sides_write_at_once(pair: Pair) -> None:
    near, far = pair.near, pair.far
    near.expect(1, 1)
    far.expect(2, 1)
    half = BUFFER // 2
    near.fill(0, pattern(5, half))
    far.fill(0, pattern(6, half))
    runs = [(i * PAGE, half + i * PAGE, PAGE) for i in range(half // PAGE)]
    near.write(pair.ours, pair.window, runs, immediate(2, 1))
    far.write(pair.theirs, near.window(), runs, immediate(1, 1))
    near.events(1, Written)
    far.events(1, Written)
    eventually(lambda: near.count(1, 1) == far.count(2, 1) == len(runs), "all counted")
    assert near.read(half, half) == pattern(6, half)
    assert far.read(half, half) == pattern(5, half)


def test_many_peers_are_served_side_by_side(pair: Pair) -> None:
    near, far = pair.near, pair.far
    near.fill(0, pattern(8, BUFFER))
    far.fill(0, bytes(BUFFER))
    peers = [(pair.ours, pair.theirs), *(pair.another() for _ in range(7))]
    part = BUFFER // len(peers)
    for slot in range(len(peers)):
        far.expect(slot, slot)
        far.goal(slot, slot, part // PAGE)
    for slot, (ours, _) in enumerate(peers):
        runs = [(slot * part + i * PAGE, slot * part + i * PAGE, PAGE) for i in range(part // PAGE)]
        near.write(ours, pair.window, runs, immediate(slot, slot))
    near.events(len(peers), Written)
    arrived = far.events(len(peers), Arrived)
    assert sorted(event.slot for event in arrived) == list(range(len(peers)))
    assert far.read(0, BUFFER) == near.read(0, BUFFER)
    # Fencing one on either side leaves the others alone.
    near.fence(peers[0][0])
    far.fence(peers[1][1])
    for ours, _ in peers[2:]:
        near.write(ours, pair.window, [(0, 0, 64)], immediate(0, 0))
    near.events(len(peers) - 2, Written)


def test_nothing_is_posted_before_the_ready_word_is_reached(pair: Pair) -> None:
    near, far = pair.near, pair.far
    far.expect(1, 0)
    far.expect(2, 0)
    word = near.hold(1)  # ready at 1; a step before that on a circle of 32 bits is 0
    near.fill(0, b"early" * 100)
    held = near.write(pair.ours, pair.window, [(0, 0, 500)], immediate(1, 0), word)
    other = near.write(pair.ours, pair.window, [(0, PAGE, 500)] * 20, immediate(2, 0))
    assert near.events(1, ENDED) == [Written(other.id)]
    assert near.poll(0.05) == []
    assert far.count(1, 0) == 0
    near.fill(0, b"ready" * 100)
    near.release(1)
    assert near.events(1, ENDED) == [Written(held.id)]
    assert far.read(0, 500) == b"ready" * 100
    eventually(lambda: far.count(1, 0) == 1, "counted")


@pytest.mark.parametrize(
    ("value", "word", "reached"), [(5, 5, True), (5, 6, True), (5, 4, False), (2, 0xFFFFFFFF, False)]
)
def test_the_ready_word_is_compared_on_a_circle(pair: Pair, value: int, word: int, reached: bool) -> None:
    near = pair.near
    ready = near.hold(value)
    near.release(word)
    ticket = near.write(pair.ours, pair.window, [(0, 0, 8)], immediate(0, 0), ready)
    if not reached:
        assert near.poll(0.03) == []
        near.release(value + 100)
    assert near.events(1, ENDED) == [Written(ticket.id)]


def test_all_methods_may_be_called_from_many_threads(pair: Pair) -> None:
    near, far = pair.near, pair.far
    threads, rounds = 4, 25
    for slot in range(threads):
        far.expect(slot, 0)
    problems: list[BaseException] = []

    def work(slot: int, ours: int) -> None:
        try:
            for index in range(rounds):
                ticket = near.write(ours, pair.window, [(0, slot * PAGE, 128)] * 4, immediate(slot, 0))
                near.transport.cancel(ticket.id + (1 << 40))
                near.expect(slot, index)
                near.goal(slot, index, 1)
                near.count(slot, index)
                near.counters()
                near.forget(slot)
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    peers = [pair.another()[0] for _ in range(threads)]
    workers = [threading.Thread(target=work, args=(slot, ours)) for slot, ours in enumerate(peers)]
    for worker in workers:
        worker.start()
    ended = near.events(threads * rounds, ENDED)
    for worker in workers:
        worker.join(PATIENCE)
    assert problems == []
    assert all(isinstance(event, Written) for event in ended)
    eventually(lambda: all(far.count(slot, 0) == 4 * rounds for slot in range(threads)), "all counted")
