"""The order in which things must happen, and the names of its violations.

Environment, then libnrt, then the runtime (``nrt_init``), then the first call of libfabric:

- ``NEURON_RT_MAP_HBM`` counts at the first allocation: without it device memory has no address.
- ``NEURON_RT_VISIBLE_CORES`` counts when the runtime is initialised, which claims every core of the machine without it.
- libfabric looks for libnrt once, at the first ``fi_getinfo`` of the process, by the name ``libnrt.so.1``, which the
  loader finds as a rule only if the library is there already (``src/hmem_neuron.c``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from neuron_pushkv.device.neuron import maps

MAP_HBM = "NEURON_RT_MAP_HBM"
VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
NUM_CORES = "NEURON_RT_NUM_CORES"
LIBFABRIC, LIBNRT = "libfabric", "libnrt"

LOST = (
    "libfabric was initialised before libnrt: FI_HMEM_NEURON is lost for this process; initialise the Neuron runtime "
    "before anything loads libfabric (NIXL, Mooncake, mpi4py, and this package's transport)"
)
PERHAPS_LOST = (
    "libfabric and libnrt had both been loaded by others: if libfabric came first, FI_HMEM_NEURON is lost for this "
    "process; initialise the Neuron runtime before anything loads libfabric"
)
NO_ADDRESS = (
    f"this device memory has no address (data_ptr() is 0): set {MAP_HBM}=1 before the Neuron runtime is initialised"
)


def libfabric_came_first() -> str:
    """What has gone wrong between libfabric and libnrt so far, or "". To be asked before libnrt is loaded here."""
    if maps.loaded(LIBFABRIC) is None:
        return ""
    return LOST if maps.loaded(LIBNRT) is None else PERHAPS_LOST


def prepare(core: int) -> None:
    """Set what the runtime reads at its initialisation, where the environment doesn't say: HBM mapped, one core."""
    os.environ.setdefault(MAP_HBM, "1")
    if not os.environ.get(VISIBLE_CORES) and os.environ.get(NUM_CORES, "0") in ("", "0"):
        os.environ[VISIBLE_CORES] = str(core)


def unmapped() -> str:
    """Why device memory has no address, if the environment says so, or ""."""
    value = os.environ.get(MAP_HBM, "")
    if value == "1":
        return ""
    return (
        f"{MAP_HBM} is {value!r} here: device memory has no address and can't be registered; set it to 1 before the "
        "Neuron runtime is initialised"
    )


def visible_cores() -> list[int]:
    """The machine's numbers of the cores that this process sees, if the environment says: "0,4-6" names four."""
    cores: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", os.environ.get(VISIBLE_CORES, "")):
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def devices(folder: Path) -> int:
    """How many Neuron devices this machine, or container, has: ``/dev/neuron0`` and so on."""
    return sum(1 for path in folder.glob("neuron*") if path.name.removeprefix("neuron").isdigit())
