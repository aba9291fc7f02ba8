"""The other endpoints, and the router as a process."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from neuron_pushkv import __version__, versions
from neuron_pushkv.config import ConnectorSettings, RouterSettings
from neuron_pushkv.directory import Directory
from neuron_pushkv.errors import ConfigError, HandshakeRefused, Reason
from neuron_pushkv.peers import Connection, Node
from neuron_pushkv.peers.handler import RANK
from neuron_pushkv.router import serve
from neuron_pushkv.router.app import listener
from neuron_pushkv.router.openai import MAX_BODY_BYTES
from neuron_pushkv.wire import AnyMessage, EngineStatus, Hello, Identity, Listening, Rank

from .conftest import Bench, bench, eventually
from .servers import PATIENCE, FakeEngine, Loop, answer, served

TRANSFER = b'{"model":"m","prompt":"p","messages":[{"role":"user"}],"kv_transfer_params":{"transfer_id":"t"}}'


class Worker:
    """One rank of an engine, as far as its directory knows it."""

    def __init__(self, engine_id: str, address: tuple[str, int], provider: str, key: bytes) -> None:
        self._engine_id = engine_id
        self._provider = provider
        self._node = Node(handler=self, engine_id=engine_id, incarnation=1, rank=Rank(), key=key)
        self._node.open(RANK, *address)

    def identity(self, role: str, hello: Hello) -> tuple[Identity, None]:
        return Identity(self._engine_id, 1, Rank()), None

    def up(
        self, connection: Connection, role: str, theirs: Identity, token: int | None, opened: tuple[str, int] | None
    ) -> None:
        self._node.send(connection, Listening(Rank(), "127.0.0.1", 1, self._provider, "libfabric 2.5"))

    def check(self, role: str, theirs: Identity) -> None: ...

    def discard(self, token: int) -> None: ...

    def down(self, connection: Connection, reason: Reason, detail: str) -> None: ...

    def unreachable(self, role: str, host: str, port: int, reason: Reason, detail: str) -> None: ...

    def received(self, connection: Connection, message: AnyMessage) -> None: ...

    def close(self) -> None:
        self._node.close()


@contextlib.contextmanager
def directory(engine_id: str) -> Iterator[Directory]:
    """A directory of one rank that has not come yet."""
    settings = ConnectorSettings(fleet_key="k")
    found = Directory(settings, engine_id=engine_id, incarnation=1, port=0, ranks=1)
    yield found
    found.close()


@contextlib.contextmanager
def worker(of: Directory, engine_id: str, provider: str = "tcp") -> Iterator[None]:
    """Its rank."""
    rank = Worker(engine_id, of.address, provider, b"k")
    yield
    rank.close()


def place(of: Directory) -> str:
    """host:port of a directory."""
    return f"{of.address[0]}:{of.address[1]}"


def test_ready_once_both_engines_and_all_their_workers_are(router: Bench, loop: Loop) -> None:
    with (
        directory("p") as of_prefill,
        directory("d") as of_decode,
        bench(
            loop,
            router.prefill,
            router.decode,
            real_directories=True,
            fleet_key="k",
            prefill_push=[place(of_prefill)],
            decode_push=[place(of_decode)],
        ) as real,
    ):
        found = real.client.get("/ready")
        assert found.status_code == 503
        waiting = "wait until it has loaded, or look at its log"
        assert found.json()["problems"] == [
            f"prefill engine {router.prefill.url}: not all of its 1 workers are up; {waiting}",
            f"decode engine {router.decode.url}: not all of its 1 workers are up; {waiting}",
        ]
        starting = real.completion()
        assert starting.status_code == 503
        assert starting.json()["error"]["message"] == (
            f"prefill engine {router.prefill.url} is still starting; try again later"
        )
        with worker(of_prefill, "p"):
            with worker(of_decode, "d", "shm"):
                eventually(lambda: real.client.get("/ready").json()["decode"][0]["ready"], "the worker did not come")
                unlike = real.client.get("/ready")
                assert unlike.status_code == 503
                assert "uses provider tcp" in unlike.json()["problems"][0]
                assert ("peer.provider", "error") in [(f["id"], f["level"]) for f in unlike.json()["findings"]]
            with worker(of_decode, "d"):
                eventually(lambda: real.client.get("/ready").status_code == 200, "the fleet did not become ready")
                report = real.client.get("/ready").json()
                assert report["ready"] is True
                assert report["problems"] == []
                assert {(found["id"], found["level"]) for found in report["findings"]} == {
                    ("peer.engine", "ok"),
                    ("peer.provider", "ok"),
                    ("peer.versions", "ok"),
                }
                assert report["prefill"] == [
                    {
                        "url": router.prefill.url,
                        "ready": True,
                        "problems": [],
                        "engine_id": "p",
                        "provider": "tcp",
                        "library": "libfabric 2.5",
                        "release": __version__,
                        "vllm": versions.vllm()[1],
                        "ranks": 1,
                        "kept_requests": 0,
                    }
                ]
                router.prefill.behaviour, router.decode.behaviour = answer(200, {}), answer(200, {"choices": []})
                assert real.completion().status_code == 200
                transfer = router.decode.call().transfer
                assert (transfer["remote_engine_id"], transfer["remote_port"]) == ("p", of_prefill.address[1])


def test_a_wrong_key_is_named(router: Bench, loop: Loop) -> None:
    with directory("p") as of_prefill, directory("d") as of_decode:
        places = {"prefill_push": [place(of_prefill)], "decode_push": [place(of_decode)]}
        with bench(loop, router.prefill, router.decode, real_directories=True, fleet_key="other", **places) as wrong:
            report = wrong.client.get("/ready").json()
            assert not report["ready"]
            assert "fleet key" in report["problems"][0]
            found = wrong.completion()
            assert found.status_code == 503
            assert "fleet key" in found.json()["error"]["message"]
            assert wrong.number("pushkv_router_upstream_errors_total", leg="prefill", reason="directory") == 1
    assert router.prefill.calls == []
    assert router.decode.calls == []


def test_an_unhealthy_or_absent_engine_is_not_ready(router: Bench, loop: Loop) -> None:
    router.prefill.health = 500
    router.decode.directory_failure = HandshakeRefused(Reason.UNREACHABLE, "127.0.0.1:14700 can't be reached: refused")
    found = router.client.get("/ready")
    assert found.status_code == 503
    unhealthy, absent = found.json()["problems"]
    assert unhealthy == f"prefill engine {router.prefill.url} answers /health with status 500"
    assert absent == (
        f"the push directory of decode engine {router.decode.url} does not answer: "
        "127.0.0.1:14700 can't be reached: refused"
    )
    gone = FakeEngine()
    with served(loop, gone) as gone.url:
        pass
    with bench(loop, gone, router.decode) as broken:
        problems = broken.client.get("/ready").json()["problems"]
        assert problems[0] == f"prefill engine {gone.url} can't be reached; it may be down, try again later"


def test_an_engine_that_comes_back_is_used_again(router: Bench, loop: Loop) -> None:
    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), answer(200, {"choices": []})
    with bench(loop, router.prefill, router.decode) as again:
        assert again.completion().status_code == 200
        router.prefill.behaviour = answer(500, {"error": {}})
        router.prefill.status = EngineStatus("prefill-0", 2, True, 4, "tcp", "libfabric 2.5", 0)
        assert again.completion().status_code in (200, 500)
        eventually(lambda: again.number("pushkv_router_legs_total", leg="prefill", outcome="failed") == 1, "no failure")
        router.prefill.behaviour = answer(200, {})
        assert again.completion().status_code == 200
        assert router.decode.call(2).transfer["tp_size"] == 4


def test_health_does_not_ask_the_engines(router: Bench) -> None:
    router.prefill.health = router.decode.health = 500
    assert router.client.get("/health").status_code == 200


def test_models_are_decodes(router: Bench, loop: Loop) -> None:
    found = router.client.get("/v1/models", headers={"Authorization": "Bearer k"}).json()
    assert found == {"object": "list", "data": [{"id": "m"}], "seen": "Bearer k"}
    gone = FakeEngine()
    with served(loop, gone) as gone.url:
        pass
    with bench(loop, router.prefill, gone) as broken:
        absent = broken.client.get("/v1/models")
        assert absent.status_code == 503
        assert gone.url in absent.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/v1/embeddings", "/v1/completions/", "/v1/chat/completions/batch"])
def test_unknown_paths(router: Bench, path: str) -> None:
    count = router.counts("pushkv_router_refused_total", reason="not_found")
    found = router.client.post(path, json={})
    assert found.status_code == 404
    assert found.json()["error"]["message"] == (
        f"there is no {path} here; POST to /v1/completions or /v1/chat/completions"
    )
    assert count() == 1


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/v1/models")])
def test_wrong_methods(router: Bench, method: str, path: str) -> None:
    count = router.counts("pushkv_router_refused_total", reason="method")
    found = router.client.request(method, path)
    assert found.status_code == 405
    assert found.json()["error"]["message"] == f"{path} does not take {method}"
    assert count() == 1


@pytest.mark.parametrize(
    ("headers", "content", "status", "reason", "sentence"),
    [
        ({}, b"{", 400, "bad_json", "the body is not valid JSON"),
        ({}, b"{}", 400, "bad_request", "model is missing"),
        ({}, TRANSFER, 400, "bad_parameters", "kv_transfer_params: "),
        ({"Content-Type": "text/plain"}, b"{}", 415, "media_type", "send the body as Content-Type: application/json"),
        ({"X-Request-Id": "x" * 257}, b"{}", 400, "bad_request", "X-Request-Id must be"),
        ({"X-Request-Id": "\xe9"}, b"{}", 400, "bad_request", "X-Request-Id must be"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_requests_reach_no_engine(
    router: Bench, path: str, headers: dict[str, str], content: bytes, status: int, reason: str, sentence: str
) -> None:
    count = router.counts("pushkv_router_refused_total", reason=reason)
    sent = {name: value.encode("latin-1") for name, value in {"Content-Type": "application/json", **headers}.items()}
    found = router.client.request(
        "POST", path, headers={name.encode(): value for name, value in sent.items()}, content=content
    )
    assert found.status_code == status
    error = found.json()["error"]
    assert error["code"] == status
    assert error["message"].startswith(sentence)
    assert count() == 1
    assert router.prefill.calls == []
    assert router.decode.calls == []


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_not_read_to_its_end(router: Bench, announced: bool) -> None:
    count = router.counts("pushkv_router_refused_total", reason="too_large")
    length = f"Content-Length: {MAX_BODY_BYTES + 1}" if announced else "Transfer-Encoding: chunked"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    address = httpx.URL(router.url)
    with socket.create_connection((address.host, address.port or 80), PATIENCE) as client:
        client.sendall(head.encode())
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        for _ in range(0 if announced else (MAX_BODY_BYTES >> 20) + 1):
            client.sendall(piece)
        answered = b""
        # The server hangs up at once; what was on its way then may come back as a reset.
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(4096):
                answered += more
    assert answered.startswith(b"HTTP/1.1 413")
    assert b"the body is larger than 32 MiB" in answered
    assert count() == 1


def test_a_body_that_does_not_come_is_not_waited_for(router: Bench, loop: Loop) -> None:
    with bench(loop, router.prefill, router.decode, request_seconds=0.2) as hasty:
        address = httpx.URL(hasty.url)
        with socket.create_connection((address.host, address.port or 80), PATIENCE) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: 9\r\n\r\n{")
            assert client.recv(64).startswith(b"HTTP/1.1 408")


def test_metrics_tell_what_has_happened(router: Bench, loop: Loop) -> None:
    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), answer(200, {"choices": []})
    with bench(loop, router.prefill, router.decode) as counted:
        assert counted.completion().status_code == 200
        assert counted.completion(n=0).status_code == 400
        assert counted.client.get("/metrics").headers["content-type"].startswith("text/plain")
        eventually(lambda: counted.number("pushkv_router_requests_in_flight") == 0, "a request is still in flight")
        for name, labels, value in (
            ("pushkv_router_requests_total", {"endpoint": "/v1/completions", "outcome": "ok"}, 1),
            ("pushkv_router_requests_total", {"endpoint": "/v1/completions", "outcome": "refused"}, 1),
            ("pushkv_router_legs_total", {"leg": "prefill", "outcome": "ok"}, 1),
            ("pushkv_router_legs_total", {"leg": "decode", "outcome": "ok"}, 1),
            ("pushkv_router_refused_total", {"reason": "bad_request"}, 1),
            ("pushkv_router_time_to_first_seconds_count", {"endpoint": "/v1/completions", "stream": "false"}, 1),
            ("pushkv_router_request_seconds_count", {"endpoint": "/v1/completions"}, 2),
        ):
            assert counted.number(name, **labels) == value, name


def test_small_events_are_sent_at_once() -> None:
    with listener("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_bug_is_an_error_like_any_other(router: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    errors = router.counts("pushkv_router_requests_total", endpoint="/v1/completions", outcome="error")
    monkeypatch.setattr("neuron_pushkv.router.dispatch.decode_body", broken)
    found = router.completion()
    assert found.status_code == 500
    assert found.json()["error"]["message"] == "the router has a bug; its log says more"
    assert errors() == 1
    assert router.number("pushkv_router_requests_in_flight") == 0


def test_a_port_that_is_taken_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = RouterSettings.model_validate(
            {
                "port": port,
                "prefill": ["http://127.0.0.1:1"],
                "prefill_push": ["127.0.0.1:1"],
                "decode": ["http://127.0.0.1:2"],
                "decode_push": ["127.0.0.1:2"],
            }
        )
        with pytest.raises(ConfigError) as caught:
            serve(settings)
    assert str(caught.value) == (
        f"the router can't listen on 127.0.0.1:{port}: Address already in use; choose another host or port"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process(router: Bench, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = {
        "port": port,
        "prefill": [router.prefill.url],
        "prefill_push": ["127.0.0.1:1"],
        "decode": [router.decode.url],
        "decode_push": ["127.0.0.1:2"],
    }
    code = (
        "import json, sys; from neuron_pushkv.config import RouterSettings; from neuron_pushkv.router import serve; "
        "serve(RouterSettings.model_validate(json.loads(sys.argv[1])))"
    )
    with subprocess.Popen([sys.executable, "-c", code, json.dumps(settings)], stderr=subprocess.PIPE) as process:
        try:

            def up() -> bool:
                assert process.poll() is None, "the router has ended"
                with contextlib.suppress(httpx.HTTPError):
                    return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
                return False

            eventually(up, "the router did not come up")
            process.send_signal(number)
            _, output = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode in (0, -number)
    assert b"Traceback" not in output
    assert f"router listens on 127.0.0.1:{port}".encode() in output
