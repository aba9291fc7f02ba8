"""How a stream begins, however it is cut into chunks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from neuron_pushkv.router.events import Beginning, Kind, is_whole

from .servers import DONE, event


def choices(**delta: object) -> bytes:
    """A chat's event."""
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


ROLE = choices(role="assistant", content="")
ERROR = event({"error": {"message": "m", "code": 500}})
BEGINNINGS = {
    ROLE: Kind.PREAMBLE,
    ROLE + ROLE: Kind.PREAMBLE,
    b": keep-alive\n\n": Kind.SILENT,
    b": keep-alive\n\n" + ERROR: Kind.ERROR,
    ERROR + DONE: Kind.ERROR,
    ROLE + ERROR + DONE: Kind.ERROR,
    ROLE.replace(b"\n", b"\r\n") + ERROR.replace(b"\n", b"\r\n"): Kind.ERROR,
    b"event: error\n" + ERROR: Kind.ERROR,
    b'data: {"error":\ndata: "split over lines"}\n\n': Kind.ERROR,
    DONE: Kind.CONTENT,
    choices(content="hi"): Kind.CONTENT,
    choices(role="assistant", content="hi"): Kind.CONTENT,
    choices(role="assistant", tool_calls=[{"id": "t"}]): Kind.CONTENT,
    choices(role="assistant", reasoning="hm"): Kind.CONTENT,
    ROLE + choices(content="hi") + ERROR: Kind.CONTENT,
    event({"choices": [{"delta": {"role": "assistant"}, "finish_reason": "stop"}]}): Kind.CONTENT,
    event({"choices": [{"text": ""}]}): Kind.CONTENT,
    event({"choices": []}): Kind.CONTENT,
    event({"error": None, "choices": []}): Kind.CONTENT,
    event([1]): Kind.CONTENT,
    b"data: unended": Kind.SILENT,
    b"data\n\n\n\nid: 1\n\n": Kind.SILENT,
}


@pytest.mark.parametrize("stream", list(BEGINNINGS), ids=str)
@settings(max_examples=20, deadline=None)
@given(data=some.data())
def test_a_beginning_is_known_however_it_is_cut(stream: bytes, data: some.DataObject) -> None:
    cuts = sorted(data.draw(some.sets(some.integers(0, len(stream)))))
    beginning = Beginning()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        beginning.feed(stream[start:end])
    assert beginning.kind is BEGINNINGS[stream]
    assert beginning.decided == (beginning.kind in (Kind.CONTENT, Kind.ERROR))
    if beginning.kind is Kind.ERROR:
        assert "error" in json.loads(beginning.data)


@settings(max_examples=50, deadline=None)
@given(some.lists(some.binary(max_size=40), max_size=5))
def test_any_bytes_are_survived(chunks: list[bytes]) -> None:
    beginning = Beginning()
    for chunk in chunks:
        beginning.feed(chunk)


@pytest.mark.parametrize(
    ("tail", "whole"),
    [(b"", True), (b"x\n\n", True), (b"x\r\n\r\n", True), (b"x\n", False), (b"x\r\n", False), (b"x", False)],
)
def test_whole_events_end_in_an_empty_line(tail: bytes, whole: bool) -> None:
    assert is_whole(tail) == whole
