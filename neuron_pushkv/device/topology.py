"""Which network cards are nearest to a device. Pure reading of sysfs, whose root is an argument.

In that order: what the device's runtime says, the published table of the instance's family, the distance over PCI,
all. Names are those of the cards' devices under ``infiniband`` ("rdmap201s0"), which libfabric's names of EFA's domains
begin with. An empty tuple says that any card will do. None of this has run on such an instance: the tests build trees
like theirs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

AMAZON = "0x1d0f"
NVIDIA = "0x10de"
NEURON_DEVICES = ("0x7164", "0x7264", "0x7364", "0x7564", "0x7565")
"""PCI devices of Amazon's: Trainium 1, Inferentia 2, Trainium 2, Trainium 3 (NIXL's libfabric_topology.cpp)."""
CORES_PER_DEVICE = 8
"""Physical cores on a Trainium 2."""

SYS = Path("/sys")

FAMILIES = {
    "trn2e": "trn2",
    "trn2u": "trn2",
    "trn3p": "trn3",
    "trn3pd98": "trn3",
    "trn3s": "trn3",
    "trn3-dev0": "trn3pds",
    "trn3-dev1": "trn3pds",
}
"""Families that have another's table."""

TABLES = {
    "trn1": "10:1a.0 10:1a.0 a0:1a.0 a0:1a.0 20:19.0 20:19.0 90:19.0 90:19.0 "
    "20:1a.0 20:1a.0 90:1a.0 90:1a.0 10:19.0 10:19.0 a0:19.0 a0:19.0",
    "trn1n": "10:17.0 10:1a.0 a0:17.0 a0:1a.0 20:19.0 20:18.0 90:19.0 90:18.0 "
    "20:17.0 20:1a.0 90:17.0 90:1a.0 10:19.0 10:18.0 a0:19.0 a0:18.0",
    "trn2": "c9:00.0 b4:00.0 b3:00.0 ca:00.0 6c:00.0 57:00.0 56:00.0 6d:00.0 "
    "98:00.0 83:00.0 82:00.0 99:00.0 f5:00.0 e0:00.0 df:00.0 f6:00.0",
    "trn3": "be:00.0 a9:00.0 a8:00.0 bf:00.0 61:00.0 4c:00.0 4b:00.0 62:00.0 "
    "8d:00.0 78:00.0 77:00.0 8e:00.0 ea:00.0 d5:00.0 d4:00.0 eb:00.0",
    "trn3pds": "a9:00.0 a8:00.0 bf:00.0 be:00.0 d5:00.0 d4:00.0 eb:00.0 ea:00.0 "
    "4c:00.0 4b:00.0 62:00.0 61:00.0 78:00.0 77:00.0 8e:00.0 8d:00.0",
}
"""Address on PCI (domain 0) of each Neuron device's card, by the number that the host knows the device by.

From aws-neuron/connected-device-maps-over-efa-for-neuron, ``lookup/neuron``.
"""

CARDS_PER_GPU = {"p5": 4, "p5e": 4, "p5en": 2, "p6-b200": 1, "p6-b300": 2}
"""Cards of each GPU; where more than that are equally near, the GPUs that share them take them in turn."""


@dataclass(frozen=True)
class Function:
    """One function of a device on PCI. ``path`` is its place in the tree of bridges."""

    bdf: str
    path: tuple[str, ...]
    node: str
    """Of memory (NUMA), as sysfs has it."""


def instance_family(sys: Path = SYS) -> str | None:
    """As "trn2" on a trn2.48xlarge; ``None`` on what is no instance of EC2."""
    product = _text(sys / "devices/virtual/dmi/id/product_name")
    found = re.fullmatch(r"([a-z][a-z0-9-]*\d[a-z0-9-]*)\.[a-z0-9-]+", product)
    return found[1] if found else None


def neuron_device_of(core: int, cores_per_logical: int) -> int:
    """The Trainium 2 device that a logical core is on, where ``cores_per_logical`` cores make one (LNC)."""
    return core * cores_per_logical // CORES_PER_DEVICE


def efa_nics(sys: Path = SYS) -> tuple[str, ...]:
    """All cards of EFA, in the order of their addresses."""
    return tuple(name for function in _functions(sys) if (name := _efa(function, sys)) is not None)


def neuron_nics(device_index: int, attached_bdf: str | None, family: str | None, *, sys: Path = SYS) -> tuple[str, ...]:
    """For the Neuron device that the host knows by that index. ``attached_bdf``: what the runtime says, if it does."""
    if attached_bdf is not None and (name := _efa(_function(_normal(attached_bdf), sys), sys)) is not None:
        return (name,)
    table = TABLES.get(FAMILIES.get(family or "", family or ""), "").split()
    if 0 <= device_index < len(table):
        name = _efa(_function(_normal(table[device_index]), sys), sys)
        if name is not None:
            return (name,)
    # Nothing in sysfs says which of several devices has which number.
    devices = [function for function in _functions(sys) if _is_neuron(function.bdf, sys)]
    return _nearest(devices[0], sys) if len(devices) == 1 else ()


def cuda_nics(bus_id: str, index: int, family: str | None, *, sys: Path = SYS) -> tuple[str, ...]:
    """For the GPU at ``bus_id``. ``index`` is its number on this machine, used where sysfs doesn't show its fellows."""
    gpu = _function(_normal(bus_id), sys)
    if gpu is None:
        return ()
    nearest = _nearest(gpu, sys)
    wanted = CARDS_PER_GPU.get(family or "")
    if wanted is None:
        return nearest
    if len(nearest) <= wanted:
        return _nearest(gpu, sys, wanted)
    fellows = [other.bdf for other in _functions(sys) if _is_gpu(other.bdf, sys) and _nearest(other, sys) == nearest]
    place = fellows.index(gpu.bdf) if gpu.bdf in fellows and len(fellows) > 1 else index
    first = place % (len(nearest) // wanted) * wanted
    return nearest[first : first + wanted]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _normal(bdf: str) -> str:
    """As sysfs writes it: NVIDIA's libraries give the domain 8 digits, tables none."""
    found = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", bdf.strip().lower())
    return f"{int(found[1] or '0', 16):04x}:{found[2]}" if found else "none"


def _function(bdf: str, sys: Path) -> Function | None:
    place = sys / "bus/pci/devices" / bdf
    if not place.exists():
        return None
    path = place.resolve().relative_to(sys.resolve())
    return Function(bdf, path.parts, _text(place / "numa_node"))


def _functions(sys: Path) -> list[Function]:
    folder = sys / "bus/pci/devices"
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [function for name in names if (function := _function(name, sys)) is not None]


def _ids(bdf: str, sys: Path) -> tuple[str, str]:
    place = sys / "bus/pci/devices" / bdf
    return _text(place / "vendor"), _text(place / "device")


def _is_neuron(bdf: str, sys: Path) -> bool:
    vendor, device = _ids(bdf, sys)
    return vendor == AMAZON and device in NEURON_DEVICES


def _is_gpu(bdf: str, sys: Path) -> bool:
    """A display or 3D controller of NVIDIA's."""
    return _ids(bdf, sys)[0] == NVIDIA and _text(sys / "bus/pci/devices" / bdf / "class").startswith("0x03")


def _efa(function: Function | None, sys: Path) -> str | None:
    """The card's name, if it is one of EFA's and has a driver."""
    if function is None or _ids(function.bdf, sys)[0] != AMAZON:
        return None
    folder = sys / "bus/pci/devices" / function.bdf / "infiniband"
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return names[0] if names else None


def distance(one: Function, other: Function) -> tuple[bool, int]:
    """Whether they are on unlike nodes of memory, and steps from one to the other in the tree of bridges."""
    common = 0
    for ours, theirs in zip(one.path, other.path, strict=False):
        if ours != theirs:
            break
        common += 1
    return one.node != other.node, len(one.path) + len(other.path) - 2 * common


def _nearest(device: Function, sys: Path, count: int = 0) -> tuple[str, ...]:
    """The cards that are equally near and nearest; or the ``count`` nearest. In the order of their addresses."""
    cards = sorted(
        (distance(device, function), function.bdf, name)
        for function in _functions(sys)
        if (name := _efa(function, sys)) is not None
    )
    if count:
        return tuple(name for _, _, name in cards[:count])
    return tuple(name for far, _, name in cards if far == cards[0][0])
