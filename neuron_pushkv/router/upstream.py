"""One request to one engine: sending it, knowing how its answer begins, and every way in which that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import cast

import httpx

from neuron_pushkv.router.events import Beginning, Kind
from neuron_pushkv.router.fleet import Engine
from neuron_pushkv.router.openai import error_body

PREAMBLE_SECONDS = 0.25
"""How long chat's opening is held back for what follows it. vLLM writes an error right behind it; a parser may hold the
first word back for longer."""
MAX_BEGINNING_BYTES = 1 << 20
KEEPALIVE_SECONDS = 2.0
"""Idle connections are dropped before the server does so (vLLM: 5 s): a request must never meet that."""
JSON = "application/json"
EVENTS = "text/event-stream"


class Failure(Exception):
    """An engine did not do its part; ``str()`` is one sentence that names it.

    ``status``, ``body`` and ``media_type`` are what the client gets; ``reason`` labels metrics.
    """

    def __init__(
        self, engine: Engine, reason: str, status: int, message: str, body: bytes = b"", media_type: str = JSON
    ) -> None:
        super().__init__(message)
        self.engine = engine
        self.reason = reason
        self.status = status
        self.body = body or error_body(status, message)
        self.media_type = media_type if body else JSON

    @property
    def blames_client(self) -> bool:
        """Whether the engine says that the request is wrong."""
        return 400 <= self.status < 500


class Upstream:
    """HTTP client of all engines."""

    def __init__(self, connect_seconds: float) -> None:
        # The environment's proxies are meant for the outside; the engines' addresses are meant as they stand.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=connect_seconds),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
            trust_env=False,
        )
        self._connect_seconds = connect_seconds

    async def close(self) -> None:
        """Drop all connections."""
        await self._client.aclose()

    async def get(self, engine: Engine, path: str, headers: Mapping[str, str]) -> httpx.Response:
        """A small GET, whole, in bounded time. Raises :class:`Failure`."""
        try:
            async with asyncio.timeout(self._connect_seconds):
                return await self._client.get(engine.url + path, headers=dict(headers))
        except (httpx.HTTPError, TimeoutError) as error:
            raise _failure(engine, error) from error

    async def post(self, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send one leg and wait until its answer has begun well. Raises :class:`Failure`.

        Cancelling this call or closing the reply closes the connection: that is how vLLM learns to abort.
        """
        send = {**headers, "Content-Type": JSON, "Accept-Encoding": "identity"}
        request = self._client.build_request("POST", engine.url + path, content=body, headers=send)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _failure(engine, error) from error
        reply = Reply(engine, response)
        try:
            await reply.begin()
        except BaseException:
            await reply.close()
            raise
        return reply


class Reply:
    """An answer that has begun well. Iterate :meth:`chunks` once; close it in any case."""

    def __init__(self, engine: Engine, response: httpx.Response) -> None:
        self.status = response.status_code
        self.media_type: str = response.headers.get("content-type", "application/octet-stream")
        self.streamed = self.status == 200 and self.media_type.split(";")[0].strip().lower() == EVENTS
        self._engine = engine
        self._response = response
        self._incoming = cast("AsyncGenerator[bytes, None]", response.aiter_raw())
        self._head = b""
        self._following: asyncio.Task[bytes] | None = None

    async def begin(self) -> None:
        """Read the whole answer, or a stream's first event. Raises :class:`Failure` if it is an error."""
        if self.streamed:
            await self._begin_stream()
            return
        while chunk := await self._next():
            self._head += chunk
        if 300 <= self.status < 400:
            text = f"{self._engine} answers with status {self.status}; check its URL in the router's settings"
            raise Failure(self._engine, f"http_{self.status}", 502, text)
        if self.status >= 400:
            text = f"{self._engine} answers with status {self.status}"
            raise Failure(self._engine, f"http_{self.status}", self.status, text, self._head, self.media_type)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer's bytes as they come. Raises :class:`Failure` where the engine breaks off."""
        yield self._head
        while self.streamed:
            following, self._following = self._following, None
            chunk = await (following or self._next())
            if not chunk:
                return
            yield chunk

    async def close(self) -> None:
        """Let go of the connection; one whose answer has not been read to its end is closed."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._incoming.aclose()
        await self._response.aclose()

    async def _begin_stream(self) -> None:
        beginning = Beginning()
        while not beginning.decided and len(self._head) < MAX_BEGINNING_BYTES:
            self._following = asyncio.create_task(self._next())
            patience = PREAMBLE_SECONDS if beginning.kind is Kind.PREAMBLE else None
            finished, _ = await asyncio.wait({self._following}, timeout=patience)
            if not finished:
                return
            chunk = self._following.result()
            self._following = None
            if not chunk:
                raise _lost(self._engine, "before its first event")
            self._head += chunk
            beginning.feed(chunk)
        if beginning.kind is Kind.ERROR:
            raise _error_event(self._engine, beginning.data)

    async def _next(self) -> bytes:
        """The next chunk, or nothing at the end."""
        try:
            return await anext(self._incoming, b"")
        except httpx.HTTPError as error:
            raise _failure(self._engine, error) from error


def _error_event(engine: Engine, data: bytes) -> Failure:
    """vLLM puts the status that it could not send any more into the error's code."""
    error = json.loads(data)["error"]
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return Failure(engine, "error_event", status, f"{engine} answers with an error event", data)


def _lost(engine: Engine, when: str) -> Failure:
    return Failure(engine, "lost", 502, f"{engine} ended the connection {when}; it may have died, try again")


def _failure(engine: Engine, error: Exception) -> Failure:
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return Failure(engine, "unreachable", 503, f"{engine} can't be reached; it may be down, try again later")
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        return Failure(engine, "timeout", 504, f"{engine} did not answer in time")
    if isinstance(error, (httpx.NetworkError, httpx.RemoteProtocolError)):
        return _lost(engine, "in the middle of a request")
    return Failure(engine, "bad_answer", 502, f"{engine} can't be talked to: {str(error) or type(error).__name__}")
