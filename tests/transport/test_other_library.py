"""The same tests over a second libfabric: 2.5 and Debian's 1.17 differ most where it matters here, in tcp and shm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transport.conftest import OTHER_LIBRARY, second_library

FOLDER = Path(__file__).parent


@pytest.mark.timeout(480)
@pytest.mark.skipif(OTHER_LIBRARY in os.environ, reason="this is that run")
def test_the_contract_holds_over_another_libfabric() -> None:
    run = once_more_over_the_other()
    for _ in range(4):
        # Either process may die: 1.17's tcp does that now and then when endpoints are closed (see OVER_RXM).
        if major_version(second_library()) > 1 or not (run.returncode < 0 or "EOFError" in run.stdout):
            break
        run = once_more_over_the_other()
    assert run.returncode == 0, run.stdout + run.stderr


def once_more_over_the_other() -> subprocess.CompletedProcess[str]:
    """All tests of this folder that a transport over libfabric has to pass."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(FOLDER), f"--ignore={FOLDER / 'test_faults.py'}"],
        # rxm looks for connections only every so often; more often makes the tests quicker, and nothing else.
        env={**os.environ, OTHER_LIBRARY: str(second_library()), "FI_OFI_RXM_CM_PROGRESS_INTERVAL": "500"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def major_version(library: Path) -> int:
    """Asked in a process of its own, since one can load only one libfabric."""
    ask = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).fi_version() >> 16)"
    return int(subprocess.check_output([sys.executable, "-c", ask, str(library)], text=True, timeout=30))
