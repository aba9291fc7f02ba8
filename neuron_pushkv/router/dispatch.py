"""One request, two legs: prefill and decode are sent at once, and one's end decides about the other.

- Decode waits in its engine until prefill's KV has been pushed. Once its answer has begun, nothing that happens to the
  prefill leg matters any more, and when it has ended, a prefill leg that still runs is cancelled.
- Before that, the first leg to fail ends the request, and the other is cancelled. The decode engine could compute the
  prompt itself; but a prompt that one engine has just failed on, or that has lost its engine, would then take decode's
  time from everybody else's tokens, while the client can simply ask again.
- When both fail, the client gets the error that says most. Decode has seen the client's own request, so what it says
  against it comes first; otherwise prefill's failure is the cause, and decode's the effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping

from neuron_pushkv.router.fleet import Directories, DirectoryFailure, Engine, Fleet, Leg
from neuron_pushkv.router.metrics import Metrics
from neuron_pushkv.router.openai import Coordinates, Request, decode_body, prefill_body
from neuron_pushkv.router.upstream import Failure, Reply, Upstream

SECOND_OPINION_SECONDS = 0.2
"""How long the other leg's error is waited for where it would be the better one."""


class Dispatcher:
    """Chooses engines and starts dispatches."""

    def __init__(self, fleet: Fleet, directories: Directories, upstream: Upstream, metrics: Metrics) -> None:
        self.fleet = fleet
        self.directories = directories
        self.upstream = upstream
        self.metrics = metrics

    def dispatch(self, request: Request, request_id: str, headers: Mapping[str, str]) -> Dispatch:
        """A dispatch that has not begun yet."""
        prefill, decode = self.fleet.pick()
        return Dispatch(self, prefill, decode, request, request_id, headers)

    async def coordinates(self, engine: Engine) -> Coordinates:
        """Where to ask that prefill engine for KV. Raises :class:`Failure` (503) while it isn't ready."""
        try:
            status = await self.directories.status(engine)
        except DirectoryFailure as error:
            raise Failure(engine, "directory", 503, str(error)) from error
        if not status.ready:
            self.directories.forget(engine)
            raise Failure(engine, "directory", 503, f"{engine} is still starting; try again later")
        return Coordinates(status.engine_id, engine.host, engine.port, status.ranks)


class Dispatch:
    """The two legs of one request. :meth:`begin` once, :meth:`chunks` once, :meth:`end` in any case."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        prefill: Engine,
        decode: Engine,
        request: Request,
        request_id: str,
        headers: Mapping[str, str],
    ) -> None:
        self._dispatcher = dispatcher
        self._engines = {Leg.PREFILL: prefill, Leg.DECODE: decode}
        self._request = request
        self._request_id = request_id
        self._headers = {**headers, "X-Request-Id": request_id}
        self._transfer = uuid.uuid4().hex
        self._tasks: dict[Leg, asyncio.Task[Reply]] = {}
        self._running: set[Leg] = set()

    @property
    def fields(self) -> dict[str, str]:
        """What a log line says about it, besides how it ends."""
        return {"transfer": self._transfer} | {leg.value: engine.url for leg, engine in self._engines.items()}

    async def begin(self) -> Reply:
        """Send both legs; returns once decode's answer has begun well. Raises :class:`Failure`, the client's answer."""
        try:
            source = await self._dispatcher.coordinates(self._engines[Leg.PREFILL])
        except Failure as failure:
            self._count_failure(Leg.PREFILL, failure)
            raise
        bodies = {
            Leg.PREFILL: prefill_body(self._request, self._transfer),
            Leg.DECODE: decode_body(self._request, self._transfer, self._request_id, source),
        }
        self._running = {Leg.PREFILL, Leg.DECODE}
        self._tasks = {leg: asyncio.create_task(self._send(leg, body)) for leg, body in bodies.items()}
        prefilling, decoding = self._tasks[Leg.PREFILL], self._tasks[Leg.DECODE]
        while not decoding.done() and _failure_of(prefilling) is None:
            running = [task for task in self._tasks.values() if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await self._second_opinion()
        failed = _tell(_failure_of(prefilling), _failure_of(decoding), decoding.done())
        if failed is None:
            return decoding.result()
        await self.end("other_leg_failed")
        raise failed

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Decode's answer. Raises :class:`Failure` where it breaks off."""
        try:
            async with contextlib.aclosing(self._tasks[Leg.DECODE].result().chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Failure as failure:
            self._ended(Leg.DECODE, "failed")
            self._count_failure(Leg.DECODE, failure)
            raise
        self._ended(Leg.DECODE, "ok")

    async def end(self, cause: str) -> None:
        """Cancel what still runs, for that cause, and wait until its connections are closed. Idempotent."""
        prefilling = self._tasks.get(Leg.PREFILL)
        if cause == "decode_finished" and prefilling is not None and not prefilling.done():
            # Usually its answer is on its way. If not, decode has had no need of it (the prompt was cached there).
            await asyncio.wait({prefilling}, timeout=SECOND_OPINION_SECONDS)
        for leg in sorted(self._running):
            self._ended(leg, "cancelled")
            self._dispatcher.metrics.cancellations.labels(leg, cause).inc()
        for task in self._tasks.values():
            task.cancel()
        for result in await asyncio.gather(*self._tasks.values(), return_exceptions=True):
            if isinstance(result, Reply):
                await result.close()

    async def _send(self, leg: Leg, body: bytes) -> Reply:
        engine = self._engines[leg]
        try:
            reply = await self._dispatcher.upstream.post(engine, self._request.endpoint, body, self._headers)
        except Failure as failure:
            self._ended(leg, "failed")
            self._count_failure(leg, failure)
            if leg is Leg.PREFILL and not failure.blames_client:
                self._dispatcher.directories.forget(engine)
            raise
        if leg is Leg.PREFILL:
            self._ended(leg, "ok")
        return reply

    async def _second_opinion(self) -> None:
        """Wait briefly for the other leg's error if it would be told instead."""
        prefilling, decoding = self._tasks[Leg.PREFILL], self._tasks[Leg.DECODE]
        prefill, decode = _failure_of(prefilling), _failure_of(decoding)
        if prefill is not None and prefill.blames_client and not decoding.done():
            await asyncio.wait({decoding}, timeout=SECOND_OPINION_SECONDS)
        elif decode is not None and not decode.blames_client and not prefilling.done():
            await asyncio.wait({prefilling}, timeout=SECOND_OPINION_SECONDS)

    def _ended(self, leg: Leg, outcome: str) -> None:
        if leg in self._running:
            self._running.remove(leg)
            self._dispatcher.metrics.legs.labels(leg, outcome).inc()

    def _count_failure(self, leg: Leg, failure: Failure) -> None:
        self._dispatcher.metrics.upstream_errors.labels(leg, failure.reason).inc()


def _failure_of(task: asyncio.Task[Reply]) -> Failure | None:
    """The failure that a leg has ended with; what isn't one is a bug and raised."""
    if not task.done():
        return None
    error = task.exception()
    if error is not None and not isinstance(error, Failure):
        raise error
    return error


def _tell(prefill: Failure | None, decode: Failure | None, decided: bool) -> Failure | None:
    """Which failure the client gets; None if decode has begun well (``decided``, and without a failure)."""
    if decided and (decode is None or prefill is None or decode.blames_client):
        return decode
    return prefill
