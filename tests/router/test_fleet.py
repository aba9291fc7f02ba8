"""Which engines the router accepts, and how it remembers what their directories say."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from neuron_pushkv.config import RouterSettings, host_port
from neuron_pushkv.errors import ConfigError, HandshakeRefused, Reason
from neuron_pushkv.router import create_app
from neuron_pushkv.router.fleet import (
    STATUS_SECONDS,
    UNREACHABLE_SECONDS,
    Directories,
    DirectoryFailure,
    Engine,
    Leg,
)
from neuron_pushkv.wire import EngineStatus

ENGINE = Engine(Leg.PREFILL, "http://127.0.0.1:8100", "127.0.0.1", 14600)


def status(incarnation: int = 1) -> EngineStatus:
    """A ready engine."""
    return EngineStatus("prefill-0", incarnation, True, 1, "tcp", "libfabric 2.5", 0)


class Asked:
    """A directory that counts questions, and a clock."""

    def __init__(self) -> None:
        self.answer: EngineStatus | Exception = status()
        self.questions = 0
        self.now = 0.0
        self.directories = Directories(self._query, lambda: self.now)

    async def _query(self, host: str, port: int) -> EngineStatus:
        assert (host, port) == ("127.0.0.1", 14600)
        self.questions += 1
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run it in a loop of its own."""
    asyncio.run(work)


def test_an_answer_is_remembered_for_a_while() -> None:
    async def work() -> None:
        asked = Asked()
        for _ in range(3):
            assert await asked.directories.status(ENGINE) == status()
        assert asked.questions == 1
        asked.now, asked.answer = STATUS_SECONDS, status(2)
        assert (await asked.directories.status(ENGINE)).incarnation == 2
        assert asked.questions == 2

    run(work())


def test_askers_at_the_same_time_share_a_question_and_one_may_leave() -> None:
    async def work() -> None:
        asked = Asked()
        askers = [asyncio.create_task(asked.directories.status(ENGINE)) for _ in range(5)]
        await asyncio.sleep(0)
        askers[0].cancel()
        found = await asyncio.gather(*askers, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1:] == [status()] * 4
        assert asked.questions == 1

    run(work())


def test_an_engine_that_failed_is_asked_again() -> None:
    async def work() -> None:
        asked = Asked()
        await asked.directories.status(ENGINE)
        asked.directories.forget(ENGINE)
        asked.answer = status(2)
        assert (await asked.directories.status(ENGINE)).incarnation == 2

    run(work())


def test_a_directory_that_does_not_answer_is_not_asked_for_each_request() -> None:
    async def work() -> None:
        asked = Asked()
        asked.answer = HandshakeRefused(Reason.UNREACHABLE, "127.0.0.1:14600 can't be reached: refused")
        for _ in range(3):
            with pytest.raises(DirectoryFailure) as caught:
                await asked.directories.status(ENGINE)
            asked.directories.forget(ENGINE)
        assert str(caught.value) == (
            "the push directory of prefill engine http://127.0.0.1:8100 does not answer: "
            "127.0.0.1:14600 can't be reached: refused"
        )
        assert asked.questions == 1
        asked.answer = status()
        with pytest.raises(DirectoryFailure):
            await asked.directories.status(ENGINE)
        assert await asked.directories.status(ENGINE, fresh=True) == status()
        asked.answer = HandshakeRefused(Reason.TIMEOUT, "no")
        with pytest.raises(DirectoryFailure):
            await asked.directories.status(ENGINE, fresh=True)
        asked.now, asked.answer = UNREACHABLE_SECONDS, status()
        assert await asked.directories.status(ENGINE) == status()

    run(work())


@pytest.mark.parametrize(
    ("text", "place"),
    [("127.0.0.1:1", ("127.0.0.1", 1)), ("p.example:65535", ("p.example", 65535)), ("[::1]:14600", ("::1", 14600))],
)
def test_hosts_and_ports(text: str, place: tuple[str, int]) -> None:
    assert host_port(text, "here") == place


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "::1:14600", "host:\u0661", "[]:1"]
)
def test_what_is_not_a_host_and_port_is_said_so(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        host_port(text, "here")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "router: list exactly one prefill engine; there are 0"),
        (
            {"prefill": ["http://a", "http://b"], "prefill_push": ["a:1", "b:1"]},
            "router: list exactly one prefill engine; there are 2",
        ),
        ({"prefill": ["a:8000"]}, "router: prefill URL 'a:8000' must look like http://host:port"),
        ({"prefill": ["ftp://a"]}, "router: prefill URL 'ftp://a' must look like http://host:port"),
        ({"prefill": ["http://"]}, "router: prefill URL 'http://' must look like http://host:port"),
        ({"prefill": ["http://a:x"]}, "router: prefill URL 'http://a:x' is not a URL: Invalid port: 'x'"),
        ({"prefill_push": ["a"], "prefill": ["http://a"]}, "router: prefill_push: 'a' is not host:port"),
    ],
)
def test_engines_that_can_not_be_routed_to_are_refused(settings: dict[str, Any], sentence: str) -> None:
    values = {"prefill_push": ["a:1"] * len(settings.get("prefill", ())), **settings}
    with pytest.raises(ConfigError) as caught:
        create_app(RouterSettings.model_validate(values))
    assert str(caught.value) == sentence
