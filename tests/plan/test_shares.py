"""Who sends which heads to whom, by brute force over many sizes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout
from neuron_pushkv.plan.shares import askers, head_range, shares
from tests.layouts import cache

totals = st.sampled_from((1, 2, 3, 4, 8, 12))
sizes = st.integers(1, 32)


def receiver(total: int) -> Layout:
    """Of a model with that many heads."""
    return Layout("rows", 1, (), (), total)


@pytest.mark.parametrize(
    ("total", "ranks", "ranges"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_heads_of_a_rank(total: int, ranks: int, ranges: list[tuple[int, int]]) -> None:
    assert [head_range(total, ranks, rank) for rank in range(ranks)] == ranges


@pytest.mark.parametrize(("total", "ranks"), [(8, 3), (2, 3), (4, 6)])
def test_sizes_that_do_not_divide_are_refused(total: int, ranks: int) -> None:
    said = f"{total} KV heads can't be split over {ranks} tensor parallel ranks"
    for refused in (
        lambda: head_range(total, ranks, 0),
        lambda: shares(receiver(total), (0, ranks), 1),
        lambda: shares(receiver(total), (0, 1), ranks),
        lambda: askers(total, ranks, 0, 1),
        lambda: askers(total, 1, 0, ranks),
    ):
        with pytest.raises(LayoutError, match=said):
            refused()


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(LayoutError, match="no tensor parallel rank 4 of 4"):
        shares(receiver(8), (4, 4), 2)
    with pytest.raises(LayoutError, match="no tensor parallel rank 2 of 2"):
        askers(8, 2, 2, 4)


@pytest.mark.parametrize(
    ("total", "tp", "senders", "expected"),
    [
        (8, (0, 1), 4, {0: (0, 2), 1: (2, 4), 2: (4, 6), 3: (6, 8)}),
        (8, (2, 4), 1, {0: (4, 6)}),
        (8, (1, 2), 4, {2: (4, 6), 3: (6, 8)}),
        (8, (3, 4), 2, {1: (6, 8)}),
        (6, (1, 3), 2, {0: (2, 3), 1: (3, 4)}),
        (2, (0, 1), 8, {0: (0, 1), 4: (1, 2)}),
        (2, (3, 4), 8, {6: (1, 2)}),
        (1, (5, 8), 8, {5: (0, 1)}),
        (1, (5, 8), 2, {1: (0, 1)}),
    ],
)
def test_who_is_asked(total: int, tp: tuple[int, int], senders: int, expected: dict[int, tuple[int, int]]) -> None:
    assert shares(receiver(total), tp, senders) == expected


def test_who_is_asked_for_a_real_cache() -> None:
    assert shares(cache(kv="latent", tp=(1, 2), heads=1).layout, (1, 2), 2) == {1: (0, 1)}
    assert shares(cache(heads=8, tp=(1, 2)).layout, (1, 2), 4) == {2: (4, 6), 3: (6, 8)}


def _divides(total: int, ranks: int) -> bool:
    return total % ranks == 0 or ranks % total == 0


@given(totals, sizes, sizes)
def test_each_receiver_gets_every_head_once_from_one_that_has_it(total: int, senders: int, receivers: int) -> None:
    assume(_divides(total, senders) and _divides(total, receivers))
    asked = [0] * senders
    for rank in range(receivers):
        wanted: list[int] = []
        for sender, (first, end) in shares(receiver(total), (rank, receivers), senders).items():
            held = head_range(total, senders, sender)
            assert held[0] <= first < end <= held[1]
            wanted += range(first, end)
            asked[sender] += 1
        assert sorted(wanted) == list(range(*head_range(total, receivers, rank)))
    assert [askers(total, senders, sender, receivers) for sender in range(senders)] == asked
    if senders > total:  # those that hold the same heads share the work evenly
        copies = senders // total
        for first in range(0, senders, copies):
            load = asked[first : first + copies]
            assert max(load) - min(load) <= 1
