"""Ready words: written by the device itself, in the order of a stream; or, where it can't, by a thread that waits."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gpu_compat.context import Context
from gpu_compat.declarations import ffi
from gpu_compat.library import Library
from gpu_compat.status import NOT_SUPPORTED, SUCCESS, error_for
from neuron_pushkv.device.base import ReadyWord
from neuron_pushkv.device.steps import StepWord
from neuron_pushkv.errors import DeviceError

_WORD_BYTES = 64
"""A cache line for each word: the device's writes to one don't disturb who looks at another."""


class Marker(Protocol):
    """Marks steps on streams, given as their handles' numbers."""

    @property
    def failed(self) -> str:
        """Why no step is ready any more, as far as it is known; or empty."""

    def mark(self, stream: int) -> ReadyWord:
        """A word that is reached when what has been launched on that stream so far has finished."""

    def close(self) -> None:
        """Waits for what has been marked. Once."""


def current_stream(index: int) -> int:
    """The stream that torch launches on now, in this thread; the default stream (0) where torch doesn't use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(index).cuda_stream)


def stream_write(context: Context) -> str | None:
    """The function that writes a word in a stream's order; ``None`` where driver or device can't.

    Version 2 came with CUDA 11.7 and works everywhere since; version 1 had to be enabled in the kernel module.
    """
    if context.library.has("cuStreamWriteValue32_v2"):
        return "cuStreamWriteValue32_v2"
    if context.library.has("cuStreamWriteValue32") and context.attribute("CAN_USE_STREAM_MEM_OPS_V1"):
        return "cuStreamWriteValue32"
    return None


def open_marker(context: Context) -> Marker:
    """The best that this device can do, found out by trying."""
    function = stream_write(context)
    if function is not None:
        words = StreamWords(context, function)
        if words.work():
            return words
        words.close()
    return EventWords(context, f"cuda{context.index}")


@dataclass
class _Word:
    host: Any
    device: int
    marked: int = 0

    def reached(self) -> bool:
        return int(ffi.cast("uint32_t *", self.host)[0]) == self.marked


class StreamWords:
    """A word in page-locked host memory for each stream. No thread wakes, and nothing of ours runs, at a step's end.

    Streams can't share a word: work on one may finish before earlier work on another.
    """

    failed = ""
    """A device that has failed says so to the next mark."""

    def __init__(self, context: Context, function: str) -> None:
        self._context = context
        self._function = function
        self._words: dict[int, _Word] = {}
        self._lock = threading.Lock()

    def work(self) -> bool:
        """Whether the device does write: tried out on a stream of its own."""
        with self._context.current() as library:
            stream = ffi.new("CUstream *")
            library.call("cuStreamCreate", stream, library.c.CU_STREAM_NON_BLOCKING)
            word = self._new(library)
            try:
                status = self._write(library, int(ffi.cast("uintptr_t", stream[0])), word, 1)
                if status == NOT_SUPPORTED:
                    return False
                if status != SUCCESS:
                    raise error_for(status, self._function)
                word.marked = 1
                library.call("cuStreamSynchronize", stream[0])
                return word.reached()
            finally:
                library.call("cuStreamDestroy_v2", stream[0])
                library.call("cuMemFreeHost", word.host)

    def mark(self, stream: int) -> ReadyWord:
        """See :class:`Marker`. The write is ordered behind all that the stream's earlier work has written."""
        with self._lock, self._context.current() as library:
            word = self._words.get(stream)
            if word is None:
                word = self._words[stream] = self._new(library)
            value = (word.marked + 1) & 0xFFFFFFFF
            status = self._write(library, stream, word, value)
            if status != SUCCESS:
                raise error_for(status, self._function)
            word.marked = value
            return ReadyWord(int(ffi.cast("uintptr_t", word.host)), value)

    def _new(self, library: Library) -> _Word:
        host, device = ffi.new("void **"), ffi.new("CUdeviceptr *")
        flags = library.c.CU_MEMHOSTALLOC_PORTABLE | library.c.CU_MEMHOSTALLOC_DEVICEMAP
        library.call("cuMemHostAlloc", host, _WORD_BYTES, flags)
        ffi.memmove(host[0], bytes(_WORD_BYTES), _WORD_BYTES)
        library.call("cuMemHostGetDevicePointer_v2", device, host[0], 0)
        return _Word(host[0], int(device[0]))

    def _write(self, library: Library, stream: int, word: _Word, value: int) -> int:
        handle = ffi.cast("CUstream", stream)
        return library.status(self._function, handle, word.device, value, library.c.CU_STREAM_WRITE_VALUE_DEFAULT)

    def close(self) -> None:
        """See :class:`Marker`. A word that is still to be written must not be somebody else's memory by then."""
        with self._lock:
            words, self._words = list(self._words.values()), {}
        if words:
            with self._context.current() as library:
                if not all(word.reached() for word in words):
                    library.status("cuCtxSynchronize")
                for word in words:
                    library.status("cuMemFreeHost", word.host)


class EventWords:
    """An event for each step, and a thread that waits for them, asleep."""

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self._steps = StepWord(name)
        self._idle: list[Any] = []

    @property
    def failed(self) -> str:
        """See :class:`Marker`."""
        return self._steps.failed

    def mark(self, stream: int) -> ReadyWord:
        """See :class:`Marker`."""
        if self.failed:
            raise DeviceError(self.failed)
        with self._context.current() as library:
            event = self._idle.pop() if self._idle else self._new(library)
            status = library.status("cuEventRecord", event, ffi.cast("CUstream", stream))
            if status != SUCCESS:
                self._idle.append(event)
                raise error_for(status, "cuEventRecord")
        return self._steps.mark(partial(self._wait, event))

    def _new(self, library: Library) -> Any:
        event = ffi.new("CUevent *")
        library.call("cuEventCreate", event, library.c.CU_EVENT_BLOCKING_SYNC | library.c.CU_EVENT_DISABLE_TIMING)
        return event[0]

    def _wait(self, event: Any) -> None:
        with self._context.current() as library:
            try:
                library.call("cuEventSynchronize", event)
            finally:
                self._idle.append(event)

    def close(self) -> None:
        """See :class:`Marker`."""
        self._steps.close()
        with self._context.current() as library:
            for event in self._idle:
                library.status("cuEventDestroy_v2", event)
