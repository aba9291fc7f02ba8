"""Stand-ins for libcuda: each test has one of its own, so that none sees what another has left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_compat import CudaAccelerator
from tests.fakes.cuda import SONAME, Cuda, Open, compile_cuda

KINDS = {"new": (), "v1": ("V1",), "old": ("OLD",)}
"""Drivers: with all that is used, with the first version of stream writes, and with that and neither dmabufs nor
handles."""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: compile_cuda(tmp_path_factory.mktemp(kind), defines=names) for kind, names in KINDS.items()}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FAKE_CUDA_"):
            monkeypatch.delenv(name)


@pytest.fixture
def driver(libraries: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy for this test, which is loaded as a library of its own."""

    def copy(kind: str = "new") -> Path:
        own = tmp_path / f"{kind}-{SONAME}"
        return own if own.exists() else Path(shutil.copy(libraries[kind], own))

    return copy


@pytest.fixture
def start(driver: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an accelerator; keywords choose what the stand-in is like. In the end nothing may be left."""
    opened: list[tuple[CudaAccelerator, Cuda]] = []

    def start(kind: str = "new", index: int = 0, **settings: int) -> tuple[CudaAccelerator, Cuda]:
        for name, value in settings.items():
            monkeypatch.setenv(f"FAKE_CUDA_{name.upper()}", str(value))
        library = driver(kind)
        cuda = Cuda(library)
        opened.append((CudaAccelerator(index, library), cuda))
        return opened[-1]

    yield start
    for accelerator, cuda in opened:
        cuda.c.fake_finish_all()
        accelerator.close()
    for _, cuda in opened:
        left = cuda.counts()
        left["streams"] -= cuda.streams
        assert not any(left.values()), left
