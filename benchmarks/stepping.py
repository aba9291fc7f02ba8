"""How long a prompt that has arrived waits for the engine to notice: steps of 20 ms, arrivals at random moments.

    python -m benchmarks.stepping

The receiver goes through steps as vLLM's worker does: begin, 20 ms of computing (on an accelerator, so the host
sleeps), then results are taken. The sender seals prompts of one block at moments that know nothing of these steps. One
row counts from the arrival of the last write (the engine's own phase "report"), one from the seal: the block's way and
COMMIT's are in that too, on cores that have gone to sleep meanwhile.
"""

from __future__ import annotations

import statistics

from benchmarks.bulk import Push
from benchmarks.options import Options, alone
from benchmarks.rows import Row, row
from benchmarks.work import BLOCK_TOKENS, Work

STEP_SECONDS = 0.02
TRANSFERS = 40
"""Of each round, whose mean is one measurement."""


def measure(options: Options) -> list[Row]:
    """The mean of each round."""
    work = Work(BLOCK_TOKENS)
    pair = Push(work, options.providers[0], options.libfabric)
    means, waits = [], []
    try:
        pair.prepare("in order")
        for repeat in range(options.repeats):
            numbers = [1000 * (repeat + 1) + index for index in range(TRANSFERS)]
            for number in numbers:
                pair.sender.ask("offer", number)
            pair.receiver.ask("receive", numbers, pair.port)
            pair.receiver.tell("steps", numbers, STEP_SECONDS)
            sealed = pair.sender.ask("seal_at_random", numbers, STEP_SECONDS)
            reported, waited = pair.receiver.answer()
            for number in numbers:
                pair.sender.ask("finish", number)
            waits.append(statistics.fmean(waited))
            means.append(statistics.fmean(end - begin for begin, end in zip(sealed, reported, strict=True)) / 1e9)
        versions = pair.versions
    finally:
        pair.close()
    options.say("steps of 20 ms: done")
    return [
        row(
            f"{since} to report, steps of 20 ms, mean of {TRANSFERS}",
            pair.engine,
            pair.provider,
            tokens=work.tokens,
            size=work.bytes,
            seconds=seconds,
            versions=versions,
        )
        for since, seconds in (("arrival", waits), ("seal", means))
    ]


if __name__ == "__main__":
    alone(measure)
