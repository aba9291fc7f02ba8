"""How many blocks one merged write carries, by the order in which vLLM's block pools hand blocks out.

    python -m benchmarks.contiguity --json contiguity.json

A prefill and a decode engine's pools (vLLM's own ``BlockPool``, 4,096 blocks of 16 tokens each) serve the same random
requests. Half of them go on with an earlier conversation, whose blocks may still be in the prefix cache, by 128 to
4,096 tokens; the others begin one with as many. Prefill keeps a prompt for a few steps after it, decode for a random
number of further blocks, and requests are let in as there is room. After 10,000 allocations and frees on each side, 400
requests are measured: the blocks that decode lacks are paired with prefill's, sorted, and merged where both are
neighbours, as the planner does. Prefill allocates a prompt either at once, or in chunks of 512 tokens with two prompts
taking turns; ``by step`` is what is left of it if each chunk is pushed by itself.

``of``: the blocks of a request that are pushed, on the average. ``hits``: of the blocks that earlier turns have
computed, those that prefill still has in its prefix cache; what an order costs in evictions shows here. ``us``: the
mean processor time of prefill's allocations of more than one block, in vLLM and here.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm.v1.core.block_pool import BlockPool

from neuron_pushkv.connector.contiguity import Contiguity, Growing, Order

BLOCKS = 4096
TOKENS = 16
"""Of a block."""
CHUNK = 32
"""Blocks that a chunked prefill computes at a time."""
PARALLEL = 2
"""Prompts that are prefilled in turns."""
WARM = 10_000
"""Allocations and frees on each side before requests are measured."""
MEASURED = 400
"""Requests."""
SHORTEST, LONGEST = 8, 256
"""Blocks of a prompt's new part."""
FULL = 0.85
"""Of decode's pool, up to which requests are admitted."""
LINGER = 8
"""Steps that prefill keeps a prompt for after it, at most: its delivery."""


@dataclass
class Request:
    """One turn of a conversation. Blocks are known by the conversation's number and their place in it."""

    conversation: int
    blocks: int
    """Of the prompt."""
    output: int
    """Blocks that decode adds."""
    known: int
    """Blocks of the prompt that earlier turns have computed."""
    missing: int = 0
    """The first block that decode's prefix cache lacks."""
    linger: int = 0
    chunks: list[int] = field(default_factory=list)
    """Where prefill's allocations ended."""

    @cached_property
    def hashes(self) -> list[bytes]:
        """One for each block, as vLLM computes them."""
        count = self.blocks + self.output
        return [b"%16d%16d" % (self.conversation, place) for place in range(count)]


class Side:
    """One engine's pool and the tables of its requests."""

    def __init__(self, order: Order) -> None:
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=TOKENS)
        self.contiguity = Contiguity(order)
        self.contiguity.bind(self.pool)
        self.tables: dict[int, list[Any]] = {}
        self.operations = self.hits = self.wanted = 0
        self.allocated: list[float] = []

    def begin(self, request: Request) -> int:
        """Take what the prefix cache has of it, all but the last block. Returns how many blocks that is."""
        table = self.tables[id(request)] = []
        for key in request.hashes[: request.blocks - 1]:
            found = self.pool.get_cached_block(key, [0])
            if found is None:
                break
            self.pool.touch(found)
            table += found
        self.hits += min(len(table), request.known)
        self.wanted += request.known
        self.contiguity.begin(request.blocks - len(table))
        return len(table)

    def extend(self, request: Request, count: int) -> None:
        """Allocate and fill that many more blocks."""
        table = self.tables[id(request)]
        began = time.thread_time()
        table += self.pool.get_new_blocks(count)
        if count > 1:
            self.allocated.append(time.thread_time() - began)
        hashed: Any = SimpleNamespace(block_hashes=request.hashes, request_id="")
        self.pool.cache_full_blocks(hashed, table, len(table) - count, len(table), TOKENS, 0)
        self.operations += 1

    def end(self, request: Request) -> None:
        """Let go of all of it."""
        self.pool.free_blocks(reversed(self.tables.pop(id(request))))
        self.operations += 1

    def room(self, count: int) -> bool:
        """Whether that many blocks are free."""
        return bool(self.pool.get_num_free_blocks() >= count)


class Fleet:
    """A prefill and a decode engine under load. ``orders`` are theirs."""

    def __init__(self, orders: tuple[Order, Order], chunked: bool) -> None:
        self.random = random.Random(20)
        self.prefill, self.decode = Side(orders[0]), Side(orders[1])
        self.chunk = CHUNK if chunked else 2 * BLOCKS
        self.conversations: dict[int, int] = {}
        self.count = 0
        self.waiting = self.ask()
        self.computing: list[Request] = []
        self.lingering: list[Request] = []
        self.decoding: list[Request] = []
        self.measured = self.blocks = self.writes = self.writes_by_step = 0

    def ask(self) -> Request:
        """The next request."""
        new = int(SHORTEST * (LONGEST / SHORTEST) ** self.random.random())
        output = self.random.randrange(1, 32)
        idle = [number for number, length in self.conversations.items() if length + new + output < LONGEST]
        if idle and self.random.random() < 0.5:
            conversation = self.random.choice(idle[-40:])
            known = self.conversations.pop(conversation)
        else:
            self.count += 1
            conversation, known = self.count, 0
        return Request(conversation, known + new, output, known, linger=self.random.randrange(1, LINGER))

    def step(self) -> None:
        """One step of both engines."""
        while len(self.computing) < PARALLEL and self.admit():
            pass
        for request in list(self.computing):
            have = len(self.prefill.tables[id(request)])
            if request.chunks:
                self.allocate(request, min(self.chunk, request.blocks - have))
            if len(self.prefill.tables[id(request)]) == request.blocks:
                self.computing.remove(request)
                self.lingering.append(request)
                self.measure(request)
                self.decoding.append(request)
        self.prefill.contiguity.grow(
            Growing(table[-1].block_id, request.blocks - len(table))
            for request in self.computing
            if (table := self.prefill.tables[id(request)])
        )
        self.decode.contiguity.grow(())
        for request in list(self.lingering):
            request.linger -= 1
            if request.linger < 0:
                self.lingering.remove(request)
                self.prefill.end(request)
        for request in list(self.decoding):
            if len(self.decode.tables[id(request)]) == request.blocks + request.output:
                self.decoding.remove(request)
                self.decode.end(request)
                self.conversations[request.conversation] = request.blocks + request.output
            elif self.random.random() < 0.3 and self.decode.room(1):
                self.decode.extend(request, 1)

    def admit(self) -> bool:
        """Begin with the next request if there is room for it."""
        request = self.waiting
        busy = sum(r.blocks for r in self.computing + self.lingering)
        taken = BLOCKS - self.decode.pool.get_num_free_blocks()
        if busy + request.blocks > FULL * BLOCKS or taken + request.blocks > FULL * BLOCKS:
            return False
        request.missing = self.decode.begin(request)
        self.decode.extend(request, request.blocks - request.missing)
        self.decode.contiguity.begun()
        hits = self.prefill.begin(request)
        self.allocate(request, min(self.chunk, request.blocks - hits))
        self.prefill.contiguity.begun()
        self.computing.append(request)
        self.waiting = self.ask()
        return True

    def allocate(self, request: Request, count: int) -> None:
        """On prefill."""
        if count:
            self.prefill.extend(request, count)
            request.chunks.append(len(self.prefill.tables[id(request)]))

    def measure(self, request: Request) -> None:
        """Count what is pushed of it."""
        if min(self.prefill.operations, self.decode.operations) < WARM:
            return
        tables = [[block.block_id for block in side.tables[id(request)]] for side in (self.prefill, self.decode)]
        first, last = request.missing, request.blocks
        self.measured += 1
        self.blocks += last - first
        self.writes += merged(tables, first, last)
        edges = [first, *(end for end in request.chunks if first < end < last), last]
        self.writes_by_step += sum(merged(tables, *edge) for edge in pairwise(edges))


def merged(tables: Sequence[Sequence[int]], first: int, last: int) -> int:
    """Writes for the blocks in places ``first`` to ``last`` of prefill's and decode's tables."""
    pairs = sorted(zip(tables[0][first:last], tables[1][first:last], strict=True))
    return 1 + sum(after != (before[0] + 1, before[1] + 1) for before, after in pairwise(pairs))


@dataclass(frozen=True)
class Result:
    """One row."""

    prefill: Order
    decode: Order
    chunked: bool
    blocks_per_write: float
    blocks_per_write_by_step: float
    blocks_per_request: float
    hits: float
    allocation_us: float


def run(orders: tuple[Order, Order], chunked: bool) -> Result:
    """Warm up, then measure."""
    fleet = Fleet(orders, chunked)
    while fleet.measured < MEASURED:
        fleet.step()
    side = fleet.prefill
    return Result(
        *orders,
        chunked,
        fleet.blocks / fleet.writes,
        fleet.blocks / fleet.writes_by_step,
        fleet.blocks / fleet.measured,
        side.hits / side.wanted,
        1e6 * sum(side.allocated) / len(side.allocated),
    )


ORDERS: tuple[tuple[Order, Order], ...] = (
    ("vllm", "vllm"),
    ("sorted", "vllm"),
    ("vllm", "sorted"),
    ("sorted", "sorted"),
    ("runs", "vllm"),
    ("vllm", "runs"),
    ("runs", "runs"),
)


def main() -> None:
    """All orders, at once and chunked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    given = parser.parse_args()
    table = Table("prefill", "decode", "allocated", "blocks per write", "by step", "of", "hits", "us")
    results = [run(orders, chunked) for chunked in (False, True) for orders in ORDERS]
    for one in results:
        numbers = [f"{n:.1f}" for n in (one.blocks_per_write, one.blocks_per_write_by_step, one.blocks_per_request)]
        how = "in chunks" if one.chunked else "at once"
        table.add_row(one.prefill, one.decode, how, *numbers, f"{one.hits:.1%}", f"{one.allocation_us:.0f}")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
