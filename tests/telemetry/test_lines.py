"""Log lines: what they say, that programs can take them apart, and that nobody can forge one."""

from __future__ import annotations

import json
import logging
import re
import shlex

import pytest

from neuron_pushkv.telemetry.lines import log, rendered, trace_id, transfer_fields

from .samples import TRACE, failed, received, sent


def test_a_line_about_each_kind_of_end() -> None:
    assert rendered(transfer_fields(received(), 0.75125, "decode-0", "0.0.1")) == (
        f"event=kv_received request=cmpl-r-0-aaaa transfer=t1 engine=decode-0 rank=0.0.1 peer=prefill-0 trace={TRACE} "
        "tokens=128 bytes=8192 writes=4 seconds=0.751250 connect_seconds=0.100000 register_seconds=0.050000 "
        "wait_seconds=0.350000 transfer_seconds=0.125000 report_seconds=0.125000"
    )
    assert rendered(transfer_fields(sent(transfer="", traceparent=""), 0.75, "prefill-0", "0.0.0")) == (
        "event=kv_sent request=cmpl-r-0-bbbb engine=prefill-0 rank=0.0.0 peer=decode-0 "
        "tokens=128 bytes=8192 writes=4 seconds=0.750000 match_seconds=0.125000 ready_seconds=0.125000 "
        "push_seconds=0.125000 drain_seconds=0.125000 confirm_seconds=0.250000"
    )
    assert rendered(transfer_fields(failed(traceparent=""), 1.0, "decode-0", "0.0.0")) == (
        r'event=kv_receive_failed reason=peer_lost detail="it said \"bye\"\nand left" request=cmpl-r-0-aaaa '
        "transfer=t1 engine=decode-0 rank=0.0.0 peer=prefill-0 tokens=0 bytes=0 writes=0 seconds=1.000000 "
        "connect_seconds=0.250000 register_seconds=0.250000"
    )
    assert rendered(transfer_fields(failed(way="out"), 1.0, "e", "r")).startswith("event=kv_send_failed reason=")


@pytest.mark.parametrize(
    "text", ["two words", 'quo"te', "a=b", "", "line\nevent=kv_sent", "tab\t", "é", "back\\slash \x7f"]
)
def test_no_text_can_leave_its_pair(text: str) -> None:
    line = rendered({"request": text, "tokens": 1})
    assert line.isascii()
    assert line.isprintable()
    found = re.fullmatch(r'request=("(?:[^"\\]|\\.)*") tokens=1', line)
    assert found
    assert json.loads(found[1]) == text


def test_an_ordinary_line_splits_like_a_command() -> None:
    pairs = dict(pair.split("=", 1) for pair in shlex.split(rendered({"request": "my id", "peer": "p-0", "tokens": 3})))
    assert pairs == {"request": "my id", "peer": "p-0", "tokens": "3"}


def test_the_record_carries_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("neuron_pushkv.transfers")
    caplog.set_level(logging.WARNING, logger=logger.name)
    log(logger, logging.INFO, {"event": "kv_sent"})
    assert not caplog.records
    log(logger, logging.WARNING, {"event": "100%s", "tokens": 3, "seconds": 0.5})
    (record,) = caplog.records
    assert record.getMessage() == "event=100%s tokens=3 seconds=0.500000"
    assert (record.__dict__["event"], record.__dict__["tokens"], record.__dict__["seconds"]) == ("100%s", 3, 0.5)


@pytest.mark.parametrize(
    "header", ["", "junk", "00-xyz-b7ad6b7169203331-01", f"00-{TRACE}", f"00-{TRACE.upper()}-b7-01"]
)
def test_what_is_no_traceparent_has_no_trace(header: str) -> None:
    assert trace_id(header) == ""
