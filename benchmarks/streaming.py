"""What is left to move when a prefill of 16 steps ends, streamed as it goes against all at the end.

    python -m benchmarks.streaming

Each step takes 60 ms and fills a 16th of the prompt; the receiver has registered before the first. Streamed, the blocks
of each step are handed over as it ends; unstreamed, all of them as the last one ends. Both are timed from that end to
the report of the receiver's worker, and the bytes counted that had not been written by then.
"""

from __future__ import annotations

import statistics

from benchmarks.bulk import PAUSE, Push
from benchmarks.options import Options, alone
from benchmarks.rows import Row, row
from benchmarks.work import ORDERS, Work

STEPS = 16
STEP_SECONDS = 0.06


class Streaming(Push):
    """A pair whose prompt comes in steps."""

    def prefill(self, streamed: bool) -> tuple[float, int]:
        """One transfer: seconds from the prefill's end to the report, and bytes that were left then."""
        self.number += 1
        self.announce()
        self.receiver.tell("report", self.number, PAUSE)
        ended, left = self.sender.ask("prefill", self.number, STEPS, STEP_SECONDS, streamed)
        reported = self.receiver.answer()
        self.conclude()
        return float(reported - ended) / 1e9, int(left)


def measure(options: Options) -> list[Row]:
    """Both ways in turns, in every order."""
    work = Work(options.tokens)
    pair = Streaming(work, options.providers[0], options.libfabric)
    rows = []
    try:
        for order in ORDERS:
            pair.prepare(order)
            times: dict[bool, list[float]] = {True: [], False: []}
            left: dict[bool, list[int]] = {True: [], False: []}
            for _ in range(options.repeats):
                for streamed in (True, False):
                    seconds, size = pair.prefill(streamed)
                    times[streamed].append(seconds)
                    left[streamed].append(size)
            rows += [
                row(
                    "after a streamed prefill" if streamed else "after an unstreamed prefill",
                    pair.engine,
                    pair.provider,
                    order=order,
                    tokens=work.tokens,
                    size=round(statistics.median(left[streamed])),
                    seconds=times[streamed],
                    versions=pair.versions,
                )
                for streamed in (True, False)
            ]
            options.say(f"streaming, {order}: done")
    finally:
        pair.close()
    return rows


if __name__ == "__main__":
    alone(measure)
