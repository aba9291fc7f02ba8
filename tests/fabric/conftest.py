from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from neuron_pushkv.fabric import discovery

OURS = Path(discovery.__file__).parent
FAKE = Path(__file__).parents[1] / "fakes/libfabric"


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("efa") / discovery.SONAME
    sources = sorted(FAKE.glob("*.c"))
    flags = ("-std=c11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")
    build = subprocess.run(
        [os.environ.get("CC", "cc"), *flags, f"-I{OURS}", *map(str, sources), "-o", str(library), "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    return library
