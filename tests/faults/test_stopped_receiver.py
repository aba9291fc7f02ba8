"""A receiver that is stopped while it is written to, as a real process over libfabric's tcp and shm."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.peers import Node
from neuron_pushkv.transport.fabric import FabricTransport
from tests.engine.conftest import free_port
from tests.engine.sides import Side, until

from .side_process import RemoteSide

SOURCE, TARGET = list(range(1, 65, 2)), list(range(60, 124, 2))
TOKENS = 16 * len(SOURCE)


@pytest.mark.parametrize(("provider", "bound"), [("tcp", "no progress"), ("shm", "no progress"), ("tcp", "silence")])
def test_receiver_stopped_during_the_write(
    provider: str, bound: str, new_process: Callable[..., RemoteSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F36, F35: no write counts as done, the source stays as it is, and after a bounded time it has failed."""
    settings: dict[str, float] = {"keep_unclaimed_seconds": 0.1}
    if bound == "silence":
        assert Node.__init__.__kwdefaults__ is not None
        monkeypatch.setitem(Node.__init__.__kwdefaults__, "silence_seconds", 2.0)
    else:
        settings["no_progress_seconds"] = 1.0
    receiver = new_process("receiver", provider=provider)
    with Side("sender", FabricTransport(provider=provider), ConnectorSettings(port=free_port(), **settings)) as sender:
        sender.prefill("warm-up", 5, 16, [0], "w")
        receiver.do("receive", "warm-up", 5, 16, [0], sender.settings.port, "w")
        assert receiver.do("await_report", "warm-up")
        until(lambda: len(sender.engine._outbound) == 0, "the warm-up's DONE")
        sender.offer("p", 1, TOKENS)
        receiver.do("receive", "d", 1, TOKENS, TARGET, sender.settings.port, "t")
        until(lambda: len(sender.engine._outbound), "the registration")
        with receiver.stopped():
            began = time.monotonic()
            sender.seal("p", 1, SOURCE)
            sender.finish("p")
            assert sender.engine._outbound.reading("p")
            while time.monotonic() - began < 0.6:
                sender.step()
                assert sender.engine._outbound.reading("p"), "nothing can be in place at a process that is stopped"
                assert "p" not in sender.freed
                time.sleep(0.01)
            until(lambda: (sender.step(), "p" in sender.freed)[1], "the failure and the end of the source's lease")
            assert time.monotonic() - began < 5.0
            assert not sender.engine._outbound.reading("p")
            failed = [name for name in sender.stats["transfers"] if name.startswith("out:failed:")]
            assert len(failed) == 1, sender.stats
            sender.fill(66, SOURCE)
        if receiver.do("await_report", "d"):
            assert receiver.do("holds", 1, TARGET), "what was on the way may still arrive, but then it is all there"
        receiver.do("fill", 99, TARGET)
        sender.prefill("q", 2, 64, [2, 4, 6, 8], "u")
        receiver.do("receive", "next", 2, 64, [10, 11, 12, 13], sender.settings.port, "u")
        assert receiver.do("await_report", "next")
        assert receiver.do("holds", 2, [10, 11, 12, 13])
        assert receiver.do("holds", 99, TARGET)
        assert receiver.do("tables")[0] == 0
