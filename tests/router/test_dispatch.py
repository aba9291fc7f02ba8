"""Both legs together: how a request ends when one of them fails, hangs, dies or isn't needed any more."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest

from .conftest import Bench, bench, eventually
from .servers import (
    DONE,
    PATIENCE,
    Behaviour,
    Call,
    FakeEngine,
    Loop,
    after,
    answer,
    fail,
    hang,
    served,
    slamming,
    stream,
)

ANSWER = {"id": "cmpl-1", "choices": [{"index": 0, "text": " world", "finish_reason": "length"}]}


def test_an_answer_is_passed_on_unchanged(router: Bench) -> None:
    router.prefill.behaviour = answer(200, {})
    raw = b'{"id": "cmpl-1",  "choices": [ ] , "text": "\xc3\xa9"}'

    async def odd(call: Call) -> None:
        await call.answer(200, raw, "application/json; charset=utf-8")

    router.decode.behaviour = odd
    found = router.completion()
    assert (found.status_code, found.content) == (200, raw)
    assert found.headers["content-type"] == "application/json; charset=utf-8"


def test_each_leg_gets_its_part(router: Bench) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = answer(200, ANSWER)
    fields = {"max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "n": 3, "stream": False, "unheard_of": [1]}
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer k", "Cookie": "secret", "X-Session-ID": "s"}
    found = router.client.post("/v1/completions", json={"model": "m", "prompt": ["a", "b"], **fields}, headers=headers)
    assert found.status_code == 200
    assert found.headers["x-request-id"] == "mine"
    prefill, decode = router.prefill.call(), router.decode.call()
    transfer = prefill.transfer["transfer_id"]
    assert len(transfer) == 32
    assert prefill.body == {
        "model": "m",
        "prompt": ["a", "b"],
        "temperature": 0.5,
        "unheard_of": [1],
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer,
            "deliveries": 6,
        },
    }
    assert decode.body == {
        "model": "m",
        "prompt": ["a", "b"],
        **fields,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "prefill-0",
            "remote_host": "127.0.0.1",
            "remote_port": 14600,
            "remote_request_id": "mine",
            "tp_size": 2,
            "pp_size": 1,
            "transfer_id": transfer,
        },
    }
    for call in (prefill, decode):
        assert call.path == "/v1/completions"
        assert call.headers["x-request-id"] == "mine"
        assert call.headers["authorization"] == "Bearer k"
        assert call.headers["x-session-id"] == "s"
        assert "cookie" not in call.headers


def test_a_chat_goes_to_chat(router: Bench) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = answer(200, ANSWER)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}
    assert router.client.post("/v1/chat/completions", json=body).json() == ANSWER
    prefill, decode = router.prefill.call(), router.decode.call()
    assert prefill.path == decode.path == "/v1/chat/completions"
    assert (prefill.body["max_tokens"], prefill.body["max_completion_tokens"]) == (1, 1)
    assert prefill.transfer["deliveries"] == 1
    assert "max_tokens" not in decode.body
    assert decode.body["max_completion_tokens"] == 9


def test_every_dispatch_has_a_transfer_and_an_id_of_its_own(router: Bench) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = answer(200, ANSWER)
    ids = {router.completion().headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    body = {"model": "m", "prompt": "p"}
    for _ in range(2):
        same = router.client.post("/v1/completions", json=body, headers={"X-Request-Id": "a retry keeps its id"})
        assert same.headers["x-request-id"] == "a retry keeps its id"
    assert len({router.prefill.call(number).transfer["transfer_id"] for number in range(5)}) == 5
    for number in range(5):
        assert router.prefill.call(number).headers["x-request-id"] == router.decode.call(number).headers["x-request-id"]


def test_both_legs_are_under_way_at_once(router: Bench) -> None:
    met = {"prefill": threading.Event(), "decode": threading.Event()}

    def meet(own: str, other: str) -> Behaviour:
        async def behaviour(call: Call) -> None:
            met[own].set()
            await after(met[other], answer(200, ANSWER))(call)

        return behaviour

    router.prefill.behaviour = meet("prefill", "decode")
    router.decode.behaviour = meet("decode", "prefill")
    assert router.completion().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failing", "other"), [("prefill", "decode"), ("decode", "prefill")], ids=["prefill fails", "decode fails"]
)
@pytest.mark.parametrize("status", [400, 503])
def test_the_failing_legs_error_is_kept_and_the_other_leg_cancelled(
    router: Bench, failing: str, other: str, status: int, stream: bool
) -> None:
    cancelled = router.counts("pushkv_router_cancellations_total", leg=other, cause="other_leg_failed")
    errors = router.counts("pushkv_router_upstream_errors_total", leg=failing, reason=f"http_{status}")
    hung: FakeEngine = getattr(router, other)
    arrived = threading.Event()

    async def hanging(call: Call) -> None:
        arrived.set()
        await call.hang()

    hung.behaviour = hanging
    getattr(router, failing).behaviour = after(arrived, fail(status, "no such thing"))
    found = router.completion(stream=stream)
    assert found.status_code == status
    assert found.json()["error"] == {
        "message": "no such thing",
        "type": "InternalServerError",
        "param": None,
        "code": status,
    }
    assert hung.call().gone.wait(PATIENCE), "the other engine was not told"
    assert (cancelled(), errors()) == (1, 1)


def test_an_error_that_is_not_json_is_kept_too(router: Bench) -> None:
    async def plain(call: Call) -> None:
        await call.answer(502, b"<h1>bad gateway</h1>", "text/html")

    router.decode.behaviour = plain
    found = router.completion()
    assert (found.status_code, found.text) == (502, "<h1>bad gateway</h1>")
    assert found.headers["content-type"] == "text/html"


@pytest.mark.parametrize(
    ("first", "prefill", "decode", "told"),
    [
        pytest.param("prefill", 400, 422, 422, id="decode has seen the client's own request"),
        pytest.param("prefill", 400, 500, 400, id="decode's 500 says less than prefill's 400"),
        pytest.param("decode", 503, 500, 503, id="prefill's failure is the cause"),
        pytest.param("decode", 400, 500, 400, id="decode's 500 is the effect"),
    ],
)
def test_when_both_fail_the_error_that_says_most_is_told(
    router: Bench, monkeypatch: pytest.MonkeyPatch, first: str, prefill: int, decode: int, told: int
) -> None:
    monkeypatch.setattr("neuron_pushkv.router.dispatch.SECOND_OPINION_SECONDS", PATIENCE)
    answered = threading.Event()
    statuses = {"prefill": prefill, "decode": decode}
    second = "decode" if first == "prefill" else "prefill"

    async def leading(call: Call) -> None:
        await fail(statuses[first], first)(call)
        answered.set()

    getattr(router, first).behaviour = leading
    getattr(router, second).behaviour = after(answered, fail(statuses[second], second))
    assert router.completion().status_code == told


def test_a_prefill_that_fails_once_decode_answers_does_no_harm(router: Bench) -> None:
    begun, finished = threading.Event(), threading.Event()
    failed = router.counts("pushkv_router_legs_total", leg="prefill", outcome="failed")

    async def decoding(call: Call) -> None:
        await call.start()
        await call.chunk(b'data: {"choices": [{"text": "a"}]}\n\n')
        begun.set()
        await after(finished, stream(DONE, starts=False))(call)

    async def prefilling(call: Call) -> None:
        await after(begun, fail(500, "too late"))(call)
        finished.set()

    router.prefill.behaviour, router.decode.behaviour = prefilling, decoding
    found = router.completion(stream=True)
    assert found.status_code == 200
    assert found.content.endswith(b"data: [DONE]\n\n")
    eventually(lambda: failed() == 1, "the failure was not counted")


def test_a_prefill_that_is_not_needed_any_more_is_cancelled(router: Bench) -> None:
    cancelled = router.counts("pushkv_router_cancellations_total", leg="prefill", cause="decode_finished")
    router.prefill.behaviour = hang
    router.decode.behaviour = answer(200, ANSWER)
    assert router.completion().status_code == 200
    assert router.prefill.call().gone.wait(PATIENCE)
    eventually(lambda: cancelled() == 1, "the cancellation was not counted")


@pytest.mark.parametrize("begun", [False, True], ids=["while waiting", "while streaming"])
def test_a_client_that_leaves_cancels_both_legs(router: Bench, begun: bool) -> None:
    left = router.counts("pushkv_router_requests_total", endpoint="/v1/completions", outcome="client_left")
    cancelled = [
        router.counts("pushkv_router_cancellations_total", leg=leg, cause="client_left")
        for leg in ("prefill", "decode")
    ]

    async def decoding(call: Call) -> None:
        if begun:
            await call.start()
            await call.chunk(b'data: {"choices": [{"text": "a"}]}\n\n')
        await call.hang()

    router.prefill.behaviour, router.decode.behaviour = hang, decoding
    body = b'{"model": "m", "prompt": "p", "stream": true}'
    address = httpx.URL(router.url)
    with socket.create_connection((address.host, address.port or 80), PATIENCE) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        calls = [router.prefill.call(), router.decode.call()]
        if begun:
            assert client.recv(1024).startswith(b"HTTP/1.1 200")
    for call in calls:
        assert call.gone.wait(PATIENCE), "an engine was not told"
    eventually(lambda: left() == 1, "the departure was not counted")
    assert [count() for count in cancelled] == [1, 1]
    eventually(lambda: router.number("pushkv_router_requests_in_flight") == 0, "something is still in flight")


def test_a_dead_engine_is_named(router: Bench, loop: Loop) -> None:
    router.prefill.behaviour = router.decode.behaviour = hang
    dead = FakeEngine()
    with served(loop, dead) as dead.url:
        pass
    for prefill, decode, name in ((dead, router.decode, "prefill"), (router.prefill, dead, "decode")):
        with bench(loop, prefill, decode) as broken:
            found = broken.completion()
            assert found.status_code == 503
            assert found.json()["error"]["message"] == (
                f"{name} engine {dead.url} can't be reached; it may be down, try again later"
            )
            assert broken.number("pushkv_router_upstream_errors_total", leg=name, reason="unreachable") == 1


def test_an_engine_that_dies_before_it_answers(router: Bench, loop: Loop) -> None:
    router.prefill.behaviour = router.decode.behaviour = hang
    dying = FakeEngine()
    with slamming() as dying.url:
        for prefill, decode, name in ((dying, router.decode, "prefill"), (router.prefill, dying, "decode")):
            with bench(loop, prefill, decode) as broken:
                found = broken.completion()
                assert found.status_code == 502
                assert found.json()["error"]["message"].startswith(f"{name} engine {dying.url} ended the connection")
                assert broken.number("pushkv_router_upstream_errors_total", leg=name, reason="lost") == 1
    assert router.prefill.call().gone.wait(PATIENCE)
    assert router.decode.call().gone.wait(PATIENCE)


def test_an_engine_that_dies_in_the_middle_of_its_body(router: Bench) -> None:
    async def dying(call: Call) -> None:
        await call.start(200, "application/json")
        await call.chunk(b'{"choices": [')

    router.prefill.behaviour, router.decode.behaviour = hang, dying
    found = router.completion()
    assert found.status_code == 502
    assert "decode engine" in found.json()["error"]["message"]
    assert router.prefill.call().gone.wait(PATIENCE)


def test_a_request_takes_no_longer_than_it_may(router: Bench, loop: Loop) -> None:
    router.prefill.behaviour = router.decode.behaviour = hang
    with bench(loop, router.prefill, router.decode, request_seconds=0.7) as hasty:
        found = hasty.completion()
        assert found.status_code == 504
        assert found.json()["error"]["message"] == "the request took longer than the 0.7 s that one may take"
        assert router.prefill.call().gone.wait(PATIENCE)
        assert router.decode.call().gone.wait(PATIENCE)
        assert hasty.number("pushkv_router_cancellations_total", leg="decode", cause="timeout") == 1


def test_a_redirect_is_a_wrong_setting(router: Bench) -> None:
    router.prefill.behaviour, router.decode.behaviour = hang, answer(307, {})
    found = router.completion()
    assert found.status_code == 502
    assert "check its URL" in found.json()["error"]["message"]


def test_many_at_once_all_end(router: Bench, loop: Loop) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = answer(200, ANSWER)

    async def flood() -> list[int]:
        async with httpx.AsyncClient(base_url=router.url, timeout=PATIENCE, trust_env=False) as client:
            body = {"model": "m", "prompt": "p"}
            found = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(64)))
            return [one.status_code for one in found]

    assert loop.run(flood()) == [200] * 64
    assert len({call.transfer["transfer_id"] for call in router.decode.calls}) == 64
