"""The core under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

libfabric itself, and its stand-in for EFA, is not instrumented. No report is suppressed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from neuron_pushkv.fabric import discovery

CORE = Path(discovery.__file__).parent
EXERCISE = Path(__file__).parent / "exercise.c"
SANITIZERS = {"address": "address,undefined", "thread": "thread"}


@pytest.fixture(scope="module", params=SANITIZERS)
def exercise(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built with one sanitizer."""
    program = tmp_path_factory.mktemp("exercise") / f"exercise-{request.param}"
    flags = [f"-fsanitize={SANITIZERS[request.param]}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    sources = sorted(path for path in CORE.glob("*.c") if not path.name.startswith("_"))
    build = subprocess.run(
        [os.environ.get("CC", "cc"), "-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", *flags, f"-I{CORE}"]
        + [str(path) for path in (*sources, EXERCISE)]
        + ["-o", str(program), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find" in build.stderr and "san" in build.stderr:
        pytest.skip(f"the compiler has no {request.param} sanitizer: {build.stderr.splitlines()[0]}")
    assert build.returncode == 0, build.stderr
    return program


@pytest.mark.parametrize("provider", ["tcp", "shm", "efa"])
def test_the_core_is_clean(exercise: Path, stand_in: Path, provider: str) -> None:
    library = stand_in if provider == "efa" else discovery.in_wheel()
    if library is None:
        pytest.skip("needs the libfabric of the 'mpich' package: pip install mpich")
    run = subprocess.run(
        [str(exercise), str(library), provider],
        capture_output=True,
        text=True,
        env={
            "PATH": os.environ["PATH"],
            "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
            "FI_SHM_DISABLE_CMA": "1",
        },
        timeout=50,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "clean\n", "")
