"""A router between two engines that do what a test tells them to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest

from neuron_pushkv.config import RouterSettings
from neuron_pushkv.router.app import create_app
from neuron_pushkv.wire import EngineStatus

from .servers import PATIENCE, FakeEngine, Loop, served

PREFILL_PORT = 14600
DECODE_PORT = 14700


@dataclass
class Bench:
    """The router's client, and both engines."""

    client: httpx.Client
    prefill: FakeEngine
    decode: FakeEngine
    url: str

    def completion(self, **fields: object) -> httpx.Response:
        """Post a completion."""
        return self.client.post("/v1/completions", json={"model": "m", "prompt": "hello", **fields})

    def number(self, name: str, **labels: str) -> float:
        """The value of one metric, 0 if it has never been counted."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.client.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == name and wanted <= set(rest.rstrip("}").split(",")):
                return float(value)
        return 0.0

    def counts(self, name: str, **labels: str) -> Callable[[], float]:
        """How much a metric has grown since this call."""
        before = self.number(name, **labels)
        return lambda: self.number(name, **labels) - before


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that must come true by itself."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextlib.contextmanager
def bench(
    loop: Loop, prefill: FakeEngine, decode: FakeEngine, *, real_directories: bool = False, **settings: object
) -> Iterator[Bench]:
    """A router in front of these engines, with these settings; it asks their directories or just the engines."""
    values = {
        "prefill": [prefill.url],
        "decode": [decode.url],
        "prefill_push": [f"127.0.0.1:{PREFILL_PORT}"],
        "decode_push": [f"127.0.0.1:{DECODE_PORT}"],
        "connect_seconds": 10.0,
        **settings,
    }

    async def query(_: str, port: int) -> EngineStatus:
        engine = prefill if port == PREFILL_PORT else decode
        if engine.directory_failure is not None:
            raise engine.directory_failure
        return engine.status

    app = create_app(RouterSettings.model_validate(values), None if real_directories else query)
    with (
        served(loop, app, lifespan="on") as url,
        httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client,
    ):
        yield Bench(client, prefill, decode, url)


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    """Where all servers run."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def engines(loop: Loop) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    """A prefill and a decode engine."""
    prefill, decode = FakeEngine(), FakeEngine()
    with served(loop, prefill) as prefill.url, served(loop, decode) as decode.url:
        yield prefill, decode


@pytest.fixture(scope="session")
def shared_router(loop: Loop, engines: tuple[FakeEngine, FakeEngine]) -> Iterator[Bench]:
    """One router for all tests that need no settings of their own."""
    with bench(loop, *engines) as router:
        yield router


@pytest.fixture
def fresh(engines: tuple[FakeEngine, FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    """Both engines as if just started."""
    for engine, name in zip(engines, ("prefill-0", "decode-0"), strict=True):
        engine.reset(EngineStatus(name, 1, True, 2, "tcp", "libfabric 2.5", 0))
    return engines


@pytest.fixture
def router(shared_router: Bench, fresh: tuple[FakeEngine, FakeEngine]) -> Bench:
    """The shared router, between engines as if just started."""
    assert fresh
    return shared_router
