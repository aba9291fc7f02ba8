"""Who tells that a step has finished: PyTorch for Neuron, by one of two ways, or nobody here."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from neuron_pushkv.device.base import ReadyWord
from neuron_pushkv.device.neuron.steps import EVENT, OUTPUTS, SYNCHRONIZE, Steps
from neuron_pushkv.errors import DeviceError

PATIENCE = 10.0


class Queue:
    """A device's work, as ``torch.neuron`` shows it. ``finished`` is how many of the ``launched`` steps have ended."""

    def __init__(self) -> None:
        self.launched = self.finished = 0
        self.moved = threading.Condition()

    def launch(self) -> None:
        self.launched += 1

    def finish(self, count: int) -> None:
        with self.moved:
            self.finished = count
            self.moved.notify_all()

    def synchronize(self) -> None:
        goal = self.launched
        with self.moved:
            assert self.moved.wait_for(lambda: self.finished >= goal, PATIENCE)

    def event(self) -> Any:
        event = SimpleNamespace(goal=None)
        event.record = lambda: setattr(event, "goal", self.launched)
        event.query = lambda: self.finished >= event.goal
        return event


@pytest.fixture
def queue() -> Queue:
    return Queue()


def with_torch(monkeypatch: pytest.MonkeyPatch, **neuron: Callable[[], Any]) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(neuron=SimpleNamespace(**neuron)))


def value(word: ReadyWord) -> int:
    return int(ctypes.c_uint32.from_address(word.address).value)


def reaches(word: ReadyWord) -> None:
    end = time.monotonic() + PATIENCE
    while value(word) < word.value:
        assert time.monotonic() < end, "the step has finished, but its word does not say so"
        time.sleep(0.001)


@pytest.mark.parametrize("way", [EVENT, SYNCHRONIZE])
def test_a_word_is_reached_when_its_step_has_finished(monkeypatch: pytest.MonkeyPatch, queue: Queue, way: str) -> None:
    ways: dict[str, Callable[[], Any]] = {"synchronize": queue.synchronize}
    with_torch(monkeypatch, **ways, **({"Event": queue.event} if way == EVENT else {}))
    steps = Steps()
    assert steps.told_by == way
    queue.launch()
    first = steps.mark()
    queue.launch()
    second = steps.mark()
    assert first is not None
    assert second is not None
    assert first.address == second.address
    assert (first.value, second.value) == (1, 2)
    assert value(first) == 0
    queue.finish(1 if way == EVENT else 2)
    reaches(first)
    if way == EVENT:
        assert value(second) == 1
        queue.finish(2)
    reaches(second)
    steps.close()


def test_a_step_that_has_finished_needs_no_word(monkeypatch: pytest.MonkeyPatch, queue: Queue) -> None:
    with_torch(monkeypatch, Event=queue.event)
    queue.launch()
    queue.finish(1)
    assert Steps().mark() is None


def test_closing_does_not_wait_for_a_step_that_never_finishes(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    with_torch(monkeypatch, Event=queue.event)
    steps = Steps()
    queue.launch()
    word = steps.mark()
    assert word is not None
    steps.close()
    assert value(word) == 0
    assert "had not finished when its accelerator was closed" in caplog.text


@pytest.mark.parametrize("no_torch", [None, SimpleNamespace(), SimpleNamespace(neuron=SimpleNamespace())])
def test_a_step_has_finished_with_its_outputs_where_nothing_else_tells(
    monkeypatch: pytest.MonkeyPatch, no_torch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", no_torch)
    steps = Steps()
    assert steps.told_by == OUTPUTS
    with pytest.raises(DeviceError, match="or vLLM with PushKVConnector"):
        steps.mark()
    steps.begin(7, 5)
    seventh = steps.mark()
    steps.begin(8, 6)
    eighth = steps.mark()
    assert seventh is not None
    assert eighth is not None
    assert (seventh.value, eighth.value, value(seventh)) == (7, 8, 6)
    steps.begin(9, 7)
    assert value(seventh) == 7
    steps.begin((1 << 32) + 3, (1 << 32) + 2)
    wrapped = steps.mark()
    assert wrapped is not None
    assert (wrapped.value, value(wrapped)) == (3, 2)
    steps.close()


def test_the_small_torch_of_vllm_neuron_is_not_taken_at_its_word(monkeypatch: pytest.MonkeyPatch, queue: Queue) -> None:
    with_torch(monkeypatch, Event=queue.event, synchronize=queue.synchronize)
    monkeypatch.setitem(sys.modules, "libtorch_neuronx_lite", SimpleNamespace())
    assert Steps().told_by == OUTPUTS
