"""What this process uses."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def descriptors() -> int:
    """Files and sockets that are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    """Memory that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _MallocState(ctypes.Structure):
    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def native_bytes() -> int:
    """What malloc has handed out and not got back: the native core and libfabric, for the most part."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocState
    state = mallinfo2()
    return int(state.uordblks + state.hblkhd)
