"""Steps that have been launched and may still be computing, where KV is copied before it goes out.

The network's core waits for a step's ready word by itself. A copy can't: so what such a step fills is not told to the
ledger before the word has been reached, each step by its own word, since with later steps launched all the time the
latest one's is hardly ever reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from neuron_pushkv.device.base import Accelerator, ReadyWord
from neuron_pushkv.device.steps import is_reached
from neuron_pushkv.errors import DeviceError
from neuron_pushkv.orders import Ready

STEP_SECONDS = 0.001
"""How late a step may be seen to have ended: little beside the milliseconds that one takes."""


class Steps:
    """Used under the engine's lock. ``word``: of the last step that the ledger knows of; None if it has ended."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._computing: deque[tuple[ReadyWord | None, list[Ready]]] = deque()
        self.word: ReadyWord | None = None
        self._refused = ""

    def __bool__(self) -> bool:
        return bool(self._computing)

    @property
    def failed(self) -> str:
        """Why no step's KV will be there any more, or empty."""
        return self._refused or self._accelerator.failed

    def mark(self) -> bool:
        """A part of a step has been launched whose KV goes out behind its word. False if the device has failed."""
        try:
            self.word = self._accelerator.mark_step()
        except DeviceError as error:
            self._refused = str(error)
        return not self.failed

    def launched(self, ready: Sequence[Ready], *, wait: bool) -> Sequence[Ready]:
        """A step has been launched. Answers what the ledger may know now; with ``wait`` only what has been computed."""
        try:
            word = self._accelerator.mark_step()
        except DeviceError as error:
            self._refused = str(error)
        if self.failed:
            return ()
        if not self._computing and (not wait or is_reached(word)):
            # Kept after this call: a registration may come before the step is ready, and waits for the same word.
            self.word = word
            return ready
        self._computing.append((word, list(ready)))
        return ()

    def ended(self) -> list[Ready]:
        """What has been computed since it was last asked, in order."""
        found: list[Ready] = []
        while self._computing and is_reached(self._computing[0][0]):
            self.word, ready = self._computing.popleft()
            found += ready
        return found

    def give_up(self) -> None:
        """No step that is under way will end."""
        self._computing.clear()

    def take_back(self, request: str) -> None:
        """The request's blocks are wanted back: what steps under way fill is nothing to it any more."""
        for _, ready in self._computing:
            ready[:] = [order for order in ready if order.request != request]
