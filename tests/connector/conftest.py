"""vLLM is imported once, here: torch's own modules warn while they are, and our tests make errors of warnings."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connector.harness import Harness, model_folder

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.scheduler  # noqa: F401

    import neuron_pushkv.connector.connector  # noqa: F401

# vLLM keeps its log to itself; caplog listens at the root.
logging.getLogger("vllm").propagate = True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path) -> Iterator[Harness]:
    """One engine; afterwards every block must be free and nothing remembered."""
    harness = Harness(model, chunk=64)
    whole = harness.free
    yield harness
    harness.steps()
    harness.directory.free(*harness.directory.kept)
    harness.add("sweeper", [1, 2, 3])
    harness.steps()
    assert harness.free == whole
    assert harness.side._sending._offered == harness.side._receiving._loads == {}
    assert harness.kept == harness.side._parking.bytes == 0
    assert not harness.side._parking._staying
    assert not harness.side._parking._held_to_stay
    assert not harness.scheduler.requests
    assert harness.worker._worker._open == {}
    assert not harness.worker._worker._announced
