"""Which engines there are, and what their directories say of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import httpx

from neuron_pushkv.config import RouterSettings, host_port
from neuron_pushkv.errors import ConfigError, PushKVError
from neuron_pushkv.wire import EngineStatus

log = logging.getLogger(__name__)

STATUS_SECONDS = 5.0
"""How long a directory's answer is used before it is asked again."""
UNREACHABLE_SECONDS = 1.0
"""How long a directory that could not be asked isn't asked again on behalf of requests."""

Query = Callable[[str, int], Awaitable[EngineStatus]]
"""Ask the directory at (host, port); raises :class:`PushKVError`, which names the place, in bounded time."""


class Leg(StrEnum):
    """The two halves of a request, and so the two kinds of engine."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Engine:
    """One vLLM server: where it answers HTTP and where its directory listens."""

    leg: Leg
    url: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.leg} engine {self.url}"


class Fleet:
    """The engines of the settings. Raises :class:`ConfigError` for those it can't route to."""

    def __init__(self, settings: RouterSettings) -> None:
        self.prefill = _engines(Leg.PREFILL, settings.prefill, settings.prefill_push)
        self.decode = _engines(Leg.DECODE, settings.decode, settings.decode_push)
        for leg, engines in ((Leg.PREFILL, self.prefill), (Leg.DECODE, self.decode)):
            if len(engines) != 1:
                raise ConfigError(f"router: list exactly one {leg} engine; there are {len(engines)}")

    def pick(self) -> tuple[Engine, Engine]:
        """The prefill and the decode engine for the next request."""
        return self.prefill[0], self.decode[0]


@dataclass
class _Known:
    status: EngineStatus | None
    failure: str
    until: float


class Directories:
    """Directories' answers, remembered for a while; concurrent askers share one question."""

    def __init__(self, query: Query, clock: Callable[[], float] = time.monotonic) -> None:
        self._query = query
        self._clock = clock
        self._known: dict[Engine, _Known] = {}
        self._asking: dict[Engine, asyncio.Task[_Known]] = {}

    async def status(self, engine: Engine, *, fresh: bool = False) -> EngineStatus:
        """What that engine is. Raises :class:`DirectoryFailure` if its directory doesn't tell."""
        known = self._known.get(engine)
        if fresh or known is None or self._clock() >= known.until:
            task = self._asking.get(engine)
            if task is None:
                task = asyncio.create_task(self._ask(engine))
                self._asking[engine] = task
                task.add_done_callback(lambda _: self._asking.pop(engine))
            # One asker that leaves must not end the question of the others.
            known = await asyncio.shield(task)
        if known.status is None:
            raise DirectoryFailure(known.failure)
        return known.status

    def forget(self, engine: Engine) -> None:
        """That engine has failed a request: ask again before the next one."""
        known = self._known.get(engine)
        if known is not None and known.status is not None:
            del self._known[engine]

    async def _ask(self, engine: Engine) -> _Known:
        before = self._known.get(engine)
        try:
            status = await self._query(engine.host, engine.port)
        except PushKVError as error:
            failure = f"the push directory of {engine} does not answer: {error}"
            known = _Known(None, failure, self._clock() + UNREACHABLE_SECONDS)
        else:
            known = _Known(status, "", self._clock() + STATUS_SECONDS)
            if before is not None and before.status is not None and before.status.incarnation != status.incarnation:
                log.info("%s (%s) has been restarted", engine, status.engine_id)
        self._known[engine] = known
        return known


class DirectoryFailure(PushKVError):
    """A directory does not answer; ``str()`` names the engine."""


def _engines(leg: Leg, urls: tuple[str, ...], directories: tuple[str, ...]) -> tuple[Engine, ...]:
    engines = []
    for url, directory in zip(urls, directories, strict=True):
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"router: {leg} URL '{url}' is not a URL: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"router: {leg} URL '{url}' must look like http://host:port")
        host, port = host_port(directory, f"router: {leg}_push")
        engines.append(Engine(leg, url.rstrip("/"), host, port))
    return tuple(engines)
