"""Two engines in processes of their own transfer, abort, fail, are stopped, cut off and restarted, at random.

    python -m tests.soak [--seconds 600] [--seed N]

Every block says whose it is. What a receiver was told is there must be there; what a sender got back is overwritten at
once and must never be seen again; a receiver's block that was reported belongs to somebody else from then on, who must
find it untouched. In the end every block is free, every table empty, and memory and descriptors are what they were. One
line of totals, and 0 if all of that was so.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from tests.engine.conftest import free_port
from tests.engine.sides import BLOCKS
from tests.faults.side_process import RemoteSide

SETTINGS = {
    "no_progress_seconds": 2.0,
    "cancel_seconds": 0.5,
    "unknown_source_seconds": 1.0,
    "keep_unclaimed_seconds": 0.5,
    "keep_delivered_seconds": 0.02,
    "unreachable_seconds": 0.05,
}
SILENCE_SECONDS = 25.0
"""Longer than any deadline and all that may follow it: a request without a report by then has been forgotten."""
GUARDED = 12
"""Next owners of blocks that are watched before these are used again."""
WARM = 2000
"""Reports after which memory is not to grow any more."""
MOST_OBJECTS, MOST_NATIVE = 5000, 1 << 20
MOST_RESIDENT = 28 << 20
"""libfabric takes its pools through in turn, so that their pages appear one after the other, up to about 20 MiB."""


class Wrong(Exception):
    """Something that must not happen."""


@dataclass
class Source:
    """A prompt that an engine computes."""

    prompt: int
    blocks: list[int]
    sealed: bool = False
    finished: bool = False


@dataclass
class Awaited:
    """A request whose KV is to come."""

    prompt: int
    blocks: list[int]
    first: int
    since: float


@dataclass
class Intended:
    """A request that has no blocks yet. ``port`` is its sender's."""

    prompt: int
    tokens: int
    port: int


@dataclass
class Engine:
    """One of the two, with all that it must be holding."""

    name: str
    port: int
    side: RemoteSide
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    sources: dict[str, Source] = field(default_factory=dict)
    awaited: dict[str, Awaited] = field(default_factory=dict)
    intended: dict[str, Intended] = field(default_factory=dict)
    guarded: deque[tuple[int, list[int]]] = field(default_factory=deque)
    reports: int = 0
    warm: list[int] = field(default_factory=list)
    latest: list[int] = field(default_factory=list)


class Soak:
    """All of it is drawn from ``seed``; only the machine's timing isn't."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.prompts = 0
        self.owners = 3_000_000_000
        self.poison = 4_000_000_000
        self.growth = [0, 0, 0]
        self.slope = 0.0
        self.engines = [self.start("a", free_port()), self.start("b", free_port())]

    def start(self, name: str, port: int) -> Engine:
        """A fresh engine, with trouble of its own."""
        return Engine(name, port, RemoteSide(name, port, trouble=self.chance.randrange(1 << 30), **SETTINGS))

    def run(self, seconds: float) -> None:
        """Raises :class:`Wrong`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.act()
            for engine in self.engines:
                self.listen(engine)
        self.settle()

    def close(self) -> None:
        """End both."""
        for engine in self.engines:
            engine.side.kill()

    # What may happen.

    def act(self) -> None:
        """One thing or another."""
        here, there = self.chance.sample(self.engines, 2)
        dice = self.chance.random()
        if dice < 0.45:
            self.begin(here, there)
        elif dice < 0.93 and here.sources:
            self.go_on(here, self.chance.choice(list(here.sources)))
        elif dice < 0.97:
            if here.intended:
                self.admit(here, self.chance.choice(list(here.intended)))
        elif dice < 0.978 and here.awaited:
            here.side.do("withdraw", self.chance.choice(list(here.awaited)))
            self.counts["aborts"] += 1
        elif dice < 0.979:
            self.counts["cuts"] += bool(here.side.do("cut"))
        elif dice < 0.9795:
            with here.side.stopped():
                time.sleep(self.chance.uniform(0.02, 0.2))
            self.counts["stops"] += 1
        elif dice < 0.97965:
            self.restart(self.engines[self.chance.random() < 0.95])

    def begin(self, here: Engine, there: Engine) -> None:
        """A prompt is computed here and wanted there, whichever is heard of first; or one of it is missing."""
        count = self.chance.randint(1, 8)
        if min(len(here.free), len(there.free)) < count or len(here.sources) + len(there.awaited) > 24:
            return
        self.prompts += 1
        prompt, tokens = self.prompts, 16 * count - self.chance.randrange(16)
        first = self.chance.randrange(count) if self.chance.random() < 0.3 else 0
        legs = [self.offer, self.want]
        self.chance.shuffle(legs)
        if self.chance.random() < 0.05:
            legs.pop()
        if self.chance.random() < 0.1:
            there.side.do("intend", f"d{prompt}", prompt, tokens, here.port, f"t{prompt}")
            there.intended[f"d{prompt}"] = Intended(prompt, tokens, here.port)
            legs = [self.offer] if self.offer in legs else []
            self.counts["intents"] += 1
        for leg in legs:
            leg(here, there, prompt, tokens, first)
        self.counts["transfers"] += len(legs) == 2

    def offer(self, here: Engine, _: Engine, prompt: int, tokens: int, __: int) -> None:
        """The sender's leg."""
        here.side.do("offer", f"p{prompt}", prompt, tokens, f"t{prompt}")
        here.sources[f"p{prompt}"] = Source(prompt, self.take(here, -(-tokens // 16)))

    def want(self, here: Engine, there: Engine, prompt: int, tokens: int, first: int) -> None:
        """The receiver's leg; it has the first blocks already."""
        blocks = self.take(there, -(-tokens // 16) - first)
        there.awaited[f"d{prompt}"] = Awaited(prompt, blocks, first, time.monotonic())
        there.side.do("receive", f"d{prompt}", prompt, tokens, blocks, here.port, f"t{prompt}", 16 * first)

    def admit(self, engine: Engine, request: str) -> None:
        """What was intended has blocks now; or its client is gone, and its sender may hear so."""
        intended = engine.intended[request]
        prompt, count, dice = intended.prompt, -(-intended.tokens // 16), self.chance.random()
        if dice < 0.8 and len(engine.free) < count:
            return
        del engine.intended[request]
        if dice < 0.8:
            blocks = self.take(engine, count)
            engine.awaited[request] = Awaited(prompt, blocks, 0, time.monotonic())
            engine.side.do("receive", request, prompt, intended.tokens, blocks, intended.port, f"t{prompt}")
            return
        engine.side.do("withdraw", request)
        if dice < 0.9:
            engine.side.do("release", f"t{prompt}", intended.port)

    def go_on(self, engine: Engine, request: str) -> None:
        """A source is computed, or finished; or it fails, or is preempted and loses its blocks at once."""
        source, dice = engine.sources[request], self.chance.random()
        if source.finished:
            return
        if dice < 0.05:
            engine.side.do("finish", request, False)
            self.give_back_source(engine, request)
            self.counts["failed prefills"] += 1
        elif not source.sealed:
            engine.side.do("seal", request, source.prompt, source.blocks)
            source.sealed = True
        elif dice < 0.2:
            engine.side.do("preempt", request)
            again = self.take(engine, len(source.blocks)) if len(engine.free) >= len(source.blocks) else []
            self.give_back(engine, source.blocks)
            source.blocks, source.sealed = again or self.take(engine, len(source.blocks)), False
            self.counts["preemptions"] += 1
        else:
            engine.side.do("finish", request)
            source.finished = True

    def restart(self, engine: Engine) -> None:
        """Killed, and back under the same name and port with nothing in its cache."""
        self.measured(engine)
        engine.side.kill()
        fresh = self.start(engine.name, engine.port)
        self.engines[self.engines.index(engine)] = fresh
        self.counts["lost in a restart"] += len(engine.awaited)
        self.counts["restarts"] += 1

    # What must hold.

    def listen(self, engine: Engine) -> None:
        """Take its reports, and check each."""
        finished, failed, freed = engine.side.do("turn")
        for request in finished:
            awaited = engine.awaited.pop(request, None)
            if awaited is None:
                raise Wrong(f"{engine.name} reported {request} twice, or unasked")
            if request in failed:
                self.counts["failed"] += 1
            elif not engine.side.do("holds", awaited.prompt, awaited.blocks, awaited.first):
                raise Wrong(f"{engine.name} reported {request}, and the blocks hold something else")
            else:
                self.counts["completed"] += 1
            self.guard(engine, awaited.blocks)
            engine.reports += 1
            if engine.reports % 500 == 0 and engine.reports >= WARM:
                engine.latest = engine.side.do("usage")
                engine.warm = engine.warm or [engine.reports, *engine.latest]
        for request in freed:
            if request not in engine.sources or not engine.sources[request].finished:
                raise Wrong(f"{engine.name} freed {request} twice, or too early")
            self.give_back_source(engine, request)
        now = time.monotonic()
        for request, awaited in engine.awaited.items():
            if now - awaited.since > SILENCE_SECONDS:
                raise Wrong(f"{engine.name} has said nothing of {request} for {SILENCE_SECONDS:g} s")

    def guard(self, engine: Engine, blocks: list[int]) -> None:
        """They belong to somebody else now; the longest guarded ones must be untouched, and are free again."""
        self.owners += 1
        engine.side.do("fill", self.owners, blocks)
        engine.guarded.append((self.owners, blocks))
        self.release(engine, GUARDED)

    def release(self, engine: Engine, left: int) -> None:
        """Check and free the blocks of all guarded owners but so many."""
        while len(engine.guarded) > left:
            owner, blocks = engine.guarded.popleft()
            if not engine.side.do("holds", owner, blocks):
                raise Wrong(f"one of the blocks {blocks} of {engine.name} was written to after its report")
            engine.free += blocks

    def take(self, engine: Engine, count: int) -> list[int]:
        """That many free blocks, anywhere."""
        self.chance.shuffle(engine.free)
        taken, engine.free = engine.free[:count], engine.free[count:]
        return taken

    def give_back_source(self, engine: Engine, request: str) -> None:
        self.give_back(engine, engine.sources.pop(request).blocks)

    def give_back(self, engine: Engine, blocks: list[int]) -> None:
        """The source's blocks are overwritten at once: who reads them now is found out."""
        self.poison += 1
        engine.side.do("fill", self.poison, blocks)
        engine.free += blocks

    # The end.

    def settle(self) -> None:
        """Nothing new; everything ends by itself; then all is as it was, and works."""
        for engine in self.engines:
            for request in engine.intended:
                engine.side.do("withdraw", request)
            for request, source in list(engine.sources.items()):
                if not source.finished:
                    if not source.sealed:
                        engine.side.do("seal", request, source.prompt, source.blocks)
                    engine.side.do("finish", request)
                    source.finished = True
        end = time.monotonic() + SILENCE_SECONDS
        while any(engine.sources or engine.awaited or any(engine.side.do("tables")) for engine in self.engines):
            for engine in self.engines:
                self.listen(engine)
            if time.monotonic() > end:
                raise Wrong(
                    f"still open: {[(e.name, e.sources, e.awaited, e.side.do('tables')) for e in self.engines]}"
                )
        for engine in self.engines:
            self.release(engine, 0)
            if sorted(engine.free) != list(range(BLOCKS)):
                raise Wrong(f"{engine.name} has {len(engine.free)} of {BLOCKS} blocks free")
            if engine.side.do("bugs"):
                raise Wrong(f"{engine.name} caught exceptions of its own: see its log")
            self.measured(engine)
        if self.counts["completed"] * 2 < self.counts["transfers"]:
            raise Wrong("fewer than half of the transfers completed")

    def measured(self, engine: Engine) -> None:
        """Descriptors and memory since it was warm."""
        if not engine.warm or engine.reports < engine.warm[0] + 500:
            return
        reports, files, *before = engine.warm
        now_files, *now = engine.side.do("usage")
        growth = [after - earlier for after, earlier in zip(now, before, strict=True)]
        self.growth = [max(pair) for pair in zip(self.growth, growth, strict=True)]
        self.slope = max(self.slope, growth[2] / (engine.reports - reports))
        if now_files > files + 8:
            raise Wrong(f"{engine.name} has {now_files} descriptors open, after {files}")
        if growth[0] > MOST_OBJECTS or growth[1] > MOST_NATIVE or growth[2] > MOST_RESIDENT:
            raise Wrong(f"{engine.name} grew by {growth[0]} objects, {growth[1]} bytes of malloc, {growth[2]} resident")

    def totals(self) -> str:
        """One line."""
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self.counts.items()))
        objects, native, resident = self.growth
        memory = f"grew by {objects:,} objects, {native:,} bytes of malloc, {resident:,} bytes resident"
        return f"{counts}; {memory} ({self.slope:,.0f} per report)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Two engines under random trouble.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}, {options.seconds:g} s", flush=True)
    soak = Soak(seed)
    try:
        soak.run(options.seconds)
    except (Wrong, EOFError) as error:
        print(f"soak FAILED, seed {seed}: {error}; {soak.totals()}")
        return 1
    finally:
        soak.close()
    print(f"soak passed, seed {seed}: {soak.totals()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
