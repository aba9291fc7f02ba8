"""Ready words that a thread of ours sets."""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import partial

import pytest

from neuron_pushkv.device.steps import StepWord
from neuron_pushkv.errors import DeviceError
from tests.engine.sides import until


def word_at(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def test_steps_become_ready_in_order() -> None:
    first, second = threading.Event(), threading.Event()
    steps = StepWord("test")
    words = [
        steps.mark(partial(first.wait, 10)),
        steps.mark(partial(second.wait, 10)),
    ]
    assert [word.value for word in words] == [1, 2]
    second.set()
    assert word_at(words[0].address) == 0
    first.set()
    until(lambda: word_at(words[1].address) == 2, "both are ready")
    steps.close()
    steps.close()


def test_nothing_is_ready_after_a_step_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("device lost")

    steps = StepWord("test")
    with caplog.at_level(logging.ERROR):
        word = steps.mark(fail)
        until(lambda: steps.failed, "the failure")
        with pytest.raises(DeviceError, match="device lost"):
            steps.mark(lambda: None)
        steps.close()
    assert word_at(word.address) == 0
    assert "nothing that it or later ones compute is pushed" in caplog.text


def test_a_device_that_hangs_is_left(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_pushkv.device.steps.CLOSE_SECONDS", 0.05)
    never = threading.Event()
    steps = StepWord("test")
    steps.mark(partial(never.wait, 30))
    steps.close()
    never.set()
    assert "is waited for no longer" in caplog.text
