"""What is at the other end, and what it is called if it is not one of ours."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from neuron_pushkv import __version__
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.directory import Directory
from neuron_pushkv.doctor import agreement, peer
from neuron_pushkv.doctor.findings import Finding, Id, Level
from neuron_pushkv.doctor.peer import Place, Visit, reachable, visit
from neuron_pushkv.transport.loopback import LoopbackNetwork, LoopbackTransport
from neuron_pushkv.wire import EngineStatus
from tests.engine.sides import Side, until

from .test_node import said

HOST = "127.0.0.1"
KEY = "a key of these tests"
SECONDS = 5.0
SHORT = ConnectorSettings(provider="tcp", fleet_key=KEY, connect_seconds=0.3)


def settings(port: int = 14600, **more: Any) -> ConnectorSettings:
    return ConnectorSettings(provider="tcp", port=port, **{"fleet_key": KEY, "connect_seconds": SECONDS, **more})


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def loopback() -> LoopbackTransport:
    return LoopbackTransport(LoopbackNetwork())


def findings(seen: Visit) -> dict[Id, Finding]:
    assert len({finding.id for finding in seen.findings}) == len(seen.findings)
    return {finding.id: finding for finding in seen.findings}


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Place]:
    """A server of one thread, which gives each connection to ``answer`` and ends when the test does."""
    with socket.create_server((HOST, 0)) as server, ExitStack() as open_ones:

        def run() -> None:
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:  # Closed by the test.
                    return
                open_ones.enter_context(connection)
                with suppress(OSError):  # It has left already: the first one only looks whether there is a listener.
                    answer(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Place(HOST, server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(SECONDS)
            assert not thread.is_alive()


class TestReachable:
    def test_somebody_listens(self) -> None:
        with socket.create_server((HOST, 0)) as server:
            said(reachable(Place(HOST, server.getsockname()[1]), SECONDS), Level.OK)

    def test_nobody_listens(self) -> None:
        refused = reachable(Place(HOST, free_port()), SECONDS)
        said(refused, Level.ERROR, "refuses connections", "start the engine")
        assert refused.evidence["why"] == "refused"

    @pytest.mark.parametrize(
        ("failure", "why", "text"),
        [
            (TimeoutError(), "timeout", "security group"),
            (socket.gaierror(-2, "Name or service not known"), "name", "the name nowhere is not known"),
            (OSError(101, "Network is unreachable"), "network", "Network is unreachable"),
        ],
    )
    def test_what_a_way_can_lack(self, monkeypatch: pytest.MonkeyPatch, failure: OSError, why: str, text: str) -> None:
        asked: list[float] = []

        def fail(place: tuple[str, int], seconds: float) -> None:
            asked.append(seconds)
            raise failure

        monkeypatch.setattr(peer.socket, "create_connection", fail)
        found = reachable(Place("nowhere", 1), 2.5)
        said(found, Level.ERROR, text)
        assert found.evidence["why"] == why
        assert asked == [2.5]  # bounded


def saying(words: bytes) -> Callable[[socket.socket], None]:
    """Says that to whoever connects, and no more."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)

    return answer


class TestStrangers:
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peer, "SNIFF_SECONDS", 10.0)

    def strange(self, answer: Callable[[socket.socket], None]) -> Finding:
        with answering(answer) as place:
            seen = findings(visit(place, SHORT, None, None))
        assert list(seen) == [Id.PEER_REACHABLE, Id.PEER_PROTOCOL]
        return seen[Id.PEER_PROTOCOL]

    def test_one_that_never_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peer, "SNIFF_SECONDS", 0.2)
        said(self.strange(lambda connection: None), Level.ERROR, "listens and says nothing")

    def test_one_that_hangs_up(self) -> None:
        said(self.strange(lambda connection: connection.close()), Level.ERROR, "listens and says nothing")

    def test_a_connector_that_pulls(self) -> None:
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00NULL"
        found = self.strange(lambda connection: connection.sendall(greeting))
        said(found, Level.ERROR, "ZeroMQ", "pull", "NixlConnector")

    def test_something_else(self) -> None:
        said(self.strange(saying(b"SSH-2.0-x\r\n")), Level.ERROR, "another protocol")

    @pytest.mark.parametrize(
        ("body", "text"), [(b'{"version": "0.32.0"}', "the HTTP port of vLLM 0.32.0"), (b"hello", "an HTTP server")]
    )
    def test_an_http_server(self, body: bytes, text: str) -> None:
        class Pages(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        server = http.server.ThreadingHTTPServer((HOST, 0), Pages)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            seen = findings(visit(Place(HOST, server.server_port), SHORT, None, None))
        finally:
            server.shutdown()
            server.server_close()
            thread.join(SECONDS)
        said(seen[Id.PEER_PROTOCOL], Level.ERROR, text, "14600")

    def test_a_version_must_look_like_one(self) -> None:
        for body in ({"version": 3}, {"version": "x" * 80}, {"version": "\x1b[31m"}, ["version"]):
            answer = b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(body).encode()
            said(self.strange(saying(answer)), Level.ERROR, "an HTTP server")


@contextmanager
def engine(name: str = "other", **more: Any) -> Iterator[Side]:
    """An engine without vLLM, its one rank at home."""
    with Side(name, loopback(), settings(free_port(), **more)) as side:
        place = Place(HOST, side.settings.port)
        until(lambda: (seen := visit(place, side.settings, None, None).status) and seen.ready, "the rank came home")
        yield side


class TestEngines:
    def test_one_in_order(self) -> None:
        with engine() as other:
            place = Place(HOST, other.settings.port)
            seen = visit(place, settings(), loopback(), None)
        found = findings(seen)
        assert {finding.level for finding in seen.findings} == {Level.OK}
        assert found[Id.PEER_HANDSHAKE].evidence["engine_id"] == "other"
        assert found[Id.PEER_VERSIONS].evidence["theirs"]["neuron-pushkv"] == __version__
        assert found[Id.PEER_RANKS].evidence == {"answered": 1}
        assert found[Id.PEER_LAYOUT].evidence["block_sizes"] == [16]
        assert "none here to compare with" in found[Id.PEER_LAYOUT].what

    def test_another_key(self) -> None:
        with engine() as other:
            seen = visit(Place(HOST, other.settings.port), settings(fleet_key="another key"), None, None)
        assert seen.status is None
        found = findings(seen)
        said(found[Id.PEER_HANDSHAKE], Level.ERROR, "fleet key", "fleet_key_file")
        assert Id.PEER_ENGINE not in found

    def test_no_rank_yet(self) -> None:
        made = Directory(settings(), engine_id="slow", incarnation=1, port=0, ranks=2)
        try:
            found = findings(visit(Place(*made.address), settings(), None, None))
        finally:
            made.close()
        said(found[Id.PEER_ENGINE], Level.ERROR, "engine slow: not all of its 2 workers are up")

    def test_another_provider(self) -> None:
        with engine() as other:
            ours = loopback()
            ours.provider = "tcp"
            found = findings(visit(Place(HOST, other.settings.port), settings(), ours, None))
        said(found[Id.PEER_PROVIDER], Level.ERROR, "this side uses provider tcp and engine other loopback")

    def test_caches_are_compared_with_an_engine_of_ours(self) -> None:
        with engine("ours") as ours, engine("other") as other:
            (local,), asked = peer.ranks(Place(HOST, ours.settings.port), peer.line.ours(KEY.encode()), SECONDS)
            assert asked.level is Level.OK
            found = findings(visit(Place(HOST, other.settings.port), settings(), None, local))
        said(found[Id.PEER_LAYOUT], Level.OK, "ours and other fit each other")

    @pytest.mark.parametrize(
        ("layout", "model", "text"), [("another", "test-model", "another"), ("test", "x", "the models differ")]
    )
    def test_caches_that_do_not_fit(self, layout: str, model: str, text: str) -> None:
        us = peer.line.ours(KEY.encode())
        with ExitStack() as stack:
            sides = [
                stack.enter_context(Side(name, loopback(), settings(free_port()), kernel, of))
                for name, kernel, of in (("ours", "test", "test-model"), ("other", layout, model))
            ]
            places = [Place(HOST, side.settings.port) for side in sides]
            ours, theirs = (
                until(lambda place=place: peer.ranks(place, us, SECONDS)[0], "the rank came home")[0]  # type: ignore[misc]
                for place in places
            )
        said(agreement.caches(ours, theirs), Level.ERROR, text)


def status(**more: Any) -> EngineStatus:
    values = {"release": "1", "vllm": "0.32.0", "provider": "efa", "library": "libfabric 2.5", **more}
    return EngineStatus("e", 1, True, 1, values["provider"], values["library"], 0, values["release"], values["vllm"])


@pytest.mark.parametrize(
    ("theirs", "level", "text"),
    [
        ({}, Level.OK, ""),
        ({"vllm": "0.24.0"}, Level.OK, "0.32.0 and 0.24.0"),
        ({"release": ""}, Level.WARNING, "(unknown)"),
        ({"library": "libfabric 1.22"}, Level.WARNING, "libfabric 1.22"),
        ({"library": "libfabric 1.22", "provider": "tcp"}, Level.OK, ""),
    ],
)
def test_releases(theirs: dict[str, str], level: Level, text: str) -> None:
    said(agreement.releases("P", status(), "D", status(**theirs)), level, text)
