"""Registered memory in which small pieces of KV are put together before they are written, in bounded extents."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Registration

ALIGNMENT = 64
"""Bytes: a cache line, so that no two extents share one."""


class Extent(NamedTuple):
    """A run of bytes in the staging memory."""

    offset: int
    length: int


class Staging:
    """Hands out extents of ``buffer``, the writable memory that ``registration`` covers.

    First fit by address; neighbours that are free become one. Not for several threads at once. Raises
    :class:`TransportError` if the buffer is another memory than the registered one.
    """

    def __init__(self, registration: Registration, buffer: Any) -> None:
        self.registration = registration
        self.bytes: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
        memory = registration.memory
        if (self.bytes.ctypes.data, self.bytes.nbytes) != (memory.address, memory.length):
            raise TransportError("the staging buffer is not the memory that was registered; register that very buffer")
        self.size = memory.length // ALIGNMENT * ALIGNMENT
        self._free = [Extent(0, self.size)] if self.size else []
        self._taken: set[Extent] = set()

    @property
    def largest(self) -> int:
        """Bytes of the longest extent that can be taken now."""
        return max((extent.length for extent in self._free), default=0)

    def take(self, size: int) -> Extent | None:
        """At least ``size`` bytes, or None if there is no room for so many now."""
        length = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        for index, (offset, room) in enumerate(self._free):
            if room >= length:
                left = Extent(offset + length, room - length)
                self._free[index : index + 1] = [left] if left.length else []
                extent = Extent(offset, length)
                self._taken.add(extent)
                return extent
        return None

    def free(self, extent: Extent) -> None:
        """Give it back, when nothing reads from it any more. Raises :class:`TransportError` if it isn't taken."""
        if extent not in self._taken:
            raise TransportError(f"{extent} is not taken; free each extent once")
        self._taken.remove(extent)
        offset, length = extent
        index = bisect_left(self._free, extent)
        if index < len(self._free) and self._free[index].offset == offset + length:
            length += self._free.pop(index).length
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free.pop(index)
            length += before
        self._free.insert(index, Extent(offset, length))
