"""Real HTTP servers that fail in the ways in which vLLM fails, and that can't be had from vLLM on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from neuron_pushkv.router.app import listener
from neuron_pushkv.wire import EngineStatus

PATIENCE = 30.0
"""How long anything in these tests may take on a busy machine; on an idle one all of it is over in milliseconds."""


class Loop:
    """One event loop in a thread of its own, in which all servers of a test run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """Run a coroutine there and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def close(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


@contextlib.contextmanager
def served(loop: Loop, app: ASGIApp, lifespan: str = "off") -> Iterator[str]:
    """``app`` behind a real HTTP server on a free port; its base URL."""
    with listener("127.0.0.1", 0) as listening:
        config = uvicorn.Config(app, log_config=None, lifespan=lifespan, timeout_graceful_shutdown=1)  # type: ignore[arg-type]
        server = uvicorn.Server(config)
        serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listening]), loop.loop)
        deadline = time.monotonic() + PATIENCE
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        serving.result(PATIENCE)


@dataclass
class Call:
    """One request that an engine has got, and what it can do about it."""

    path: str
    headers: Mapping[str, str]
    content: bytes
    _receive: Receive
    _send: Send
    gone: threading.Event = field(default_factory=threading.Event)
    """Set once the other side has closed the connection before it was answered."""

    @property
    def body(self) -> Any:
        """The request's JSON."""
        return json.loads(self.content)

    @property
    def transfer(self) -> Any:
        """Its kv_transfer_params."""
        return self.body["kv_transfer_params"]

    async def answer(self, status: int, body: bytes, media_type: str = "application/json") -> None:
        """Answer at once."""
        await self.start(status, media_type)
        await self._send({"type": "http.response.body", "body": body})

    async def json(self, status: int, value: Any) -> None:
        """Answer at once with JSON."""
        await self.answer(status, json.dumps(value).encode())

    async def error(self, status: int, message: str) -> None:
        """Answer with an error as vLLM words it."""
        await self.json(status, error(status, message))

    async def start(self, status: int = 200, media_type: str = "text/event-stream; charset=utf-8") -> None:
        """Send status and headers."""
        headers = [(b"content-type", media_type.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End the body properly. Without it the server cuts the connection when the behaviour returns."""
        await self._send({"type": "http.response.body", "body": b""})

    async def hang(self) -> None:
        """Say nothing (more) until the other side gives up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


Behaviour = Callable[[Call], Awaitable[None]]


class FakeEngine:
    """Does with a generation request what the test says."""

    def __init__(self) -> None:
        self.url = ""
        self.arrived = threading.Condition()
        self.reset(EngineStatus("engine", 1, True, 1, "tcp", "libfabric 2.5", 0))

    def reset(self, status: EngineStatus) -> None:
        """As if just started."""
        self.behaviour: Behaviour = hang
        self.calls: list[Call] = []
        self.health = 200
        self.status = status
        """What its directory says."""
        self.directory_failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = bytearray()
        more = True
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        call = Call(scope["path"], headers, bytes(content), receive, send)
        if call.path == "/health":
            await call.answer(self.health, b"")
        elif call.path == "/v1/models":
            await call.json(200, {"object": "list", "data": [{"id": "m"}], "seen": headers.get("authorization")})
        else:
            with self.arrived:
                self.calls.append(call)
                self.arrived.notify_all()
            await self.behaviour(call)

    def call(self, number: int = 0) -> Call:
        """The request of that number since the test began; waits for it."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.calls) > number, PATIENCE), "no such request came"
            return self.calls[number]


async def hang(call: Call) -> None:
    """Never answer."""
    await call.hang()


def error(status: int, message: str) -> dict[str, Any]:
    """An error as vLLM words it."""
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status}}


def event(value: Any) -> bytes:
    """One server-sent event with JSON."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def token(text: str) -> bytes:
    """The event of one token of a completion."""
    return event({"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": None}]})


def stream(*chunks: bytes, starts: bool = True) -> Behaviour:
    """Answer with these, or go on with them, and end properly."""

    async def behaviour(call: Call) -> None:
        if starts:
            await call.start()
        for chunk in chunks:
            await call.chunk(chunk)
        await call.finish()

    return behaviour


def answer(status: int, value: Any) -> Behaviour:
    """Answer with JSON."""

    async def behaviour(call: Call) -> None:
        await call.json(status, value)

    return behaviour


def fail(status: int, message: str) -> Behaviour:
    """Answer with an error."""
    return answer(status, error(status, message))


def after(event: asyncio.Event | threading.Event, then: Behaviour) -> Behaviour:
    """Wait first."""

    async def behaviour(call: Call) -> None:
        while not event.is_set():
            await asyncio.sleep(0.005)
        await then(call)

    return behaviour


@contextlib.contextmanager
def slamming() -> Iterator[str]:
    """A server that reads a request and resets the connection: what a process looks like that dies just then."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def slam() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.recv(1 << 16)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()

        thread = threading.Thread(target=slam, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
