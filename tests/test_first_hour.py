"""The script for the first hour on new hardware, over tcp with host memory: each question has an answer or a reason."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_hour.ends import BACK, THERE, End, Settings, pattern
from benchmarks.first_hour.questions import QUESTIONS
from tests.transport.conftest import first_library

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
SMALL = ["--provider", "tcp", "--size", str(MIB), "--rounds", "40", "--bandwidth-bytes", str(8 * MIB)]
SMALL += ["--registered-bytes", str(8 * MIB), "--endpoints", "20", "--cut-off-bytes", str(2048 * MIB)]


@pytest.fixture(scope="module", autouse=True)
def _libfabric() -> None:
    first_library()  # Skips where there is none.


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "benchmarks.first_hour", *arguments, *SMALL]


def test_every_question_has_a_row_with_evidence_or_a_reason(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    with subprocess.Popen(command("--serve", "--port", "0"), cwd=ROOT, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            port = serving.stdout.readline().rpartition(":")[2].strip()
            asking = command("--peer", f"127.0.0.1:{port}", "--json", str(out))
            subprocess.run(asking, cwd=ROOT, capture_output=True, timeout=50, check=True)
            assert serving.wait(20) == 0
        finally:
            serving.kill()
    machine, *rows = json.loads(out.read_text())
    assert "cores" in machine["answer"]
    assert [row["question"] for row in rows] == [ask.__name__ for ask in QUESTIONS]
    found: dict[str, dict[str, Any]] = {row["question"]: row for row in rows}
    assert all(row["asked"].endswith("?") for row in rows)
    assert found["dmabuf"]["skipped"] == "host memory is registered by its address"
    assert found["what_is_here"]["answer"] == "tcp"
    assert [step["bytes"] for step in found["registration_time"]["evidence"]["steps"]] == [MIB, 4 * MIB, 8 * MIB]
    assert all(step["parts"] == 1 for step in found["registration_time"]["evidence"]["steps"])
    assert set(found["latency"]["evidence"]["half_round_trip_by_bytes"]) == {"8", "4096", "65536"}
    assert found["bandwidth"]["answer"] > 0
    assert found["flush"]["answer"] is False
    assert found["flush"]["evidence"]["without"] == {"rounds": 40, "wrong_rounds": 0, "wrong_bytes": 0}
    closed = found["closed_endpoint"]
    if "skipped" not in closed:  # Where nobody looks for seconds everything may have been written before.
        assert closed["answer"] == 0
        assert closed["evidence"]["written"] < closed["evidence"]["posted"]
    assert found["endpoints"]["answer"] == 20


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    both = tuple(End(Settings("tcp", "127.0.0.1", None, "cpu", 0, MIB)) for _ in range(2))
    near, far = both
    opened = near.open(), far.open()
    far.connect(**opened[0])
    near.connect(**opened[1])
    yield near, far
    for end in both:
        end.close()


def test_what_was_not_there_when_it_was_told_is_counted(ends: tuple[End, End]) -> None:
    near, far = ends
    results: list[dict[str, int]] = []
    watching = threading.Thread(target=lambda: results.append(far.watch(rounds=3, length=4096, pieces=1)))
    watching.start()
    for number in (1, 2, 3):
        data = pattern(number, 4096)
        if number == 2:
            data = data.copy()
            data[100:105] ^= 0xFF
        near.store(data)
        near.write([(0, 0, 4096)], THERE)
        near.arrived(BACK, number)
    watching.join(20)
    assert results == [{"rounds": 3, "wrong_rounds": 1, "wrong_bytes": 5}]


def test_without_another_side_it_says_what_to_start() -> None:
    asking = command("--peer", "127.0.0.1:1")
    run = subprocess.run(asking, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("start it there with --serve first")
    assert "Traceback" not in run.stderr
