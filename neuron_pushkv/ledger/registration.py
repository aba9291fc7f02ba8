"""What a sender checks of a registration before it believes any of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Group
from neuron_pushkv.wire import Register

_BLOCK_ID: np.dtype[np.uint32] = np.dtype("<u4")


@dataclass(frozen=True, eq=False)
class Receiver:
    """The cache that a registration's blocks lie in. ``total``: block ids below it exist; ``units``: tokens of each
    group that move together; ``blocks``: those of the registration, one table per group."""

    total: int
    groups: tuple[Group, ...]
    units: tuple[int, ...]
    blocks: tuple[NDArray[np.uint32], ...] = ()


class BadRegistration(Exception):
    """``str()`` says what is wrong."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def checked(message: Register, receiver: Receiver) -> Receiver:
    """``receiver`` with the registration's blocks. Raises :class:`BadRegistration`."""
    start, end = message.start_token, message.end_token
    if not 0 <= start < end:
        raise BadRegistration(Reason.BAD_RANGE, f"tokens {start} to {end}")
    if len(message.blocks) != len(receiver.groups):
        text = f"blocks of {len(message.blocks)} KV cache groups came for {len(receiver.groups)}"
        raise BadRegistration(Reason.BAD_BLOCKS, text)
    tables = []
    for group, packed in zip(receiver.groups, message.blocks, strict=True):
        if start % group.block_size:
            text = f"tokens {start} to {end} with blocks of {group.block_size}"
            raise BadRegistration(Reason.BAD_RANGE, text)
        needed = group.blocks_for(group.first_token(start, end), end)
        if len(packed) != needed * _BLOCK_ID.itemsize:
            text = f"{needed} blocks are needed, {len(packed) / _BLOCK_ID.itemsize:g} came"
            raise BadRegistration(Reason.BAD_BLOCKS, text)
        table = np.frombuffer(packed, dtype=_BLOCK_ID)
        ordered = np.sort(table)
        if (ordered[1:] == ordered[:-1]).any():
            raise BadRegistration(Reason.BAD_BLOCKS, f"{needed} different blocks are needed; some came twice")
        if ordered[-1] >= receiver.total:
            text = f"block ids {ordered[0]} to {ordered[-1]} in a cache of {receiver.total} blocks"
            raise BadRegistration(Reason.BAD_BLOCKS, text)
        tables.append(table)
    return Receiver(receiver.total, receiver.groups, receiver.units, tuple(tables))
