"""How cffi builds the native core: the C sources beside this file, and nothing but a C compiler."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(path.name for path in FOLDER.glob("*.c") if not path.name.startswith("_")))

builder = FFI()
builder.cdef((FOLDER / "api.h").read_text())
builder.set_source(
    "neuron_pushkv.fabric._core",
    '#include "api.h"',
    sources=[f"neuron_pushkv/fabric/{name}" for name in SOURCES],
    include_dirs=["neuron_pushkv/fabric"],
    depends=[f"neuron_pushkv/fabric/{path.name}" for path in sorted(FOLDER.glob("*.h"))],
    libraries=["dl", "pthread"],
    extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
)
