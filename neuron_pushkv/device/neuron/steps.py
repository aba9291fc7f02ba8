"""When the KV of a step is in device memory.

libnrt can't say it of work that somebody else has launched: ``nrta_get_sequence`` names the request that *completed*
last (``nrt_async.h``), so waiting for it waits for nothing, and the number of a request is known only to whoever
scheduled it. One event can be registered for a request, so taking it would leave the framework waiting for ever. So
the framework is asked, by what PyTorch for Neuron documents:

- ``torch.neuron.Event``: recorded behind what has been launched, and asked until it has happened.
- ``torch.neuron.synchronize``: waits for what has been launched, and maybe for more.

Where there is neither, as under vllm-neuron since 0.21, whose small PyTorch documents nothing of the kind, a step has
finished when vLLM has its outputs: with a connector every worker of vLLM's reads its own outputs back, which waits for
the compiled graph, before the step's result is handed on (``AsyncNeuronModelRunnerOutput.get_output`` of vllm-neuron,
``KVOutputAggregator`` of vLLM).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.device.base import ReadyWord
from neuron_pushkv.device.steps import StepWord
from neuron_pushkv.errors import DeviceError

EVENT, SYNCHRONIZE, OUTPUTS = "torch.neuron.Event", "torch.neuron.synchronize", "the outputs that vLLM has got"
_SMALL_TORCH = "libtorch_neuronx_lite"
_PAUSE = 0.0002
"""Seconds between two questions whether a step has finished, which takes milliseconds."""


class OutputWord:
    """The number of the last step whose outputs vLLM has got."""

    def __init__(self) -> None:
        self._word: NDArray[np.uint32] = np.zeros(1, dtype=np.uint32)
        self._step: int | None = None

    def begin(self, step: int, ended: int) -> None:
        """Step number ``step`` begins, and vLLM has the outputs of all steps up to ``ended``."""
        self._step = step
        self._word[0] = ended & 0xFFFFFFFF

    def mark(self) -> ReadyWord:
        """Reached when vLLM has the outputs of the step that began last. Raises :class:`DeviceError` if none did."""
        if self._step is None:
            raise DeviceError(
                "nothing tells when a step of a Neuron core has finished: use PyTorch with torch.neuron.Event, or vLLM "
                "with PushKVConnector, which tells its accelerator of each step"
            )
        return ReadyWord(self._word.ctypes.data, self._step & 0xFFFFFFFF)


class Steps:
    """Marks the steps that a framework launches, by the best sign there is that they have finished."""

    def __init__(self) -> None:
        self._word: StepWord | None = None
        self._outputs = OutputWord()
        self._closing = threading.Event()

    @property
    def told_by(self) -> str:
        """:data:`EVENT`, :data:`SYNCHRONIZE` or :data:`OUTPUTS`."""
        neuron = None if _SMALL_TORCH in sys.modules else _torch_neuron()
        if hasattr(neuron, "Event"):
            return EVENT
        return SYNCHRONIZE if hasattr(neuron, "synchronize") else OUTPUTS

    @property
    def failed(self) -> str:
        """See :class:`~neuron_pushkv.device.base.Accelerator`."""
        return self._word.failed if self._word is not None else ""

    def begin(self, step: int, ended: int) -> None:
        """See :class:`~neuron_pushkv.device.base.HearsOutputs`."""
        self._outputs.begin(step, ended)

    def mark(self) -> ReadyWord | None:
        """A word for what has been launched so far; ``None`` if that has finished. Raises :class:`DeviceError` where
        there is no sign at all."""
        match self.told_by:
            case "torch.neuron.Event":
                event = _torch_neuron().Event()
                event.record()
                return None if event.query() else self._mark(lambda: self._until(event.query))
            case "torch.neuron.synchronize":
                return self._mark(_torch_neuron().synchronize)
        return self._outputs.mark()

    def _mark(self, wait: Callable[[], object]) -> ReadyWord:
        if self._word is None:
            self._word = StepWord("neuron")
        return self._word.mark(wait)

    def _until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            if self._closing.wait(_PAUSE):
                raise DeviceError("a step had not finished when its accelerator was closed")

    def close(self) -> None:
        """Steps that have not finished never will. Idempotent."""
        self._closing.set()
        if self._word is not None:
            self._word.close()


def _torch_neuron() -> Any:
    """``torch.neuron``, if PyTorch for Neuron has been imported: importing it here might claim the device."""
    return getattr(sys.modules.get("torch"), "neuron", None)
