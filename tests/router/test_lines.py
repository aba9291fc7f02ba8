"""The line that the router writes about each request, and the trace that both legs belong to."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest

from neuron_pushkv.router import exchange

from .conftest import Bench, eventually
from .servers import DONE, Call, answer, fail, hang, stream, token

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Kept(logging.Handler):
    """All records, with their fields."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def line(self) -> dict[str, object]:
        """The fields of the only line, which comes when the answer has ended."""
        eventually(lambda: bool(self.records), "no line was written")
        (record,) = self.records
        pairs = (
            "event",
            "outcome",
            "status",
            "endpoint",
            "detail",
            "request",
            "transfer",
            "prefill",
            "decode",
            "trace",
        )
        fields = {"level": record.levelname, **{key: record.__dict__[key] for key in pairs if key in record.__dict__}}
        for time in ("first_seconds", "seconds"):
            if time in record.__dict__:
                assert record.__dict__[time] > 0
                fields[time] = "some"
        assert record.getMessage().startswith("event=request_ended outcome=")
        return fields


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    before = exchange.requests.level
    exchange.requests.addHandler(handler)
    exchange.requests.setLevel(logging.INFO)
    yield handler
    exchange.requests.removeHandler(handler)
    exchange.requests.setLevel(before)


def test_both_legs_belong_to_the_clients_trace(router: Bench, kept: Kept) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = answer(200, {"id": "c"})
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=x", "X-Request-Id": "mine"}
    found = router.client.post("/v1/completions", json={"model": "m", "prompt": "p"}, headers=headers)
    assert found.status_code == 200
    for call in (router.prefill.call(), router.decode.call()):
        assert (call.headers["traceparent"], call.headers["tracestate"]) == (TRACEPARENT, "vendor=x")
    assert kept.line() == {
        "level": "INFO",
        "event": "request_ended",
        "outcome": "ok",
        "status": 200,
        "endpoint": "/v1/completions",
        "request": "mine",
        "transfer": router.prefill.call().transfer["transfer_id"],
        "prefill": router.prefill.url,
        "decode": router.decode.url,
        "trace": TRACE,
        "first_seconds": "some",
        "seconds": "some",
    }


def test_a_request_without_a_trace_gets_none(router: Bench, kept: Kept) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = answer(200, {})
    assert router.completion().status_code == 200
    assert "traceparent" not in router.prefill.call().headers
    assert "traceparent" not in router.decode.call().headers
    assert "trace" not in kept.line()


def test_an_engines_failure_is_told_with_its_sentence(router: Bench, kept: Kept) -> None:
    router.prefill.behaviour = fail(503, "no")
    router.decode.behaviour = hang
    assert router.completion().status_code == 503
    line = kept.line()
    assert (line["level"], line["outcome"], line["status"]) == ("WARNING", "error", 503)
    assert line["detail"] == f"prefill engine {router.prefill.url} answers with status 503"
    assert line["transfer"]
    assert "first_seconds" not in line


def test_an_error_of_the_clients_own_is_no_warning(router: Bench, kept: Kept) -> None:
    router.prefill.behaviour = hang
    router.decode.behaviour = fail(400, "too long")
    assert router.completion().status_code == 400
    line = kept.line()
    assert (line["level"], line["outcome"], line["status"]) == ("INFO", "error", 400)


def test_an_error_amid_a_stream_is_a_warning_under_status_200(router: Bench, kept: Kept) -> None:
    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = stream(token("a"), b'data: {"error": {"message": "x", "code": 500}}\n\n', DONE)
    assert router.completion(stream=True).status_code == 200
    line = kept.line()
    assert (line["level"], line["outcome"], line["status"]) == ("WARNING", "error", 200)
    assert line["first_seconds"] == "some"


def test_an_engine_that_dies_amid_a_stream_is_told_with_what_the_client_got(router: Bench, kept: Kept) -> None:
    async def cut(call: Call) -> None:
        await call.start()
        await call.chunk(token("a"))

    router.prefill.behaviour = answer(200, {})
    router.decode.behaviour = cut
    assert router.completion(stream=True).status_code == 200
    line = kept.line()
    assert (line["level"], line["outcome"], line["status"]) == ("WARNING", "error", 200)
    assert str(line["detail"]).startswith(f"decode engine {router.decode.url} ended the connection")


def test_a_refusal_is_told_without_engines(router: Bench, kept: Kept) -> None:
    assert router.client.post("/v1/completions", json={"prompt": "p"}).status_code == 400
    line = kept.line()
    assert (line["level"], line["outcome"], line["status"]) == ("INFO", "refused", 400)
    assert line["detail"] == "model is missing; /v1/models lists what is served"
    assert line["request"]
    assert not {"transfer", "prefill", "decode", "first_seconds"} & set(line)


def test_a_client_that_leaves_is_told_of(router: Bench, kept: Kept) -> None:
    router.prefill.behaviour = router.decode.behaviour = hang
    with pytest.raises(httpx.ReadTimeout):
        router.client.post("/v1/completions", json={"model": "m", "prompt": "p"}, timeout=0.2)
    line = kept.line()
    assert (line["level"], line["outcome"]) == ("INFO", "client_left")
    assert "status" not in line
