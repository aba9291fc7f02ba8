"""A decode engine: reserves blocks, and decodes a batch step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import simpy

from neuron_pushkv.simulate.measures import Level
from neuron_pushkv.simulate.memory import Memory
from neuron_pushkv.simulate.requests import Request
from neuron_pushkv.simulate.scenario import Scenario
from neuron_pushkv.simulate.tables import ServiceTable
from neuron_pushkv.simulate.wires import Wire


class Decode:
    """As vLLM's scheduler: between two steps, what has landed joins the batch, then what waits gets its blocks, in
    order, while the batch has a free slot and the cache has room. Blocks for the answer are reserved too.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        table: ServiceTable,
        allocated: Callable[[Request], None],
    ) -> None:
        self._env = env
        self._scenario = scenario
        self._table = table
        self._allocated = allocated
        """Called with a request when its blocks have been reserved."""
        self._waiting: deque[Request] = deque()
        self._landed: deque[Request] = deque()
        self._running: list[Request] = []
        self._ended: dict[Request, simpy.Event] = {}
        self._wake: simpy.Event | None = None
        self.owed = 0.0
        """Seconds of posting that the next step has to wait for."""
        self.load = 0
        """Requests that have been given to it and have not ended."""
        self.out = Wire()
        self.into = Wire()
        self.poster = Wire()
        self.busy = Level()
        self.occupied = Level()
        self.held = Level()
        self.parked = Level()
        self.memory = Memory(scenario.decode_kv_tokens, self._remembered)
        env.process(self._run())

    def submit(self, request: Request) -> simpy.Event:
        """Queue the request. What is returned happens when its last token is there."""
        ended = self._env.event()
        self._ended[request] = ended
        self._waiting.append(request)
        self._poke()
        return ended

    def land(self, request: Request) -> None:
        """All of the request's KV has come."""
        request.landed = self._env.now
        self._landed.append(request)
        self._poke()

    def _poke(self) -> None:
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _run(self) -> Generator[simpy.Event]:
        while True:
            self._join()
            self._allocate()
            seconds, self.owed = self.owed, 0.0
            if self._running:
                seconds += self._table.decode_seconds(len(self._running))
            if seconds:
                self.busy.set(self._env.now, 1)
                yield self._env.timeout(seconds)
                self._step()
            elif self._running:
                self._step()
            else:
                self.busy.set(self._env.now, 0)
                self._wake = self._env.event()
                yield self._wake

    def _join(self) -> None:
        while self._landed and len(self._running) < self._scenario.slots:
            request = self._landed.popleft()
            request.joined = self._env.now
            self._running.append(request)
        self.occupied.set(self._env.now, len(self._running))

    def _allocate(self) -> None:
        while self._waiting and len(self._running) < self._scenario.slots:
            request = self._waiting[0]
            if not self.memory.take(request.prompt + request.output, request.number):
                return
            self._waiting.popleft()
            request.allocated = self._env.now
            self._allocated(request)

    def _step(self) -> None:
        now = self._env.now
        ended = []
        for request in self._running:
            request.steps.append(now)
            if len(request.steps) == 1:
                request.first = now
            if len(request.steps) == request.output:
                request.finished = now
                ended.append(request)
        if ended:
            self._running = [request for request in self._running if not request.finished]
            self.occupied.set(now, len(self._running))
        for request in ended:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        tokens = request.prompt + request.output
        if self._scenario.return_path:
            stay = self.memory.park(tokens, request.number)
            self._env.process(self._expire(request.number, stay))
        else:
            self.memory.release(tokens)
        self._ended.pop(request).succeed()

    def _expire(self, conversation: int, stay: int) -> Generator[simpy.Event]:
        yield self._env.timeout(self._scenario.keep_seconds)
        self.memory.expire(conversation, stay)
        self._poke()

    def _remembered(self, held: int, parked: int) -> None:
        self.held.set(self._env.now, held)
        self.parked.set(self._env.now, parked)
