"""A prefill engine: one prompt after the other, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import simpy

from neuron_pushkv.simulate.measures import Level
from neuron_pushkv.simulate.requests import Request
from neuron_pushkv.simulate.scenario import Scenario
from neuron_pushkv.simulate.tables import ServiceTable
from neuron_pushkv.simulate.wires import Wire


class Prefill:
    """First come, first served. Prompts that would share a step in vLLM are computed one after the other here."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        table: ServiceTable,
        filled: Callable[[Request, int, bool], None],
    ) -> None:
        self._env = env
        self._scenario = scenario
        self._table = table
        self._filled = filled
        """Called with a request, how many of its tokens are new in the cache, and whether those were the last."""
        self._waiting: deque[tuple[Request, simpy.Event]] = deque()
        self._wake: simpy.Event | None = None
        self.owed = 0.0
        """Seconds of posting that the next step has to wait for."""
        self.left = 0
        """Prompt tokens that have been given to it and are to be computed."""
        self.out = Wire()
        self.into = Wire()
        self.poster = Wire()
        self.busy = Level()
        self.queue = Level()
        env.process(self._run())

    def submit(self, request: Request) -> simpy.Event:
        """Queue the request. What is returned happens when its prefill has ended."""
        ended = self._env.event()
        self._waiting.append((request, ended))
        self.queue.set(self._env.now, len(self._waiting))
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None
        return ended

    def _run(self) -> Generator[simpy.Event]:
        while True:
            if not self._waiting:
                self._wake = self._env.event()
                yield self._wake
            request, ended = self._waiting.popleft()
            self.queue.set(self._env.now, len(self._waiting))
            self.busy.set(self._env.now, 1)
            yield from self._compute(request)
            self.busy.set(self._env.now, 0)
            ended.succeed()

    def _compute(self, request: Request) -> Generator[simpy.Event]:
        request.prefill_begun = self._env.now
        done = request.prefill_hit
        if done:
            self._filled(request, done, False)
        seconds = self._table.step_seconds
        while done < request.prompt:
            end = min(request.prompt, done + self._scenario.chunk_tokens)
            seconds += self._table.chunk_seconds(done, end) + self.owed
            self.owed = 0.0
            yield self._env.timeout(seconds)
            self.left -= end - done
            seconds = 0.0
            if end == request.prompt:
                request.prefill_ended = self._env.now
            self._filled(request, end - done, end == request.prompt)
            done = end
