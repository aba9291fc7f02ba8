"""Registered memory in which small pieces of KV are put together before they are written, in bounded extents."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_pushkv.blocks import BlockPool, Extent
from neuron_pushkv.errors import TransportError
from neuron_pushkv.transport.base import Registration

ALIGNMENT = 64
"""Bytes: a cache line, so that no two extents share one."""
_PACKING = "packing"
"""The only owner of anything here."""


class Staging:
    """Hands out extents of ``buffer``, the writable memory that ``registration`` covers: the pool's blocks are bytes.

    Not for several threads at once. Raises :class:`TransportError` if the buffer is another memory than the registered
    one.
    """

    def __init__(self, registration: Registration, buffer: Any) -> None:
        self.registration = registration
        self.bytes: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
        memory = registration.memory
        if (self.bytes.ctypes.data, self.bytes.nbytes) != (memory.address, memory.length):
            raise TransportError("the staging buffer is not the memory that was registered; register that very buffer")
        self.pool = BlockPool(memory.length // ALIGNMENT * ALIGNMENT)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.pool.total

    @property
    def largest(self) -> int:
        """Bytes of the longest extent that can be taken now."""
        return self.pool.largest

    def take(self, size: int) -> Extent | None:
        """At least ``size`` bytes, or None if there is no room for so many now."""
        taken = self.pool.take(max(1, -(-size // ALIGNMENT)) * ALIGNMENT, _PACKING, whole=True)
        return taken[0] if taken else None

    def free(self, extent: Extent) -> None:
        """Give it back, when nothing reads from it any more. Raises :class:`~neuron_pushkv.errors.BlockError` if it
        isn't taken."""
        self.pool.release(_PACKING, [extent])
