"""The first transfer to a new peer against the next one, with 1,000,000 blocks x 128 regions described to each other.

    python -m benchmarks.contact

The prompt's KV is there before the receiver, a new engine each time, asks for it: so the time is that from the
receiver's step that wants it to its worker's report, with the sender's directory, connections, handshake and endpoints
in the first. The caches' blocks are small, so that as many can be described; nothing but the prompt's is ever touched.
"""

from __future__ import annotations

import time

from benchmarks import pushing
from benchmarks.bulk import PAUSE
from benchmarks.options import Options, alone
from benchmarks.process import Remote
from benchmarks.rows import Row, free_port, row
from benchmarks.work import Work

CACHE_BLOCKS = 1_000_000
TOKENS = 1024
BLOCK_BYTES = 64


class Newcomer(pushing.Receiver):
    """A receiver that can become another."""

    def choose(self, order: str) -> None:
        """Take blocks by that order's table; the cache is far too large to be cleared."""
        self.table = self.work.table(order, "receiver")

    def renew(self) -> None:
        """Be a peer that nobody knows."""
        self.close()
        self.open()

    def fetch(self, number: int, port: int) -> float:
        """Seconds from wanting a prompt to having it."""
        began = time.monotonic_ns()
        self.receive([number], port)
        return (self.report(number, PAUSE) - began) / 1e9


def measure(options: Options) -> list[Row]:
    """As many new peers as there are repeats, and a second transfer to each."""
    work = Work(TOKENS, BLOCK_BYTES, CACHE_BLOCKS - TOKENS // 16)
    provider, port = options.providers[0], free_port()
    sender = Remote(pushing.Sender, "sender", provider, options.libfabric, port, work)
    receiver = None
    times: dict[str, list[float]] = {"first transfer to a new peer": [], "next transfer to it": []}
    try:
        receiver = Remote(Newcomer, "receiver", provider, options.libfabric, free_port(), work)
        sender.ask("prepare", "random", 1)
        receiver.ask("choose", "random")
        number = 0
        for repeat in range(options.repeats + 1):
            for taken in times.values():
                number += 1
                sender.ask("offer", number)
                sender.ask("seal", number)
                seconds = receiver.ask("fetch", number, port)
                sender.ask("finish", number)
                if repeat:
                    taken.append(seconds)
            if not repeat and not receiver.ask("holds", 1):
                raise RuntimeError("not every byte arrived as it was sent")
            receiver.ask("renew")
        versions = {"libfabric": sender.ask("versions")}
    finally:
        sender.close()
        if receiver is not None:
            receiver.close()
    options.say("first contact: done")
    return [
        row(
            name, "pushkv", provider, order="random", tokens=TOKENS, size=work.bytes, seconds=seconds, versions=versions
        )
        for name, seconds in times.items()
    ]


if __name__ == "__main__":
    alone(measure)
