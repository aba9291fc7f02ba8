"""Device memory that we have allocated: slabs, and copies in and out of them."""

from __future__ import annotations

import bisect
import ctypes
import threading
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from neuron_pushkv.device.base import SLAB_ALIGNMENT, Copies
from neuron_pushkv.device.neuron import maps
from neuron_pushkv.device.neuron.declarations import ffi
from neuron_pushkv.device.neuron.library import Library
from neuron_pushkv.errors import DeviceError

_NAME = b"pushkv"


@dataclass(eq=False)
class Slab:
    """``length`` bytes at ``address`` in ``tensor``, from its first one on."""

    address: int
    length: int
    mapped: bool
    tensor: Any
    whole: Any = None
    """What ``tensor`` is a slice of."""
    place: maps.Place | None = None
    """Holds the address of memory that has none of its own."""


class Tensors:
    """The slabs of one core, number ``vnc`` of those that this process sees."""

    def __init__(self, library: Library, vnc: int) -> None:
        self._library = library
        self._vnc = vnc
        self._lock = threading.Lock()
        self._slabs: dict[int, Slab] = {}
        self._starts: list[int] = []

    def allocate(self, length: int) -> Slab:
        """Zeroed. Where HBM is mapped its address is a multiple of :data:`SLAB_ALIGNMENT`, and nothing else lies in its
        last page of that size: cards then map it in such pages."""
        room = -(-length // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
        slab = self._reserve(self._new(room), length)
        if slab.mapped and slab.address % SLAB_ALIGNMENT:
            self._release(slab)
            slab = self._slice(self._new(room + SLAB_ALIGNMENT), room, length)
        try:
            self._library.call("nrt_tensor_memset", slab.tensor[0], 0, 0, length)
        except DeviceError:
            self._release(slab)
            raise
        with self._lock:
            self._slabs[slab.address] = slab
            bisect.insort(self._starts, slab.address)
        return slab

    def _new(self, size: int) -> Any:
        tensor = ffi.new("nrt_tensor_t **")
        placement = self._library.c.NRT_TENSOR_PLACEMENT_DEVICE
        self._library.call("nrt_tensor_allocate", placement, self._vnc, size, _NAME, tensor)
        return tensor

    def _reserve(self, tensor: Any, length: int) -> Slab:
        address = self._address(tensor)
        if address:
            return Slab(address, length, True, tensor)
        place = maps.Place(length, SLAB_ALIGNMENT)
        return Slab(place.address, length, False, tensor, place=place)

    def _slice(self, whole: Any, room: int, length: int) -> Slab:
        offset = -self._address(whole) % SLAB_ALIGNMENT
        part = ffi.new("nrt_tensor_t **")
        try:
            self._library.call("nrt_tensor_allocate_slice", whole[0], offset, room, _NAME, part)
        except DeviceError:
            self._library.c.nrt_tensor_free(whole)
            raise
        return Slab(self._address(whole) + offset, length, True, part, whole)

    def _address(self, tensor: Any) -> int:
        return int(ffi.cast("uintptr_t", self._library.c.nrt_tensor_get_va(tensor[0])))

    def free(self, address: int) -> None:
        """Raises :class:`DeviceError` where no slab begins."""
        with self._lock:
            slab = self._slabs.pop(address, None)
            if slab is None:
                raise DeviceError(f"the memory at {address:#x} was not allocated here; free each slab once")
            self._starts.remove(address)
        self._release(slab)

    def _release(self, slab: Slab) -> None:
        self._library.c.nrt_tensor_free(slab.tensor)
        if slab.whole is not None:
            self._library.c.nrt_tensor_free(slab.whole)
        if slab.place is not None:
            slab.place.close()

    def close(self) -> None:
        """Free all."""
        for address in list(self._slabs):
            self.free(address)

    def holding(self, address: int, length: int) -> Slab | None:
        """The slab that these bytes lie in. Raises :class:`DeviceError` if they lie in one only in part."""
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            slab = self._slabs[self._starts[index]] if index >= 0 else None
        if slab is None or address >= slab.address + slab.length:
            return None
        if address + length > slab.address + slab.length:
            raise DeviceError(f"{length} bytes at {address:#x} lie beyond the end of their slab")
        return slab

    def read(self, copies: Copies) -> None:
        """Device to host. Memory that others have allocated is read through its mapping."""
        self._move(copies, "nrt_tensor_read", writes=False)

    def write(self, copies: Copies) -> None:
        """Host to device."""
        self._move(copies, "nrt_tensor_write", writes=True)

    def _move(self, copies: Copies, function: str, *, writes: bool) -> None:
        rows = [(self.holding(row[0], row[2]), *row) for row in copies.tolist() if row[2]]
        mine = [(slab, row[0] - slab.address, *row[1:]) for slab, *row in rows if slab is not None]
        for device, host, length in (row[1:] for row in rows if row[0] is None):
            self._move_mapped(device, host, length, writes=writes)
        mine.sort(key=lambda row: row[0].address)
        groups = [(slab, list(group)) for slab, group in groupby(mine, key=lambda row: row[0])]
        if not groups:
            return
        if self._library.has(f"{function}_batch"):
            self._batch(f"{function}_batch", groups)
            return
        for slab, group in groups:
            for _, offset, host, length in group:
                self._library.call(function, slab.tensor[0], ffi.cast("void *", host), offset, length)

    def _batch(self, function: str, groups: list[tuple[Slab, list[tuple[Slab, int, int, int]]]]) -> None:
        """One call for everything. Waits for whoever else uses a tensor ("unsafe" is what would not)."""
        batches, alive = ffi.new("nrt_tensor_batch_t[]", len(groups)), []
        for batch, (slab, group) in zip(batches, groups, strict=True):
            operations = ffi.new("nrt_tensor_batch_op_t[]", len(group))
            for operation, (_, offset, host, length) in zip(operations, group, strict=True):
                operation.offset, operation.size, operation.buffer = offset, length, ffi.cast("void *", host)
            batch.tensor, batch.ops, batch.num_ops = slab.tensor[0], operations, len(group)
            alive.append(operations)
        self._library.call(function, batches, len(groups), False)

    def _move_mapped(self, device: int, host: int, length: int, *, writes: bool) -> None:
        if maps.holding(device, length) is None:
            raise DeviceError(
                f"{length} bytes at {device:#x} are neither a slab of ours nor mapped; nothing can move them"
            )
        if not writes:
            ctypes.memmove(host, device, length)
        elif self._library.has("nrt_memcpy_to_device"):
            self._library.call("nrt_memcpy_to_device", ffi.cast("void *", device), ffi.cast("void *", host), length)
        else:
            raise DeviceError("this Neuron runtime has no nrt_memcpy_to_device; install a newer one")
