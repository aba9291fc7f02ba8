"""The router as an ASGI application and as a process."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import AsyncGenerator

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from neuron_pushkv.config import RouterSettings
from neuron_pushkv.directory import query_status
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.router.dispatch import Dispatcher
from neuron_pushkv.router.exchange import GenerationEndpoint, passed_headers
from neuron_pushkv.router.fleet import Directories, Fleet, Query
from neuron_pushkv.router.metrics import Metrics
from neuron_pushkv.router.openai import Endpoint, Refusal, error_body
from neuron_pushkv.router.readiness import report
from neuron_pushkv.router.upstream import JSON, Failure, Upstream
from neuron_pushkv.wire import EngineStatus

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10
"""How long requests that are being served may go on after a signal."""


def create_app(settings: RouterSettings, query: Query | None = None) -> Starlette:
    """The application. Raises :class:`ConfigError` if the settings name no engines that it can route to.

    ``query`` asks a directory; by default over its authenticated connection, with the fleet key of the settings.
    """
    fleet = Fleet(settings)
    metrics = Metrics()
    upstream = Upstream(settings.connect_seconds)
    directories = Directories(query or _query(settings))
    dispatcher = Dispatcher(fleet, directories, upstream, metrics)

    async def health(_: Request) -> Response:
        return Response(b'{"status":"up"}', media_type=JSON)

    async def ready(_: Request) -> Response:
        found = await report(fleet, directories, upstream)
        return Response(json.dumps(found), 200 if found["ready"] else 503, media_type=JSON)

    async def models(request: Request) -> Response:
        _, decode = fleet.pick()
        try:
            answer = await upstream.get(decode, "/v1/models", passed_headers(request.headers))
        except Failure as failure:
            return Response(failure.body, failure.status, media_type=failure.media_type)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def numbers(_: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            metrics.refused.labels(Refusal.NOT_FOUND).inc()
            text = f"there is no {request.url.path} here; POST to {' or '.join(Endpoint)}"
        elif error.status_code == 405:
            metrics.refused.labels(Refusal.METHOD).inc()
            text = f"{request.url.path} does not take {request.method}"
        else:
            text = error.detail
        return Response(error_body(error.status_code, text), error.status_code, error.headers, JSON)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        yield
        await upstream.close()

    generation = [
        Route(endpoint, GenerationEndpoint(endpoint, dispatcher, settings.request_seconds), methods=["POST"])
        for endpoint in Endpoint
    ]
    app = Starlette(
        routes=[
            *generation,
            Route("/v1/models", models),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", numbers),
        ],
        exception_handlers={HTTPException: not_routed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _query(settings: RouterSettings) -> Query:
    key = settings.key()

    async def query(host: str, port: int) -> EngineStatus:
        return await query_status(host, port, key=key, seconds=settings.connect_seconds)

    return query


def serve(settings: RouterSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises :class:`ConfigError` if the settings or the port are no good."""
    app = create_app(settings)
    with listener(settings.host, settings.port) as listening:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for chatty in ("httpx", "uvicorn"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        log.info("router listens on %s:%d", settings.host, settings.port)
        config = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


def listener(host: str, port: int) -> socket.socket:
    """A listening socket. Raises :class:`ConfigError` in one sentence, above all if the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. Not every event loop sets it, and without it an event may wait 40 ms for the
            # acknowledgement of the one before.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listening.bind(address)
            listening.listen(1024)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"the router can't listen on {host}:{port}: {error.strerror}; choose another host or port"
        ) from error
    return listening
