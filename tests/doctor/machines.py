"""Machines made of files."""

from __future__ import annotations

from pathlib import Path

from neuron_pushkv.doctor.machine import Machine


def machine(root: Path, *, devices: str = "", locked: int | None = None, huge: int = 0, **environment: str) -> Machine:
    """``devices``: what is in ``/dev``, by its path there."""
    for device in devices.split():
        path = root / "dev" / device
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "proc").mkdir(parents=True, exist_ok=True)
    pages = f"MemTotal: 1 kB\nHugePages_Total:   {huge}\nHugePages_Free:    {huge}\nHugepagesize:   2048 kB\n"
    (root / "proc/meminfo").write_text(pages)
    return Machine(root, environment, locked)


def instance(root: Path, kind: str) -> None:
    """Make it an instance of EC2, like ``trn2.48xlarge``."""
    path = root / "sys/devices/virtual/dmi/id/product_name"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(kind + "\n")


def card(root: Path, name: str, bdf: str, bridge: str = "0000:c0:00.0", node: int = 0) -> None:
    """An EFA card below a bridge."""
    home = root / "sys/devices/pci0000:c0" / bridge / bdf
    (home / "infiniband" / name).mkdir(parents=True)
    for file, text in {"vendor": "0x1d0f", "device": "0xefa2", "class": "0x020000", "numa_node": str(node)}.items():
        (home / file).write_text(text + "\n")
    for link in (root / "sys/bus/pci/devices" / bdf, root / "sys/class/infiniband" / name / "device"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(home)
