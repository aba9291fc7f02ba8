"""This process's memory mappings, and addresses that nothing is mapped at."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neuron_pushkv.errors import DeviceError

_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Mapping:
    """Addresses from ``start`` to before ``end``, and the file they show, if any."""

    start: int
    end: int
    path: str


def mappings() -> Iterator[Mapping]:
    """As the kernel lists them now (``/proc/self/maps``, see proc(5)): by address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *rest = line.split(maxsplit=5)
        start, _, end = addresses.partition("-")
        yield Mapping(int(start, 16), int(end, 16), rest[4] if len(rest) > 4 else "")


def holding(address: int, length: int) -> Mapping | None:
    """The one mapping that holds all of these bytes."""
    for mapping in mappings():
        if mapping.start <= address and address + length <= mapping.end:
            return mapping
    return None


def loaded(library: str) -> Path | None:
    """The file of that shared library ("libnrt") that this process has loaded, through us or anybody else.

    Of any version: names show versions of files here, which need not be those that programs link to.
    """
    pattern = re.compile(rf"/{re.escape(library)}\.so(\.\d+)*$")
    return next((Path(mapping.path) for mapping in mappings() if pattern.search(mapping.path)), None)


class Place:
    """``length`` addresses from ``address`` on, a multiple of ``alignment``, that nobody can read, write or get."""

    def __init__(self, length: int, alignment: int) -> None:
        self._length = length + alignment
        # Python's own mmap can't tell the address of memory that can't be written to.
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._start: int | None = self._libc.mmap(None, self._length, _PROT_NONE, flags, -1, 0)
        if self._start is None or self._start == _FAILED:
            raise DeviceError(f"{length} addresses are not to be had (error {ctypes.get_errno()}); look at 'ulimit -v'")
        self.address = -(-self._start // alignment) * alignment

    def close(self) -> None:
        """Idempotent."""
        if self._start is not None:
            self._libc.munmap(self._start, self._length)
            self._start = None
