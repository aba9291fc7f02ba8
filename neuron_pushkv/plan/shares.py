"""Which rank sends which heads to which: how unlike numbers of tensor parallel ranks meet. Pure.

Heads are numbered over the whole model. A latent (MLA) is one head that every rank holds: it needs no rule of its own.
"""

from __future__ import annotations

from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import Layout

Heads = tuple[int, int]
"""Global head numbers ``[first, end)``."""


def head_range(total: int, ranks: int, rank: int) -> Heads:
    """The KV heads of a rank by vLLM's rule: an even split, or copies of a head where there are more ranks than heads.

    Raises :class:`LayoutError` if neither number divides the other, or there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise LayoutError(f"there is no tensor parallel rank {rank} of {ranks}; give one from 0 to {ranks - 1}")
    if total % ranks and ranks % total:
        raise LayoutError(
            f"{total} KV heads can't be split over {ranks} tensor parallel ranks; choose a size that divides {total}, "
            f"or a multiple of it"
        )
    first = rank * total // ranks
    return first, first + max(1, total // ranks)


def shares(ours: Layout, ours_tp: tuple[int, int], theirs_tp_size: int) -> dict[int, Heads]:
    """Whom a receiver asks for what: sender's tensor parallel rank -> heads; every head that it holds exactly once.

    ``ours`` is the receiver's layout and ``ours_tp`` its (rank, size). Where several senders hold the same head, the
    receivers that want it spread over them. Raises :class:`LayoutError` for sizes that don't divide the heads.
    """
    rank, size = ours_tp
    return _shares(ours.heads, rank, size, theirs_tp_size)


def askers(total: int, sender_size: int, sender_rank: int, receiver_size: int) -> int:
    """How many of one receiving engine's ranks ask this sender rank, of a model with ``total`` KV heads.

    Raises :class:`LayoutError` like :func:`shares`.
    """
    head_range(total, sender_size, sender_rank)
    return sum(sender_rank in _shares(total, rank, receiver_size, sender_size) for rank in range(receiver_size))


def _shares(total: int, rank: int, size: int, sender_size: int) -> dict[int, Heads]:
    first, end = head_range(total, size, rank)
    if sender_size <= total:
        wanted: dict[int, Heads] = {}
        for sender in range(sender_size):
            held_first, held_end = head_range(total, sender_size, sender)
            if max(first, held_first) < min(end, held_end):
                wanted[sender] = max(first, held_first), min(end, held_end)
        return wanted
    head_range(total, sender_size, 0)  # for its refusal
    copies = sender_size // total
    receivers = max(1, size // total)
    mine = rank % receivers * copies // receivers
    return {head * copies + mine: (head, head + 1) for head in range(first, end)}
