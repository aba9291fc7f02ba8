"""What the tests of the bounce path share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from tests.engine.sides import BLOCK_BYTES, BLOCK_SIZE, LAYERS, Side, until

NewSide: TypeAlias = Callable[..., Side]
FRAME = LAYERS * BLOCK_BYTES
"""Bytes of one block in the staging cache."""
SOURCE = [9, 8, 7, 20, 21, 30, 2, 3]
OTHER = [50, 51, 53, 52, 60, 61, 62, 70]
TARGET = [40, 3, 5, 6, 4, 90, 91, 92]
TOKENS = 8 * BLOCK_SIZE - 3


def compute(sender: Side, tokens: int, blocks: list[int]) -> None:
    """A prefill step: fill the blocks up to there, then say so."""
    used = blocks[: -(-tokens // BLOCK_SIZE)]
    sender.fill(1, used)
    sender.advance("p", tokens, used)


def taken(side: Side) -> int:
    """Bytes that are taken of its staging cache, if it has one."""
    return side.engine._bounce.cache.used_bytes if side.engine._bounce else 0


def idle(*sides: Side) -> None:
    """Everything has ended, and all room in staging memory is free again."""
    for side in sides:
        until(lambda side=side: not len(side.engine._outbound) and not taken(side), "an empty engine")
        assert len(side.engine._inbound) == 0


def logged(caplog: pytest.LogCaptureFixture, request: str) -> str:
    """The line of a receive that has failed."""
    wanted = f"request={request} "
    lines = until(lambda: [line for line in (one.getMessage() for one in caplog.records) if wanted in line], "a line")
    return str(lines[0])


def blocks_of(number: int) -> list[int]:
    """Eight blocks that no other number has."""
    return list(range(8 * number, 8 * number + 8))


def crowd(sender: Side, receiver: Side, count: int) -> None:
    """That many receives of prompts that are still to be computed."""
    for number in range(count):
        sender.offer(f"p{number}", number, TOKENS, f"t{number}")
        receiver.receive(f"d{number}", number, TOKENS, blocks_of(number), sender, f"t{number}")
