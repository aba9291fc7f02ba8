"""Where libfabric is on this machine."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

from neuron_pushkv.errors import FabricError

SONAME = "libfabric.so.1"
INSTALLER_FOLDERS = (Path("/opt/amazon/efa/lib64"), Path("/opt/amazon/efa/lib"))
"""Where AWS's EFA installer puts its build, the one with support for Neuron devices and CUDA."""
WHEEL = "mpich"
"""A package on PyPI that carries a copy of libfabric as a file, so that a development machine needs no root."""

HOW_TO_GET_ONE = (
    "install the EFA software (machines with EFA), the distribution's libfabric1, or the Python package 'mpich' "
    "which carries a copy; or set 'libfabric' to the path of one"
)


def in_wheel() -> Path | None:
    """The copy inside the ``mpich`` wheel, if that is installed here."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in files:
        if entry.name == SONAME:
            path = Path(str(entry.locate())).resolve()
            if path.is_file():
                return path
    return None


def loaded() -> Path | None:
    """The libfabric that this process has loaded already, through us or anybody else."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and re.search(r"/libfabric\.so\.1(\.\d+)*$", path[0]):
            return Path(path[0])
    return None


def candidates(setting: Path | None, provider: str) -> Iterator[str]:
    """What to try to load, best first; an explicit ``setting`` is the only one. Raises :class:`FabricError`.

    Without EFA the wheel's copy comes before the loader's, which on a distribution is likely to be an old one: over
    shm 1.17 (Debian 12) takes 8 times as long as 2.5 for small writes. With EFA, the system's knows the system.
    A process can't have two: they share symbols, and only the first can claim EFA's devices.
    """
    if setting is not None:
        if setting.is_dir():
            setting = setting / SONAME
        if not setting.is_file():
            raise FabricError(f"there is no libfabric at {setting}, which is what 'libfabric' is set to")
    present = loaded()
    if present is not None:
        if setting is not None and not setting.samefile(present):
            raise FabricError(
                f"this process has loaded {present} already and can't use a second libfabric, {setting}; "
                "leave 'libfabric' unset, or set it to the one that is loaded first"
            )
        yield str(present)
        return
    if setting is not None:
        yield str(setting)
        return
    for folder in INSTALLER_FOLDERS:
        if (folder / SONAME).is_file():
            yield str(folder / SONAME)
    bundled = in_wheel()
    rest = [SONAME] if bundled is None else [SONAME, str(bundled)]  # the loader's, the wheel's
    yield from rest if provider == "efa" else reversed(rest)
