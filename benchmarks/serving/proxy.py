"""A proxy as thin as one can be, the same for every contestant: ``python -m benchmarks.serving.proxy SETTINGS``.

One process, one event loop, kept connections; bytes of the answer are handed on as they come. Push connectors get both
legs at once, in the way of vLLM's own example for them: prefill's coordinates come from the settings and both legs
carry one X-Request-Id. The pull connector's decode leg has to wait for prefill's answer, which names the blocks. For
each request a line of JSON is appended to the settings' log: seconds from its arrival to prefill's answer and to the
first byte of decode's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

SETTINGS = web.AppKey("settings", dict)
SESSION = web.AppKey("session", ClientSession)


async def completions(request: web.Request) -> web.StreamResponse:
    """Either endpoint that clients use."""
    begun = time.monotonic()
    settings = request.app[SETTINGS]
    body = await request.json()
    name = uuid.uuid4().hex
    times: dict[str, Any] = {"request": name}
    if settings["order"] == "undivided":
        return await _answer(request, "undivided", body, name, times, begun)
    leg = asyncio.create_task(_prefill(request, body, name, times, begun))
    parameters = {**settings["source"], "do_remote_prefill": True, "do_remote_decode": False}
    if settings["order"] == "prefill first":
        parameters = await leg
    parameters |= {"remote_request_id": parameters.get("remote_request_id", name), "transfer_id": name}
    try:
        return await _answer(request, "decode", {**body, "kv_transfer_params": parameters}, name, times, begun)
    finally:
        await leg


async def _prefill(
    request: web.Request, body: dict[str, Any], name: str, times: dict[str, Any], begun: float
) -> dict[str, Any]:
    settings = request.app[SETTINGS]
    leg = {key: value for key, value in body.items() if key not in ("stream", "stream_options", "min_tokens")}
    leg |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    leg["kv_transfer_params"]["transfer_id"] = name
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    url = settings["prefill"] + request.path
    async with request.app[SESSION].post(url, json=leg, headers={"X-Request-Id": name}) as response:
        response.raise_for_status()
        answer = await response.json()
        times["prefill"] = time.monotonic() - begun
        return dict(answer.get("kv_transfer_params") or {})


async def _answer(
    request: web.Request, engine: str, body: dict[str, Any], name: str, times: dict[str, Any], begun: float
) -> web.StreamResponse:
    settings = request.app[SETTINGS]
    url = settings[engine] + request.path
    async with request.app[SESSION].post(url, json=body, headers={"X-Request-Id": name}) as response:
        answer = web.StreamResponse(status=response.status)
        answer.content_type = response.content_type
        await answer.prepare(request)
        async for piece in response.content.iter_any():
            times.setdefault("first", time.monotonic() - begun)
            await answer.write(piece)
        await answer.write_eof()
    with Path(settings["log"]).open("a") as log:  # noqa: ASYNC230 a line, after the answer
        log.write(json.dumps(times) + "\n")
    return answer


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()


async def _sessions(app: web.Application) -> Any:
    connector = TCPConnector(limit=0)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=None)) as session:
        app[SESSION] = session
        yield


def application(settings: dict[str, Any]) -> web.Application:
    """``settings``: the order of the legs, prefill's coordinates (``source``), the engines' URLs and the ``log``."""
    app = web.Application(client_max_size=1 << 26)
    app[SETTINGS] = settings
    app.cleanup_ctx.append(_sessions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", completions)
    app.router.add_get("/health", _healthy)
    return app


def main(settings: dict[str, Any]) -> None:
    """Serve until ended."""
    web.run_app(application(settings), host=settings["host"], port=settings["port"], print=None, access_log=None)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
