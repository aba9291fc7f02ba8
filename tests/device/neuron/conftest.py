"""Stand-ins for libnrt, and scenes with them: each in a process of its own, since a process has one runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.fakes.nrt import compile_nrt

KINDS = {"new": ("DMABUF_V2",), "plain": (), "old": ("OLD",)}
"""Runtimes: with all that is known, as the public headers say, and without what older ones have not got."""


class Play(Protocol):
    """Runs a scene of ``scenes.py`` to its end, with a runtime of that kind and environment."""

    def __call__(self, scene: str, kind: str = "new", *arguments: str, **environment: str) -> None: ...


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: compile_nrt(tmp_path_factory.mktemp(kind), defines=names) for kind, names in KINDS.items()}


@pytest.fixture(scope="session")
def stage() -> Iterator[subprocess.Popen[str]]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("NEURON_RT_", "FAKE_NRT_"))}
    stage = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.device.neuron.stage"],
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with stage:
        yield stage
        assert stage.stdin is not None
        stage.stdin.close()


@pytest.fixture
def play(stage: subprocess.Popen[str], libraries: dict[str, Path]) -> Play:
    def run(scene: str, kind: str = "new", *arguments: str, **environment: str) -> None:
        assert stage.stdin is not None
        assert stage.stdout is not None
        stage.stdin.write(json.dumps([scene, str(libraries[kind]), arguments, environment]) + "\n")
        stage.stdin.flush()
        code, said = json.loads(stage.stdout.readline())
        assert code == 0, said

    return run
