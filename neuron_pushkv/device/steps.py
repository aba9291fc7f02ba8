"""Ready words: whether one is reached, and those of devices whose steps are waited for by a thread of ours."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.device.base import ReadyWord
from neuron_pushkv.errors import DeviceError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long a device may take to end its steps when it is left; one that hangs must not keep the process."""


def is_reached(ready: ReadyWord | None) -> bool:
    """Whether there is nothing to wait for (any more)."""
    if ready is None:
        return True
    word = ctypes.c_uint32.from_address(ready.address).value
    return (word - ready.value) % (1 << 32) < 1 << 31


class StepWord:
    """A word in host memory that counts finished steps. One thread waits for them, in the order they were launched."""

    def __init__(self, name: str) -> None:
        self._word: NDArray[np.uint32] = np.zeros(1, dtype=np.uint32)
        self._marked = 0
        self.failed = ""
        """Why no step is ready any more, or empty."""
        self._steps: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"pushkv-{name}-steps", daemon=True)
        self._thread.start()

    def mark(self, wait: Callable[[], object]) -> ReadyWord:
        """``wait`` returns, without the GIL meanwhile, when what has been launched so far has finished.

        If it raises, neither this step nor any later one is ever ready, nothing that it may have computed is pushed,
        and :attr:`failed` says why; from then on this raises :class:`DeviceError`.
        """
        if self.failed:
            raise DeviceError(self.failed)
        self._marked += 1
        self._steps.put(wait)
        return ReadyWord(self._word.ctypes.data, self._marked & 0xFFFFFFFF)

    def _run(self) -> None:
        while (wait := self._steps.get()) is not None:
            try:
                wait()
            except Exception as error:
                logger.exception("a step of the device has failed: nothing that it or later ones compute is pushed")
                self.failed = f"a step of the device has failed ({error})"
                return
            self._word += np.uint32(1)

    def close(self) -> None:
        """Waits for the steps that were marked, but not for ever. Idempotent."""
        self._steps.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("a step of the device has not ended for %g s; it is waited for no longer", CLOSE_SECONDS)
