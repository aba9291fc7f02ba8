"""What is particular to NIXL: how a batch is cut, what notifications are credited for, and who chooses it."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Memory, MemoryKind
from neuron_pushkv.errors import FabricError, RegistrationError, TransportError
from neuron_pushkv.transport.base import Arrived, Product, Registration, Span, SpanTable, Written, immediate
from neuron_pushkv.transport.choosing import open_transport
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.nixl import agent
from neuron_pushkv.transport.nixl.parts import PART_BYTES, PART_WRITES, Rows, cut, resolve
from neuron_pushkv.transport.nixl.wire import (
    Notification,
    Place,
    Window,
    pack_address,
    unpack_address,
    unpack_notification,
    unpack_place,
)
from tests.transport.conftest import NIXL, Pair, first_library, join, make_pair
from tests.transport.side import NearSide, eventually, table
from tests.transport.side import open_transport as open_named

CPU: Any = SimpleNamespace(name="cpu", needs_flush=False, export=None, hint="")
GPU: Any = SimpleNamespace(name="cuda", needs_flush=True, export=None, hint="no GPU is the reason")

runs_of = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 1 << 19)), min_size=1, max_size=400
)


def spans(count: int, devices: bool) -> Rows:
    """Places of ``count`` spans, some on GPUs where ``devices``."""
    index = np.arange(count, dtype=np.uint64)
    kind = index % 2 if devices else index * 0
    here = (index << np.uint64(32), index // 2, kind)
    there = ((index + np.uint64(count)) << np.uint64(32), index // 3, kind * 0)
    return Rows(here, there, table([(0, 0, 1)]))


@given(runs_of, st.integers(1, 9), st.booleans(), st.booleans(), st.booleans())
def test_parts_hold_every_write_once_and_no_more_than_they_may(
    runs: list[tuple[int, int, int]], count: int, devices: bool, touch_here: bool, touch_there: bool
) -> None:
    # Where runs touch, each begins where the one before ends.
    ends = np.cumsum([0] + [run[2] for run in runs]).tolist()
    runs = [
        (end if touch_here else run[0], end + 7 if touch_there else run[1], run[2])
        for end, run in zip(ends, runs, strict=False)
    ]
    product = spans(count, devices)
    product = Rows(product.local, product.remote, table(runs))
    parts = list(cut([product, product]))
    assert sum(part.writes for part in parts) == 2 * count * len(runs)
    assert sum(part.bytes for part in parts) == 2 * count * sum(run[2] for run in runs)
    for part in parts:
        assert 1 <= len(part.local) == len(part.remote) <= part.writes <= PART_WRITES
        assert int(part.local[:, 1].sum()) == part.bytes
        assert part.local.flags.c_contiguous
        assert len(part.local) == 1 or part.bytes - int(part.local[-1, 1]) < PART_BYTES
    # Byte by byte would be long: rows, cut back into the writes that they were merged from, are those asked for.
    wanted = sorted(
        (a + run[0], b + run[1], run[2])
        for a, b in zip(product.local[0].tolist(), product.remote[0].tolist(), strict=True)
        for run in runs
    )
    got = []
    for part in parts[: len(parts) // 2]:
        for (source, size, _), (target, _, _) in zip(part.local.tolist(), part.remote.tolist(), strict=True):
            got.append((source, target, size))
    assert covered(got) == covered(wanted)
    if touch_here and touch_there and not devices:
        assert len(got) < len(wanted) or len(runs) == 1


def covered(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Rows, joined wherever they touch on both sides."""
    joined: list[tuple[int, int, int]] = []
    for source, target, size in sorted(rows):
        if joined and joined[-1][0] + joined[-1][2] == source and joined[-1][1] + joined[-1][2] == target:
            joined[-1] = (*joined[-1][:2], joined[-1][2] + size)
        else:
            joined.append((source, target, size))
    return joined


def test_a_part_is_of_one_kind_of_memory_on_either_side() -> None:
    parts = list(cut([spans(6, devices=True)]))
    assert [part.local_kind for part in parts] == [MemoryKind.HOST, MemoryKind.CUDA] * 3
    assert {part.remote_kind for part in parts} == {MemoryKind.HOST}
    assert [int(part.local[0, 2]) for part in parts] == [0, 0, 1, 1, 2, 2]
    assert [int(part.remote[0, 2]) for part in parts] == [0, 0, 0, 1, 1, 1]


def test_nothing_is_laid_out_before_it_is_asked_for() -> None:
    index = np.arange(1 << 20, dtype=np.uint64)
    places = (index, index * 0, index * 0)
    runs = np.stack((index, index, index * 0 + 1), axis=1)
    assert next(cut([Rows(places, places, runs)])).writes == PART_WRITES  # 2 ** 40 writes in all


def test_places_are_looked_up_with_their_devices() -> None:
    memory = Memory(1000, 500, MemoryKind.CUDA, 3)
    span = Span(Registration(7, memory, b""), 1100, 9, 50)
    rows = resolve(
        Product(SpanTable([span]), table([(0, 0, 400)])), {7: Place(1000, 500, 3, 1)}, {9: Place(5000, 450, 1, 0)}
    )
    assert [column.tolist() for column in rows.local] == [[1100], [3], [1]]
    assert [column.tolist() for column in rows.remote] == [[5050], [1], [0]]


@given(st.lists(st.integers(1, 3000), max_size=200))
def test_a_number_is_new_once(numbers: list[int]) -> None:
    window, seen = Window(), set[int]()
    for number in numbers:
        new = window.is_new(number)
        assert not (new and number in seen)
        assert new or number in seen or max(seen) - number >= 1024
        seen.add(number)


def test_numbers_out_of_order_are_new() -> None:
    numbers = list(range(1, 5000))
    rng = random.Random(3)
    for start in range(0, len(numbers), 64):
        block = numbers[start : start + 64]
        rng.shuffle(block)
        numbers[start : start + 64] = block
    window = Window()
    assert all(window.is_new(number) for number in numbers)
    assert not any(window.is_new(number) for number in numbers)
    assert window.is_new((1 << 64) - 1)
    assert not window.is_new(4999)


@given(st.integers(1, (1 << 64) - 1), st.integers(0, (1 << 32) - 1), st.integers(1, (1 << 32) - 1))
def test_notifications_travel_whole(number: int, value: int, writes: int) -> None:
    message = Notification(number, value, writes).pack()
    assert unpack_notification(message) == (number, value, writes)
    for broken in (message[:-1], message + b"\0", b"x" + message[1:], Notification(number, value, 0).pack(), b""):
        assert unpack_notification(broken) is None


def test_addresses_of_another_backend_are_refused_with_both_named() -> None:
    address = pack_address("nixl/LIBFABRIC", b"metadata")
    assert unpack_address("nixl/LIBFABRIC", address) == b"metadata"
    with pytest.raises(TransportError, match="'nixl/LIBFABRIC', ours of 'nixl/UCX'; set the same nixl_backend"):
        unpack_address("nixl/UCX", address)


def test_descriptions_keep_device_and_kind() -> None:
    place = Place((1 << 64) - 1, 12, 7, 1)
    assert unpack_place(place.pack()) == place
    with pytest.raises(TransportError, match="not a description of memory"):
        unpack_place(Place(1, 1, 0, 2).pack())


def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    agent.bindings.cache_clear()
    find = importlib.util.find_spec
    monkeypatch.setattr(agent, "find_spec", lambda name: None if name.startswith("nixl") else find(name))
    with pytest.raises(FabricError, match=r"pip install 'neuron-pushkv\[nixl\]'"):
        open_transport(ConnectorSettings(transport="nixl"), CPU, ())
    agent.bindings.cache_clear()


@pytest.mark.parametrize(
    ("transport", "provider", "accelerator", "nixl"),
    [
        ("auto", "shm", GPU, True),
        ("auto", "tcp", GPU, False),
        ("auto", "shm", CPU, False),
        ("fabric", "shm", GPU, False),
        ("nixl", "tcp", CPU, True),
    ],
)
def test_the_settings_choose(
    monkeypatch: pytest.MonkeyPatch, transport: Any, provider: Any, accelerator: Any, nixl: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("neuron_pushkv.transport.nixl.NixlTransport", lambda *given: asked.append(("nixl", *given)))
    monkeypatch.setattr(
        "neuron_pushkv.transport.fabric.FabricTransport",
        lambda *given, **named: asked.append(("fabric", *given, named)),
    )
    settings = ConnectorSettings(transport=transport, provider=provider, nixl_backend="X", progress_core=1)
    open_transport(settings, accelerator, ())
    named = {
        "nics": (),
        "preferred": True,
        "flush": accelerator is GPU,
        "core": 1,
        "device": MemoryKind.HOST,
        "export": None,
        "hint": accelerator.hint,
    }
    assert asked == [("nixl", "X") if nixl else ("fabric", provider, None, "127.0.0.1", named)]


@pytest.fixture(params=[NIXL], ids=["nixl"])
def nixl_pair(request: pytest.FixtureRequest, far_sides: Any) -> Iterator[Pair]:
    yield from make_pair(request.param, far_sides)


def say(side: NearSide, peer: int, message: bytes) -> None:
    """Send a bare notification, as only a peer gone wrong would."""
    agent = side.transport._peers[peer].agent  # type: ignore[attr-defined]
    agent._agent.genNotif(agent.remote, message, [agent._backend])


def test_notifications_that_are_wrong_are_counted_and_hurt_nobody(nixl_pair: Pair) -> None:
    pair, near, far = nixl_pair, nixl_pair.near, nixl_pair.far
    far.expect(1, 0)
    far.goal(1, 0, 7)
    good = Notification(1, immediate(1, 0), 3).pack()
    for message in (b"garbage", b"", good, good, Notification(2, immediate(1, 0), 0).pack()):
        say(near, pair.ours, message)
    say(near, pair.ours, Notification(3, immediate(1, 9), 5).pack())  # of an epoch that nobody expects
    say(near, pair.ours, Notification(4, immediate(1, 0), 4).pack())
    assert far.events(1, Arrived) == [Arrived(1, 0, 7)]
    counters = far.counters()
    assert (counters.arrivals, counters.stale_arrivals, counters.errors) == (7, 5, 4)


def test_notifications_in_anothers_name_are_not_credited(nixl_pair: Pair) -> None:
    pair, near, far = nixl_pair, nixl_pair.near, nixl_pair.far
    far.expect(1, 0)
    # A stranger that has got hold of an endpoint's address, and writes there.
    stranger = NearSide(open_named(pair.kind.provider))
    ours, address = near.open_peer()
    theirs, their_address = far.open_peer()
    near.connect(ours, their_address)
    far.connect(theirs, address)
    intruder, _ = stranger.open_peer()
    stranger.connect(intruder, their_address)
    ticket = stranger.write(intruder, pair.window, [(0, 0, 8)], immediate(1, 0))
    assert stranger.events(1, Written) == [Written(ticket.id)]
    eventually(lambda: far.counters().errors == 1, "the stranger's is seen")
    assert far.count(1, 0) == 0
    stranger.close()


def test_what_nixl_lacks_is_named(nixl_pair: Pair) -> None:
    with pytest.raises(FabricError, match=r"no backend 'Y'; set nixl_backend to one of .*UCX"):
        open_named("nixl/Y")
    with pytest.raises(RegistrationError, match="can't register 4096 bytes of cuda memory"):
        nixl_pair.near.transport.register(Memory(nixl_pair.near.start, 4096, MemoryKind.CUDA, 0))


def test_the_fence_is_final_only_where_it_is(nixl_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nixl_pair.near.transport.fence_is_final
    assert nixl_pair.near.transport.provider == "nixl/UCX"
    assert nixl_pair.near.transport.library.startswith("NIXL ")
    monkeypatch.setenv("UCX_TLS", "tcp,cma")
    other = open_named("nixl/UCX")
    assert not other.fence_is_final
    other.close()


def test_memory_that_comes_later_is_known_to_peers_that_come_later(nixl_pair: Pair) -> None:
    near, far = nixl_pair.near, nixl_pair.far
    other = NearSide(open_named(nixl_pair.kind.provider))
    early, _ = join(other, near)
    later = np.zeros(4096, dtype=np.uint8)
    registration = near.transport.register(Memory(later.ctypes.data, 4096))
    with pytest.raises(TransportError, match="when it gave its address"):
        other.transport.attach(early, registration.description)
    late, _ = join(other, near)
    other.fill(0, b"late" * 1024)
    near.expect(4, 4)
    near.goal(4, 4, 1)
    other.write(late, registration.description, [(0, 0, 4096)], immediate(4, 4))
    assert near.events(1, Arrived) == [Arrived(4, 4, 1)]
    assert later.tobytes() == b"late" * 1024
    other.write(late, near.window(), [(0, 0, 4096)], immediate(4, 4))
    eventually(lambda: near.count(4, 4) == 2, "what was registered before is known too")
    near.transport.deregister(registration)
    other.close()
    assert far.counters().errors == 0


def test_libfabric_is_opened_with_its_settings() -> None:
    settings = ConnectorSettings(provider="tcp", libfabric=first_library())
    transport = open_transport(settings, CPU, ())
    assert isinstance(transport, FabricTransport)
    transport.close()
