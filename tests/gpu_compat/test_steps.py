"""Ready words: in a stream's order, whoever sets them."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from neuron_pushkv.device.base import ReadyWord
from neuron_pushkv.errors import DeviceError
from tests.engine.sides import until
from tests.fakes.cuda import Open
from tests.gpu.hardware import reached as is_reached

WAYS = [("new", 1), ("v1", 1), ("old", 1), ("new", 0), ("new", -1), ("v1", 0)]
"""Drivers, and whether their stream writes work, are refused, or do nothing."""


class Torch:
    """As much of torch as is asked; ``stream`` is what it launches on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = 0
        self.asked: list[int] = []
        self.started = True
        cuda = SimpleNamespace(is_initialized=lambda: self.started, current_stream=self._current)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]

    def _current(self, index: int) -> SimpleNamespace:
        self.asked.append(index)
        return SimpleNamespace(cuda_stream=self.stream)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def marked(word: ReadyWord | None) -> ReadyWord:
    assert word is not None
    return word


@pytest.mark.parametrize(("kind", "writes"), WAYS)
def test_words_are_reached_in_the_order_of_the_stream(start: Open, torch: Torch, kind: str, writes: int) -> None:
    accelerator, cuda = start(kind, writes=writes)
    assert accelerator.facts().stream_writes == (writes == 1)
    torch.stream = cuda.stream()
    cuda.launch(torch.stream)
    first = marked(accelerator.mark_step())
    cuda.launch(torch.stream)
    second = marked(accelerator.mark_step())
    assert not is_reached(first)
    cuda.finish(torch.stream)
    until(lambda: is_reached(first), "the first step is ready")
    assert not is_reached(second)
    cuda.finish(torch.stream)
    until(lambda: is_reached(second), "the second step is ready")
    assert is_reached(first)
    third = marked(accelerator.mark_step())
    until(lambda: is_reached(third), "a step of no work is ready")
    assert torch.asked == [0] * 3


@pytest.mark.parametrize("writes", [1, 0])
def test_one_stream_says_nothing_of_another(start: Open, torch: Torch, writes: int) -> None:
    accelerator, cuda = start(writes=writes)
    slow, quick = cuda.stream(), cuda.stream()
    torch.stream = slow
    cuda.launch(slow)
    first = marked(accelerator.mark_step())
    torch.stream = quick
    second = marked(accelerator.mark_step())
    if writes:
        until(lambda: is_reached(second), "the quick stream's step is ready")
    assert not is_reached(first)
    cuda.finish(slow)
    until(lambda: is_reached(first) and is_reached(second), "both are ready")


def test_without_torch_the_default_stream_is_meant(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    accelerator, cuda = start()
    cuda.launch()
    word = marked(accelerator.mark_step())
    assert not is_reached(word)
    cuda.finish()
    assert is_reached(word)


def test_torch_that_does_not_use_cuda_is_not_made_to(start: Open, torch: Torch) -> None:
    torch.started = False
    accelerator, cuda = start()
    cuda.launch()
    word = marked(accelerator.mark_step())
    assert not torch.asked
    cuda.finish()
    assert is_reached(word)


@pytest.mark.parametrize("writes", [1, 0])
def test_steps_are_marked_from_any_thread(start: Open, torch: Torch, writes: int) -> None:
    accelerator, cuda = start(writes=writes)
    torch.stream = cuda.stream()
    cuda.launch(torch.stream)
    words: list[ReadyWord] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: words.append(marked(accelerator.mark_step())))
        thread.start()
        thread.join(10)
    assert [word.value for word in words] == [1, 2, 3]
    assert not any(is_reached(word) for word in words)
    cuda.finish(torch.stream)
    until(lambda: all(is_reached(word) for word in words), "all are ready")


@pytest.mark.parametrize("own", [True, False])
def test_closing_waits_for_words_that_the_device_is_yet_to_write(start: Open, torch: Torch, own: bool) -> None:
    accelerator, cuda = start()
    torch.stream = cuda.stream() if own else 0
    cuda.launch(torch.stream)
    word = marked(accelerator.mark_step())
    thread = threading.Thread(target=accelerator.close)
    thread.start()
    until(cuda.c.fake_synchronised, "closing waits for the device")
    assert thread.is_alive()
    assert not is_reached(word)  # Its memory is still there.
    cuda.finish(torch.stream)
    thread.join(10)
    assert not thread.is_alive()
    assert cuda.counts()["allocations"] == 0


def test_events_are_used_again(start: Open) -> None:
    accelerator, cuda = start(writes=0)
    for _ in range(20):
        word = marked(accelerator.mark_step())
        until(lambda word=word: is_reached(word), "the step is ready")
        # The event comes back when its waiter returns, which is before the word is reached.
    assert cuda.counts()["events"] == 1


@pytest.mark.parametrize("writes", [1, 0])
def test_a_step_that_can_not_be_marked_is_an_error(start: Open, torch: Torch, writes: int) -> None:
    accelerator, cuda = start(writes=writes)
    cuda.c.fake_fail_marks(1)
    with pytest.raises(DeviceError, match="STREAM_CAPTURE_INVALIDATED: a CUDA graph was being captured"):
        accelerator.mark_step()
    cuda.c.fake_fail_marks(0)
    word = marked(accelerator.mark_step())
    assert word.value == 1
    until(lambda: is_reached(word), "the next one is ready")
