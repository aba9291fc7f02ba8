"""Streamed answers: passed on byte for byte as they come, and errors told by status as long as that is possible."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from neuron_pushkv.router.fleet import Engine, Leg
from neuron_pushkv.router.upstream import Upstream

from .conftest import Bench, bench, eventually
from .servers import DONE, PATIENCE, Call, Loop, answer, error, event, hang, stream, token

ROLE = event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
WORD = event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "hi"}}]})
FAILED = event(error(500, "Internal server error"))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([token("a"), token("b"), DONE], id="an event a chunk"),
        pytest.param([token("a") + token("b") + DONE], id="all at once"),
        pytest.param([bytes([byte]) for byte in token("é") + DONE], id="byte by byte"),
        pytest.param([b": keep-alive\n\n", b": keep-alive\n\n", token("a"), DONE], id="comments first"),
        pytest.param([token("a").replace(b"\n", b"\r\n"), DONE], id="other line ends"),
        pytest.param([b"data: not json\n\n", b"event: x\nid: 7\ndata: y\ndata: z\n\n"], id="nothing that we know"),
        pytest.param([token("a"), b"data: unfinished"], id="no end"),
        pytest.param([DONE], id="nothing but the end"),
    ],
)
def test_a_stream_is_passed_on_byte_for_byte(router: Bench, chunks: list[bytes]) -> None:
    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), stream(*chunks)
    found = router.completion(stream=True)
    assert found.status_code == 200
    assert found.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert found.content == b"".join(chunks)


def test_the_first_event_arrives_before_the_last_is_written(router: Bench) -> None:
    events = [token(str(number)) for number in range(20)]
    received = threading.Event()

    async def dripping(call: Call) -> None:
        await call.start()
        for one in events:
            received.clear()
            await call.chunk(one)
            await wait_for(received)
        await call.chunk(DONE)
        await call.finish()

    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), dripping
    seen = b""
    with router.client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "p", "stream": True}) as found:
        for number, chunk in enumerate(found.iter_raw()):
            seen += chunk
            assert chunk == (events[number] if number < len(events) else DONE)
            received.set()
    assert seen == b"".join(events) + DONE


async def wait_for(happened: threading.Event) -> None:
    """Wait without blocking the servers."""
    async with asyncio.timeout(PATIENCE):
        while not happened.is_set():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("code", [500, 400, 503])
def test_an_error_in_the_first_event_becomes_a_status(router: Bench, code: int) -> None:
    told = error(code, "Internal server error")
    events = router.counts("pushkv_router_upstream_errors_total", leg="decode", reason="error_event")
    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), stream(event(told), DONE)
    found = router.completion(stream=True)
    assert found.status_code == code
    assert found.headers["content-type"] == "application/json"
    assert found.json() == told
    assert events() == 1


@pytest.mark.parametrize("code", [None, "500", 200, 700, True])
def test_an_error_without_a_usable_status_is_a_500(router: Bench, code: object) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = stream(event({"error": {"message": "m", "code": code}}), DONE)
    assert router.completion(stream=True).status_code == 500


@pytest.mark.parametrize("together", [False, True])
def test_a_chats_error_behind_the_role_becomes_a_status(
    router: Bench, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.setattr("neuron_pushkv.router.upstream.PREAMBLE_SECONDS", PATIENCE)
    chunks = [ROLE + ROLE + FAILED + DONE] if together else [ROLE, ROLE, FAILED, DONE]
    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), stream(*chunks)
    found = router.client.post("/v1/chat/completions", json=CHAT)
    assert (found.status_code, found.json()) == (500, error(500, "Internal server error"))


def test_a_chats_role_is_not_held_back_for_long(router: Bench) -> None:
    received = threading.Event()

    async def slow(call: Call) -> None:
        await call.start()
        await call.chunk(ROLE)
        await wait_for(received)
        await call.chunk(WORD)
        await call.chunk(DONE)
        await call.finish()

    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), slow
    seen = []
    with router.client.stream("POST", "/v1/chat/completions", json=CHAT) as found:
        for chunk in found.iter_raw():
            seen.append(chunk)
            received.set()
    assert seen[0] == ROLE
    assert b"".join(seen) == ROLE + WORD + DONE


def test_an_error_behind_the_first_token_is_passed_on_and_counted(router: Bench) -> None:
    errors = router.counts("pushkv_router_requests_total", endpoint="/v1/completions", outcome="error")
    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), stream(token("a"), FAILED, DONE)
    found = router.completion(stream=True)
    assert (found.status_code, found.content) == (200, token("a") + FAILED + DONE)
    eventually(lambda: errors() == 1, "the error was not counted")


def test_what_a_model_says_about_errors_is_no_error(router: Bench) -> None:
    fine = router.counts("pushkv_router_requests_total", endpoint="/v1/completions", outcome="ok")
    said = [token('data: {"error": 1}'), DONE]
    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), stream(*said)
    assert router.completion(stream=True).content == b"".join(said)
    eventually(lambda: fine() == 1, "the request was counted as an error")


@pytest.mark.parametrize("cut", [b"", b'data: {"id": "cm'], ids=["between events", "inside an event"])
def test_an_engine_that_dies_while_streaming_ends_in_an_error_event(router: Bench, cut: bytes) -> None:
    lost = router.counts("pushkv_router_upstream_errors_total", leg="decode", reason="lost")

    async def dying(call: Call) -> None:
        await call.start()
        await call.chunk(token("a"))
        if cut:
            await call.chunk(cut)

    router.prefill.behaviour, router.decode.behaviour = hang, dying
    found = router.completion(stream=True)
    assert found.status_code == 200
    head, last = found.content[: len(token("a") + cut)], found.content[len(token("a") + cut) :]
    assert head == token("a") + cut
    assert last.strip().startswith(b"data: {")
    told = json.loads(last.strip().removeprefix(b"data: "))["error"]
    assert told["code"] == 502
    assert told["message"].startswith("decode engine http://127.0.0.1:")
    assert router.prefill.call().gone.wait(PATIENCE)
    assert lost() == 1


def test_an_engine_that_ends_its_stream_without_an_event(router: Bench) -> None:
    router.prefill.behaviour, router.decode.behaviour = hang, stream()
    found = router.completion(stream=True)
    assert found.status_code == 502
    assert "before its first event" in found.json()["error"]["message"]


def test_a_stream_that_takes_too_long_ends_in_an_error_event(router: Bench, loop: Loop) -> None:
    async def stuck(call: Call) -> None:
        await call.start()
        await call.chunk(token("a"))
        await call.hang()

    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), stuck
    with bench(loop, router.prefill, router.decode, request_seconds=1) as hasty:
        found = hasty.completion(stream=True)
    assert found.content.startswith(token("a"))
    assert json.loads(found.content.removeprefix(token("a") + b"data: "))["error"]["code"] == 504
    assert router.decode.call().gone.wait(PATIENCE)


def test_a_client_that_does_not_read_is_not_waited_for(router: Bench, loop: Loop) -> None:
    async def endless(call: Call) -> None:
        await call.start()
        leaving = asyncio.create_task(call.hang())
        while not leaving.done():
            await call.chunk(token("a" * 65536))
            await asyncio.sleep(0)

    router.prefill.behaviour, router.decode.behaviour = answer(200, {}), endless
    with bench(loop, router.prefill, router.decode, request_seconds=1) as hasty:
        ended = hasty.counts("pushkv_router_cancellations_total", leg="decode", cause="timeout")
        with httpx.Client(base_url=hasty.url, timeout=PATIENCE, trust_env=False) as deaf:
            request = deaf.build_request("POST", "/v1/completions", json={"model": "m", "prompt": "p", "stream": True})
            found = deaf.send(request, stream=True)
            eventually(lambda: ended() == 1, "the request goes on")
            found.close()
    assert router.decode.call().gone.wait(PATIENCE)


def test_closing_an_answer_that_was_never_read_closes_its_connection(router: Bench, loop: Loop) -> None:
    async def stuck(call: Call) -> None:
        await call.start()
        await call.chunk(token("a"))
        await call.hang()

    router.decode.behaviour = stuck
    upstream = Upstream(connect_seconds=PATIENCE)
    reply = loop.run(upstream.post(Engine(Leg.DECODE, router.decode.url, "127.0.0.1", 1), "/v1/completions", b"{}", {}))
    assert not router.decode.call().gone.is_set()
    loop.run(reply.close())
    assert router.decode.call().gone.wait(PATIENCE)
    loop.run(upstream.close())
