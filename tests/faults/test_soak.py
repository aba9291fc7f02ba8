"""About ten seconds of the soak, which `make soak` runs for longer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import soak

from .side_process import ROOT


def run(seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.soak", "--seconds", str(seconds), "--seed", "5"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)


def test_ten_seconds() -> None:
    """F14, F34: two engines under random trouble: canaries, reports, free blocks, tables and descriptors are right."""
    done = run(6.0)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("soak passed, seed 5: ")
    assert " completed" in lines[1]


@pytest.mark.parametrize("crime", ["a late write", "a report without the bytes", "a lost block"])
def test_soak_finds(crime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is there for: each of these is found within seconds."""
    driver = soak.Soak(6)
    try:
        victim = driver.engines[0]
        if crime == "a late write":
            guard = driver.guard
            monkeypatch.setattr(
                driver,
                "guard",
                lambda engine, blocks: (guard(engine, blocks), engine.side.do("fill", 1, blocks[:1])),
            )
            expected = "after its report"
        elif crime == "a report without the bytes":
            want = driver.want

            def shifted(here: soak.Engine, there: soak.Engine, prompt: int, tokens: int, first: int) -> None:
                want(here, there, prompt, tokens, first)
                there.awaited[f"d{prompt}"].prompt += 1

            monkeypatch.setattr(driver, "want", shifted)
            expected = "hold something else"
        else:
            victim.free.pop()
            expected = "blocks free"
        with pytest.raises(soak.Wrong, match=expected):
            driver.run(0.8)
    finally:
        driver.close()
