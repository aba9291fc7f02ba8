"""The device that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_compat import CudaAccelerator
from tests.gpu.hardware import Hardware


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    return Hardware()


@pytest.fixture
def accelerator() -> Iterator[CudaAccelerator]:
    accelerator = CudaAccelerator(0)
    yield accelerator
    accelerator.close()
