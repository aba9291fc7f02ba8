"""One generation request over HTTP: read it whole, answer it, and notice when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from neuron_pushkv.router.dispatch import Dispatch, Dispatcher
from neuron_pushkv.router.events import is_whole
from neuron_pushkv.router.openai import MAX_BODY_BYTES, MAX_REQUEST_ID, Endpoint, Refusal, Refused, error_body, parse
from neuron_pushkv.router.upstream import JSON, Failure
from neuron_pushkv.telemetry import lines

log = logging.getLogger(__name__)
requests = logging.getLogger("neuron_pushkv.router.requests")
"""One line for each request that has ended: INFO, or WARNING if an engine or the router has failed it."""

PASSED_HEADERS = ("authorization", "traceparent", "tracestate", "x-session-id", "x-vllm-priority")
"""Request headers that vLLM reads and that mean the same on both engines."""

FAREWELL_SECONDS = 5.0
"""How long an error may take to be sent."""


class ClientLeft(Exception):
    """The client has closed its connection."""


class GenerationEndpoint:
    """ASGI endpoint of ``/v1/completions`` or ``/v1/chat/completions``."""

    def __init__(self, endpoint: Endpoint, dispatcher: Dispatcher, request_seconds: float) -> None:
        self._endpoint = endpoint
        self._dispatcher = dispatcher
        self._request_seconds = request_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        with self._dispatcher.metrics.in_flight.track_inprogress():
            answer = _Answer(send)
            ending = await self._serve(Headers(scope=scope), receive, answer)
            if ending.error is not None:
                # A client that doesn't read must not hold the request for longer than it may take.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL_SECONDS):
                        await answer.fail(*ending.error)

    async def _serve(self, headers: Headers, receive: Receive, answer: _Answer) -> _Ending:
        """Answer, unless that fails: then both legs have ended on return, and the client is to be told."""
        metrics = self._dispatcher.metrics
        started = time.monotonic()
        dispatch: Dispatch | None = None
        ending = _Ending("error", "shutdown")
        try:
            async with asyncio.timeout(self._request_seconds):
                answer.request_id = _request_id(headers)
                content = await _body(headers, receive)
                answer.closes = False
                request = parse(self._endpoint, content)
                dispatch = self._dispatcher.dispatch(request, answer.request_id, passed_headers(headers))
                await _while_client_stays(receive, self._answer(dispatch, answer, started))
            ending = _Ending(answer.outcome, "decode_finished")
        except Refused as refused:
            metrics.refused.labels(refused.refusal).inc()
            body = error_body(refused.status, str(refused), refused.field)
            ending = _Ending("refused", "", (refused.status, JSON, body), str(refused))
        except Failure as failure:
            error = failure.status, failure.media_type, failure.body
            ending = _Ending("error", "other_leg_failed", error, str(failure))
        except ClientLeft:
            ending = _Ending("client_left", "client_left")
        except TimeoutError:
            status = 408 if dispatch is None else 504
            text = f"the request took longer than the {self._request_seconds:g} s that one may take"
            ending = _Ending("error", "timeout", (status, JSON, error_body(status, text)), text)
        except Exception:
            # Let through, a bug would cut the connection after a bare 500.
            log.exception("request %s has met a bug", answer.request_id)
            ending = _Ending("error", "bug", (500, JSON, error_body(500, "the router has a bug; its log says more")))
        finally:
            seconds = time.monotonic() - started
            metrics.total.labels(self._endpoint).observe(seconds)
            metrics.requests.labels(self._endpoint, ending.outcome).inc()
            if dispatch is not None:
                await dispatch.end(ending.cause)
            self._log(headers, dispatch, answer, ending, seconds)
        return ending

    def _log(
        self, headers: Headers, dispatch: Dispatch | None, answer: _Answer, ending: _Ending, seconds: float
    ) -> None:
        texts = {
            "detail": ending.detail,
            "request": answer.request_id,
            **(dispatch.fields if dispatch is not None else {}),
            "trace": lines.trace_id(headers.get("traceparent", "")),
        }
        fields: dict[str, str | int | float] = {"event": "request_ended", "outcome": ending.outcome}
        status = answer.status or (ending.error[0] if ending.error is not None else 0)
        fields |= {"status": status} if status else {}
        fields |= {"endpoint": self._endpoint.value} | {key: text for key, text in texts.items() if text}
        fields |= {"first_seconds": answer.first_seconds} if answer.first_seconds is not None else {}
        fields["seconds"] = seconds
        blames_client = 400 <= status < 500
        level = logging.WARNING if ending.outcome == "error" and not blames_client else logging.INFO
        lines.log(requests, level, fields)

    async def _answer(self, dispatch: Dispatch, answer: _Answer, started: float) -> None:
        reply = await dispatch.begin()
        answer.first_seconds = time.monotonic() - started
        first = self._dispatcher.metrics.first_event.labels(self._endpoint, str(reply.streamed).lower())
        first.observe(answer.first_seconds)
        async with contextlib.aclosing(dispatch.chunks()) as chunks:
            if reply.streamed:
                await answer.start(reply.status, reply.media_type)
                async for chunk in chunks:
                    await answer.chunk(chunk)
                await answer.finish()
            else:
                body = b"".join([chunk async for chunk in chunks])
                await answer.whole(reply.status, reply.media_type, body)


@dataclass(frozen=True)
class _Ending:
    """How a request has ended."""

    outcome: str
    """ok, refused, error or client_left: the label of the request in the metrics."""
    cause: str
    """Why legs that still run are cancelled."""
    error: tuple[int, str, bytes] | None = None
    """Status, media type and body of the error that the client is to get."""
    detail: str = ""
    """What went wrong, in one sentence for the log."""


class _Answer:
    """What is sent to the client, and how far it has got."""

    def __init__(self, send: Send) -> None:
        self.request_id = ""
        self.outcome = "ok"
        self.status = 0
        """What has been sent; 0 before."""
        self.first_seconds: float | None = None
        """From the request's arrival to the first of its answer."""
        self.closes = True
        """Whether the connection ends with the answer: while the request's body has not been read to its end, it must,
        or the rest would be taken in, however long."""
        self._send = send
        self._tail = b""

    async def start(self, status: int, media_type: str, length: int | None = None) -> None:
        """Send status and headers."""
        headers = [(b"content-type", media_type.encode("latin-1"))]
        if self.request_id:
            headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        if self.closes:
            headers.append((b"connection", b"close"))
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes) -> None:
        """Send what has come, as it is."""
        if b'data: {"error":' in data:
            # Inside a JSON text the quotes would be escaped, so this is an event and not something a model has said.
            self.outcome = "error"
        self._tail = (self._tail + data)[-4:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """The answer is complete."""
        await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, status: int, media_type: str, body: bytes) -> None:
        """Send an answer that is all there."""
        await self.start(status, media_type, len(body))
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, status: int, media_type: str, body: bytes) -> None:
        """Tell the client of a failure: by status, or in an event if its answer has begun."""
        if not self.status:
            await self.whole(status, media_type, body)
            return
        # An event that was cut in two has to be ended before another can be told from it.
        end = b"" if is_whole(self._tail) else b"\n\n"
        await self.chunk(end + b"data: " + body + b"\n\n")
        await self.finish()


def passed_headers(headers: Headers) -> dict[str, str]:
    """The client's headers that both engines get."""
    return {name: headers[name] for name in PASSED_HEADERS if name in headers}


def _request_id(headers: Headers) -> str:
    """The client's X-Request-Id, or a new one."""
    given = headers.get("x-request-id")
    if given is None:
        return uuid.uuid4().hex
    if not 0 < len(given) <= MAX_REQUEST_ID or not given.isascii() or not given.isprintable():
        raise Refused(
            Refusal.BAD_REQUEST, f"X-Request-Id must be 1 to {MAX_REQUEST_ID} printable ASCII characters, or left out"
        )
    return given


async def _body(headers: Headers, receive: Receive) -> bytes:
    """The request's body. Raises :class:`Refused` (413, 415), :class:`ClientLeft`."""
    if headers.get("content-type", "").split(";")[0].strip().lower() != JSON:
        raise Refused(Refusal.MEDIA_TYPE, f"send the body as Content-Type: {JSON}", status=415)
    too_large = Refused(Refusal.TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def _while_client_stays(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end. If the client leaves first, it is cancelled and :class:`ClientLeft` raised."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
