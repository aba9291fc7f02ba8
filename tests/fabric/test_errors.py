"""What a user reads when libfabric, a provider or the core can't be had: one sentence that says what to do.

Each case runs in a process of its own, since a process loads one libfabric for good.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neuron_pushkv.fabric import discovery, opening

ROOT = Path(__file__).parents[2]

TRY = """
import sys
from pathlib import Path
{prepare}
from neuron_pushkv.errors import PushKVError
from neuron_pushkv.transport.fabric import FabricTransport
library = {library!r}
try:
    transport = FabricTransport({provider!r}, library and Path(library), {host!r}, **{others!r})
except PushKVError as error:
    print(type(error).__name__, error, sep=": ", end="")
else:
    transport.close()
    print("opened", transport.provider, transport.library, end="")
"""


def attempt(
    provider: str = "tcp",
    library: Path | None = None,
    host: str = "127.0.0.1",
    prepare: str = "",
    environment: dict[str, str] | None = None,
    **others: Any,
) -> str:
    """What comes of opening a transport in a fresh process."""
    script = TRY.format(prepare=prepare, provider=provider, library=library and str(library), host=host, others=others)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "\n" not in run.stdout
    return run.stdout


@pytest.fixture
def wheel() -> Path:
    path = discovery.in_wheel()
    if path is None:
        pytest.skip("needs the libfabric of the 'mpich' package: pip install mpich")
    return path


def compiled(folder: Path, source: str) -> Path:
    library = folder / "libfabric.so.1"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, "-x", "c", "-"], input=source, text=True, check=True)
    return library


def test_a_provider_that_is_not_there_is_refused_with_what_was_found(wheel: Path) -> None:
    for provider in ("efa", "efa-direct"):
        sentence = attempt(provider, wheel)
        assert sentence.startswith(
            f"ProviderMismatch: provider '{provider}' was asked for, but libfabric 2.5 at {wheel} "
        )
        offered = sentence.split("offers here only: ")[1].split("; set 'provider'")[0].split(", ")
        assert "tcp" in offered
        assert "shm" in offered
        assert len(set(offered)) == len(offered)


def test_nothing_stands_in_for_the_provider_that_was_asked_for(wheel: Path) -> None:
    sentence = attempt("tcp", wheel, environment={"FI_PROVIDER": "sockets"})
    assert sentence.startswith("ProviderMismatch: provider 'tcp' was asked for")
    assert "offers here only: sockets;" in sentence


def test_the_provider_that_was_asked_for_is_the_one_that_is_opened(wheel: Path) -> None:
    assert attempt("tcp", wheel) == "opened tcp libfabric 2.5"
    assert attempt("shm", wheel) == "opened shm libfabric 2.5"


def test_a_host_of_another_machine_is_refused(wheel: Path) -> None:
    sentence = attempt("tcp", wheel, host="192.0.2.1")
    assert sentence.startswith(f"FabricError: libfabric 2.5 at {wheel}: provider 'tcp' can't open an endpoint (")
    assert sentence.endswith(") on host '192.0.2.1'; set 'host' to an address of this machine")
    assert attempt("tcp", wheel, host="no-such-host.invalid") == (
        f"FabricError: libfabric 2.5 at {wheel} has provider 'tcp', but not on host 'no-such-host.invalid'; "
        "set 'host' to an address of this machine"
    )
    assert attempt("tcp", wheel, host="0.0.0.0") == (
        "FabricError: provider 'tcp' needs the address that peers reach this machine at, not '0.0.0.0'"
    )


def test_network_cards_that_are_not_there(wheel: Path) -> None:
    sentence = attempt("tcp", wheel, nics=("rdmap16s27",))
    assert sentence == (
        f"FabricError: network cards rdmap16s27 were asked for, but with provider 'tcp' libfabric 2.5 at {wheel} has "
        "here only: lo"
    )
    assert attempt("tcp", wheel, nics=("lo", "l")).endswith("has here only: lo")
    assert attempt("tcp", wheel, nics=("lo",)) == "opened tcp libfabric 2.5"


def test_rails_that_cannot_be(wheel: Path) -> None:
    for rails in (0, -1, 33):
        assert attempt("tcp", wheel, rails=rails) == f"FabricError: {rails} rails can't be opened; there can be 1 to 32"
    assert attempt("tcp", wheel, rails=32) == "opened tcp libfabric 2.5"


def test_a_core_that_this_machine_has_not_got(wheel: Path) -> None:
    for core in (1023, 100_000):
        sentence = attempt("tcp", wheel, core=core)
        assert sentence.startswith(
            f"FabricError: the progress thread can't run on core {core}: this machine has {opening.cores()}, of which"
        )
        assert "set 'progress_core' to one of those" in sentence


def test_no_library_at_all(tmp_path: Path) -> None:
    prepare = (
        "from neuron_pushkv.fabric import discovery\n"
        "discovery.SONAME = 'libfabric-that-is-not-there.so.1'\n"
        "discovery.in_wheel = lambda: None\n"
        f"discovery.INSTALLER_FOLDERS = (Path({str(tmp_path)!r}),)"
    )
    sentence = attempt(prepare=prepare)
    assert sentence.startswith("FabricError: no usable libfabric (libfabric-that-is-not-there.so.1: cannot open")
    assert sentence.endswith(f"); {discovery.HOW_TO_GET_ONE}")


def test_a_setting_that_names_nothing(tmp_path: Path) -> None:
    path = tmp_path / "libfabric.so.1"
    assert attempt(library=path) == f"FabricError: there is no libfabric at {path}, which is what 'libfabric' is set to"
    assert attempt(library=tmp_path) == (
        f"FabricError: there is no libfabric at {path}, which is what 'libfabric' is set to"
    )


def test_a_setting_that_names_something_else(tmp_path: Path) -> None:
    path = tmp_path / "libfabric.so.1"
    path.write_text("not a library")
    assert f"no usable libfabric ({path}: " in attempt(library=path)
    compiled(tmp_path, "int something(void) { return 1; }")
    assert f"no usable libfabric ({path}: not libfabric: " in attempt(library=path)


def test_a_library_that_is_too_old(tmp_path: Path) -> None:
    names = ("fi_getinfo", "fi_freeinfo", "fi_dupinfo", "fi_fabric", "fi_strerror")
    source = "unsigned fi_version(void) { return 1u << 16 | 11u; }\n"
    path = compiled(tmp_path, source + "".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    assert f"no usable libfabric (libfabric 1.11 at {path}: too old, 1.17 or later is needed);" in attempt(library=path)


def test_a_second_library_in_one_process_is_refused(tmp_path: Path, wheel: Path) -> None:
    other = tmp_path / "libfabric.so.1"
    other.touch()
    prepare = f"import ctypes\nctypes.CDLL({str(wheel)!r})"
    assert attempt(library=other, prepare=prepare).startswith(f"FabricError: this process has loaded {wheel} already")
    assert attempt(library=wheel, prepare=prepare) == "opened tcp libfabric 2.5"
    assert attempt(prepare=prepare) == "opened tcp libfabric 2.5"


def test_a_core_that_is_not_built() -> None:
    sentence = attempt(prepare="sys.modules['neuron_pushkv.fabric._core'] = None")
    assert sentence.startswith("FabricError: the native core of neuron_pushkv is not built (")
    assert "install a C compiler" in sentence


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CC": "/nowhere/cc"},
        timeout=60,
        check=False,
    )
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("neuron-pushkv: the native core can't be compiled (")
    assert "install a C compiler" in last


def test_the_order_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "loaded", lambda: None)
    first, second = tmp_path / "lib64", tmp_path / "lib"
    monkeypatch.setattr(discovery, "INSTALLER_FOLDERS", (first, second))
    monkeypatch.setattr(discovery, "in_wheel", lambda: Path("/wheel/libfabric.so.1"))
    assert list(discovery.candidates(None, "efa")) == ["libfabric.so.1", "/wheel/libfabric.so.1"]
    assert list(discovery.candidates(None, "shm")) == ["/wheel/libfabric.so.1", "libfabric.so.1"]
    for folder in (second, first):
        folder.mkdir()
        (folder / "libfabric.so.1").touch()
    installed = [str(folder / "libfabric.so.1") for folder in (first, second)]
    assert list(discovery.candidates(None, "efa")) == [*installed, "libfabric.so.1", "/wheel/libfabric.so.1"]
    assert list(discovery.candidates(None, "tcp")) == [*installed, "/wheel/libfabric.so.1", "libfabric.so.1"]
    assert list(discovery.candidates(second, "efa")) == installed[1:]
    assert list(discovery.candidates(second / "libfabric.so.1", "efa")) == installed[1:]
