"""The fleet: router, engines and transfers, wired up with SimPy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import simpy

from neuron_pushkv.simulate.decode import Decode
from neuron_pushkv.simulate.lengths import gaps
from neuron_pushkv.simulate.measures import Level
from neuron_pushkv.simulate.prefill import Prefill
from neuron_pushkv.simulate.requests import Request
from neuron_pushkv.simulate.scenario import Choice, Scenario
from neuron_pushkv.simulate.tables import ServiceTable
from neuron_pushkv.simulate.wires import occupy

Engine = TypeVar("Engine", Prefill, Decode)


@dataclass(frozen=True)
class Trace:
    """Everything that happened in one replication."""

    scenario: Scenario
    table: ServiceTable
    requests: tuple[Request, ...]
    """In the order in which they arrived, all of them finished."""
    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]
    kept: Level
    """Tokens at P whose prefill has ended and which have not all landed at D."""
    present: Level
    """Requests that have arrived and have not finished."""


@dataclass
class _Delivery:
    """What of a request's KV is to be sent, and what has been."""

    source: Prefill
    target: Decode | None = None
    """Once it has reserved the blocks."""
    skip: int = 0
    """Tokens that D has itself."""
    ready: int = 0
    """Filled at P and not sent."""
    sealed: bool = False
    """Nothing more will be filled."""
    moving: int = 0
    """Transfers that are under way."""


def simulate(scenario: Scenario, table: ServiceTable, seed: int, finished: Callable[[], None] = lambda: None) -> Trace:
    """One replication. ``finished`` is called for each request. The same seed gives the same result.

    Raises :class:`ConfigError` if the table can't tell of such prompts or batches.
    """
    scenario.fits(table)
    return _Model(scenario, table, seed, finished).run()


class _Model:
    def __init__(self, scenario: Scenario, table: ServiceTable, seed: int, finished: Callable[[], None]) -> None:
        self._scenario = scenario
        self._table = table
        self._finished = finished
        arriving, saying = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        self._gaps = gaps(scenario.arrivals, scenario.rate, scenario.requests, arriving)
        self._lengths = [
            [(scenario.input.draw(saying), scenario.output.draw(saying)) for _ in range(scenario.turns)]
            for _ in range(scenario.requests)
        ]
        """Of each conversation's turns, whatever the engines make of them: the same seed is the same load."""
        self._env = simpy.Environment()
        self._prefills = [Prefill(self._env, scenario, table, self._filled) for _ in range(scenario.prefills)]
        self._decodes = [Decode(self._env, scenario, table, self._allocated) for _ in range(scenario.decodes)]
        self._prefill_turn = self._decode_turn = 0
        self._requests: list[Request] = []
        self._deliveries: dict[Request, _Delivery] = {}
        self._homes: dict[Request, Decode] = {}
        self._present = Level()
        self._kept = Level()

    def run(self) -> Trace:
        everything = self._env.process(self._arrive())
        self._env.run(until=everything)
        return Trace(
            self._scenario,
            self._table,
            tuple(self._requests),
            tuple(self._prefills),
            tuple(self._decodes),
            self._kept,
            self._present,
        )

    def _arrive(self) -> Generator[simpy.Event]:
        conversations = []
        for number, gap in enumerate(self._gaps):
            yield self._env.timeout(gap)
            conversations.append(self._env.process(self._converse(number)))
        yield simpy.AllOf(self._env, conversations)

    def _converse(self, number: int) -> Generator[simpy.Event]:
        """All turns of one conversation."""
        history = 0
        home: Decode | None = None
        for turn in range(self._scenario.turns):
            if turn:
                yield self._env.timeout(self._scenario.think_seconds)
            added, output = self._lengths[number][turn]
            prompt = history + added
            request = Request(
                number=number,
                turn=turn,
                prompt=prompt,
                output=output,
                # The last token is always computed, for its logits.
                prefill_hit=min(self._blocks(self._scenario.prefix_hit * prompt), prompt - 1),
                decode_hit=min(self._blocks(self._scenario.decode_hit * prompt), prompt - 1),
                arrived=self._env.now,
            )
            self._requests.append(request)
            self._present.add(self._env.now, 1)
            if home is not None and not home.memory.pin(number):
                home = None
            target = yield from self._serve(request, home, history)
            self._present.add(self._env.now, -1)
            self._finished()
            history = prompt + request.output
            home = target if self._scenario.return_path else None

    def _serve(self, request: Request, home: Decode | None, history: int) -> Generator[simpy.Event, None, Decode]:
        source = self._choose_prefill()
        self._deliveries[request] = delivery = _Delivery(source)
        source.left += request.prompt - request.prefill_hit
        target, ended = home, None
        if home is not None:
            request.decode_hit = max(request.decode_hit, self._blocks(history))
        delivery.skip = request.decode_hit
        if self._scenario.mode == "push":
            target = target or self._choose_decode()
            ended = self._enter(request, target)
        if home is not None:
            yield from self._give_back(request, home, source, history)
        request.returned = self._env.now
        yield source.submit(request)
        self._kept.add(self._env.now, request.prompt)
        if target is None:
            target = self._choose_decode()
        if ended is None:
            ended = self._enter(request, target)
        yield ended
        target.load -= 1
        return target

    def _enter(self, request: Request, target: Decode) -> simpy.Event:
        self._homes[request] = target
        target.load += 1
        return target.submit(request)

    def _give_back(self, request: Request, home: Decode, source: Prefill, history: int) -> Generator[simpy.Event]:
        """D sends P what P lacks of the conversation so far."""
        missing = self._blocks(history) - request.prefill_hit
        if missing <= 0 or missing < self._scenario.recompute_threshold:
            return
        source.left -= missing
        request.prefill_hit += missing
        poster = source if self._scenario.mode == "pull" else home
        self._owe(poster, missing)
        yield from self._transfer(missing, home, source, poster)

    def _filled(self, request: Request, tokens: int, last: bool) -> None:
        delivery = self._deliveries[request]
        skipped = min(tokens, delivery.skip)
        delivery.skip -= skipped
        delivery.ready += tokens - skipped
        delivery.sealed = last
        self._push(request)

    def _allocated(self, request: Request) -> None:
        self._deliveries[request].target = self._homes[request]
        self._push(request)

    def _push(self, request: Request) -> None:
        delivery = self._deliveries[request]
        target = delivery.target
        if target is not None and delivery.ready and (delivery.sealed or self._scenario.stream):
            poster = target if self._scenario.mode == "pull" else delivery.source
            self._owe(poster, delivery.ready)
            self._env.process(self._deliver(request, delivery, target, poster, delivery.ready))
            delivery.ready = 0
            delivery.moving += 1

    def _owe(self, poster: Prefill | Decode, tokens: int) -> None:
        """Where posting stops the engine that posts, its next step waits for it."""
        if self._scenario.inline:
            poster.owed += self._scenario.posting_seconds(tokens, self._table)

    def _deliver(
        self, request: Request, delivery: _Delivery, target: Decode, poster: Prefill | Decode, tokens: int
    ) -> Generator[simpy.Event]:
        yield from self._transfer(tokens, delivery.source, target, poster)
        delivery.moving -= 1
        if delivery.sealed and not delivery.moving:
            self._kept.add(self._env.now, -request.prompt)
            del self._deliveries[request], self._homes[request]
            target.land(request)

    def _transfer(
        self, tokens: int, source: Prefill | Decode, target: Prefill | Decode, poster: Prefill | Decode
    ) -> Generator[simpy.Event]:
        """Post so many tokens and move them, each after all that came before; what is posted moves meanwhile."""
        posting = self._scenario.posting_seconds(tokens, self._table)
        moving = self._scenario.wire_seconds(tokens, self._table)
        begun = occupy((poster.poster,), self._env.now, posting)
        yield self._env.timeout(begun - self._env.now)
        moved = occupy((source.out, target.into), self._env.now, moving) + moving
        ends = max(begun + posting, moved) + self._scenario.floor_ms / 1000
        yield self._env.timeout(ends - self._env.now)

    def _choose_prefill(self) -> Prefill:
        self._prefill_turn += 1
        return _choose(
            self._scenario.choose_prefill,
            self._prefills,
            self._prefill_turn,
            [engine.left for engine in self._prefills],
        )

    def _choose_decode(self) -> Decode:
        self._decode_turn += 1
        return _choose(
            self._scenario.choose_decode, self._decodes, self._decode_turn, [engine.load for engine in self._decodes]
        )

    def _blocks(self, tokens: float) -> int:
        """So many tokens, rounded down to whole blocks, as prefix caches are."""
        return int(tokens) // self._scenario.block_tokens * self._scenario.block_tokens


def _choose(choice: Choice, engines: Sequence[Engine], turn: int, loads: Sequence[int]) -> Engine:
    """The engine whose turn it is, or of those with the least load the one whose turn comes next."""
    order = [(turn - 1 + offset) % len(engines) for offset in range(len(engines))]
    return engines[order[0] if choice == "round-robin" else min(order, key=lambda index: loads[index])]
