"""The stand-in for libcuda, built, and its handles for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from gpu_compat import CudaAccelerator
from gpu_compat.declarations import FUNCTIONS, TYPES

from .build import FOLDER, compile_library

SONAME = "libcuda.so.1"


def compile_cuda(folder: Path, *, headers: Path | None = None, defines: Sequence[str] = ()) -> Path:
    """The library in ``folder``, against ``cuda.h`` in ``headers``, or else our declarations."""
    (folder / "declared.h").write_text(f"#include <stddef.h>\n#include <stdint.h>\n{TYPES}{FUNCTIONS}")
    names = [*defines, *([] if headers is None else ["PUBLIC_HEADERS"])]
    include = [headers or folder]
    return compile_library(FOLDER / "libcuda.c", folder / SONAME, soname=SONAME, include=include, defines=names)


class Cuda:
    """The stand-in beside the accelerator: what torch would do, and what the hardware would."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library))
        for name in ("fake_map", "fake_managed"):
            getattr(self.c, name).restype = ctypes.c_void_p
        self.c.fake_exported.restype = ctypes.c_size_t
        self.streams = 0

    def stream(self) -> int:
        """A new stream of the first device, which stays."""
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.c.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.c.cuCtxPushCurrent_v2(context) == 0
        assert self.c.cuStreamCreate(ctypes.byref(stream), 1) == 0
        assert self.c.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        assert self.c.cuDevicePrimaryCtxRelease_v2(0) == 0
        assert stream.value is not None
        self.streams += 1
        return stream.value

    def launch(self, stream: int = 0) -> None:
        """Work that lasts until :meth:`finish`."""
        assert self.c.fake_launch(ctypes.c_void_p(stream)) == 0

    def finish(self, stream: int = 0) -> None:
        """The oldest work on that stream has finished."""
        self.c.fake_finish(ctypes.c_void_p(stream))

    def mapped(self, size: int, mapped: int, piece: int, *, capable: bool = True) -> int:
        """Memory mapped by handles: ``size`` bytes reserved, ``mapped`` of them there, ``piece`` by each handle."""
        sizes = [ctypes.c_size_t(number) for number in (size, mapped, piece)]
        return int(self.c.fake_map(*sizes, int(capable)))

    def managed(self, size: int) -> int:
        """Managed memory."""
        return int(self.c.fake_managed(ctypes.c_size_t(size)))

    def synchronous(self, address: int) -> bool:
        """Whether synchronous operations on that memory always are (SYNC_MEMOPS)."""
        return bool(self.c.fake_synchronous(ctypes.c_void_p(address)))

    def exported(self, fd: int) -> tuple[int, int]:
        """Where the exported range begins in the file behind the descriptor, and its bytes."""
        size = ctypes.c_size_t()
        return int(self.c.fake_exported(fd, ctypes.byref(size))), size.value

    def counts(self) -> dict[str, int]:
        """How many of everything there are now."""
        numbers = (ctypes.c_int * 6)()
        self.c.fake_counts(numbers)
        names = ("allocations", "streams", "events", "handles", "contexts", "depth")
        return dict(zip(names, numbers, strict=True))


Open: TypeAlias = Callable[..., tuple[CudaAccelerator, Cuda]]
"""Opens an accelerator over a stand-in; the fixture ``start`` of ``tests/gpu_compat``."""
