"""Peers that hold the fleet key and still do the wrong thing, and bugs of our own: nobody else is harmed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from neuron_pushkv.errors import Reason
from neuron_pushkv.wire import Cancel, Commit, Done, EngineStatus, Fail, Listening, Message, Rank, Register

from .sides import Side, until

NewSide = Callable[..., Side]


# F19: one that has the key and sends nonsense.


@pytest.mark.parametrize(
    "nonsense",
    [
        Register("t", 9, 1, 0, 64, b"", b"", ((1, 2, 3, 9999),), 16),
        Register("t", 9, 1, 64, 0, b"", b"", ((),), 16),
        Register("t", 9, 1, 0, 64, b"x", b"y", ((1, 2, 3, 4), (5,)), 7),
        Cancel(77, 7),
        Done(77, 7),
        Commit(77, 7, 1, 1),
        Fail(0, 1, 5, 5, Reason.GONE, ""),
        Listening(Rank(), "127.0.0.1", 1, "tcp", ""),
        EngineStatus("x", 1, True, 1, "tcp", "", 0),
    ],
)
def test_nonsense_from_one_peer_harms_no_other(
    new_side: NewSide, sender: Side, receiver: Side, nonsense: Message
) -> None:
    bad = new_side("bad")
    sender.prefill("q", 2, 16, [5], "u")
    bad.receive("its own", 2, 16, [1], sender, "u")
    assert bad.await_report("its own")
    sender.offer("p", 1, 64)
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    until(lambda: len(sender.engine._outbound), "the registration")
    (connection,) = bad.engine._contacts.links._links
    for _ in range(3):
        bad.engine._contacts._node.send(connection, nonsense)
    sender.seal("p", 1, [1, 2, 3, 4])
    assert receiver.await_report("d")
    assert receiver.holds(1, [11, 12, 13, 14])
    assert receiver.others_blank([11, 12, 13, 14])
    sender.prefill("r", 3, 16, [6], "v")
    bad.receive("next", 3, 16, [2], sender, "v")
    assert bad.await_report("next"), "it may come back"


def test_bug_in_a_handler_ends_the_load_at_once(
    sender: Side, receiver: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(receiver.engine._contacts.links, "add", broken)
    sender.prefill("p", 1, 64, [1, 2, 3, 4])
    receiver.receive("d", 1, 64, [11, 12, 13, 14], sender)
    assert not receiver.await_report("d", 5.0)
    assert receiver.stats["transfers"] == {f"in:failed:{Reason.INTERNAL}": 1}
    until(lambda: any(record.exc_info for record in caplog.records), "its traceback in the log")
