"""Two processes with their caches on (played) Neuron devices: allocated, registered, pushed over tcp, flushed, read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nrt import compile_nrt

from .conftest import free_port
from .sides import until

SOURCE, TARGET = [1, 2, 3, 4], [14, 11, 13, 12]


class Process:
    """One engine, driven line by line."""

    def __init__(self, name: str, library: Path, **environment: str) -> None:
        self.port = free_port()
        options = {"name": name, "library": str(library), "port": self.port, "environment": environment}
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("NEURON_RT_", "FAKE_NRT_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.engine.neuron_process", json.dumps(options)],
            env=clean,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended; see its stderr above"
        return json.loads(line)

    def do(self, *command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> int:
        """Let it close everything; how many tensors are left then."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        left = self.answer()
        assert self.process.wait(20) == 0
        return int(left)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_nrt(tmp_path_factory.mktemp("nrt"), defines=["DMABUF_V2"])


@pytest.fixture(params=["mapped", "unmapped"])
def mapping(request: pytest.FixtureRequest) -> str:
    """Whether device memory has addresses. Without, it is pushed by way of host memory."""
    return str(request.param)


@pytest.fixture
def pair(library: Path, mapping: str) -> Iterator[tuple[Process, Process]]:
    environment = {"NEURON_RT_MAP_HBM": "1" if mapping == "mapped" else "0"}
    processes = Process("sender", library, **environment), Process("receiver", library, **environment)
    for process in processes:
        assert process.answer() == "ready"
    yield processes
    for process in processes:
        process.process.kill()
        process.process.wait()
        for pipe in (process.process.stdin, process.process.stdout):
            assert pipe is not None
            pipe.close()


def test_push_from_one_device_to_another(pair: tuple[Process, Process], mapping: str) -> None:
    sender, receiver = pair
    sender.do("prefill", "p", 1, 64, SOURCE)
    receiver.do("ask", "d", 1, 64, TARGET, sender.port)
    until(lambda: sender.do("links"), "the connection")
    # The step that computes the prompt has been launched, and nothing has told yet that it has finished.
    assert receiver.do("blank", TARGET) is True
    sender.do("idle_step")
    assert receiver.do("await_report", "d") is True
    assert receiver.do("holds", 1, TARGET) is True
    assert receiver.do("others_blank", TARGET) is True
    assert sender.do("holds", 1, SOURCE) is True
    assert sender.do("others_blank", SOURCE) is True
    for process in pair:
        about = process.do("about")
        assert about["kinds"] == [f"neuron/{mapping}"]
        assert ("NEURON_RT_MAP_HBM" in about["hint"]) == (mapping == "unmapped")
        assert about["initialised_here"] is True
    if mapping == "mapped":  # Then what has arrived is read once before anybody is told of it.
        assert receiver.do("about")["flushes"] > 0
    assert [process.end() for process in pair] == [0, 0]
