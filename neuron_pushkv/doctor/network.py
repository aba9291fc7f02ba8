"""Checks of libfabric: which one, which provider it ends up with, and over which cards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device import topology
from neuron_pushkv.device.base import Accelerator, Memory
from neuron_pushkv.doctor.findings import Finding, Id, error, failed, fine, warning
from neuron_pushkv.doctor.machine import Machine
from neuron_pushkv.errors import DeviceError, FabricError, ProviderMismatch
from neuron_pushkv.fabric.discovery import HOW_TO_GET_ONE
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.choosing import open_transport
from neuron_pushkv.transport.fabric import OVER_RXM, FabricTransport

DMABUF_VERSION = (1, 20)
"""libfabric that takes device memory as dmabuf (``fi_mr_dmabuf``)."""


def open_network(
    settings: ConnectorSettings, accelerator: Accelerator, memory: Sequence[Memory]
) -> tuple[Transport | None, list[Finding]]:
    """Open what the settings ask for; no transport if that can't be."""
    try:
        transport = open_transport(settings, accelerator, memory)
    except ProviderMismatch as failure:
        fix = "set 'provider' to what there is, or install what that one needs"
        return None, [failed(Id.FABRIC_PROVIDER, failure, fix, asked=settings.provider)]
    except FabricError as failure:
        return None, [failed(Id.FABRIC_LIBRARY, failure, HOW_TO_GET_ONE, asked=settings.provider)]
    except DeviceError as failure:
        return None, [failed(Id.FABRIC_RAILS, failure, "see accelerator.runtime", asked=settings.provider)]
    return transport, [library(transport, accelerator.name), provider(settings.provider, transport.provider)]


def library(transport: Transport, device: str) -> Finding:
    """Which library does the work."""
    if not isinstance(transport, FabricTransport):
        return fine(Id.FABRIC_LIBRARY, transport.library)
    facts = transport.core.facts
    return libfabric(facts.version, facts.library, transport.provider, device)


def libfabric(version: str, path: str, found: str, device: str) -> Finding:
    """Whether that libfabric is good enough for the provider that was ``found``, and the device."""
    about = {"version": version, "path": path}
    what = f"libfabric {version} at {path}"
    if device != "cpu" and tuple(map(int, version.split("."))) < DMABUF_VERSION:
        what += " can't take device memory as a dmabuf"
        return warning(Id.FABRIC_LIBRARY, what, "install EFA's software, which brings its own libfabric", **about)
    if found == OVER_RXM:
        what += " can end the process when a peer dies in the middle of a write over tcp"
        fix = "use libfabric 2.x: the Python package 'mpich' carries one"
        return warning(Id.FABRIC_LIBRARY, what, fix, **about)
    return fine(Id.FABRIC_LIBRARY, what, **about)


def provider(asked: str, found: str) -> Finding:
    """Whether what was opened is what was asked for. Falling back to tcp unseen costs an order of magnitude."""
    about = {"asked": asked, "found": found}
    if found.startswith("nixl/"):
        if not asked.startswith("efa"):
            return fine(Id.FABRIC_PROVIDER, f"{found}; NIXL chooses the network by itself", **about)
        what = f"KV goes through {found}, which doesn't tell whether it uses EFA or has fallen back to TCP"
        return warning(Id.FABRIC_PROVIDER, what, "set 'transport' to 'fabric', or watch the cards' counters", **about)
    # libfabric 1.x names what it layers: "tcp;ofi_rxm".
    if found.split(";", maxsplit=1)[0] != asked:
        what = f"provider '{asked}' was asked for, and libfabric has fallen back to '{found}'"
        return error(Id.FABRIC_PROVIDER, what, f"set 'provider' to '{found}' if that is what you want", **about)
    return fine(Id.FABRIC_PROVIDER, f"provider '{found}', as asked for", **about)


def rails(found: str, used: Sequence[str], near: Sequence[str], device: str, machine: Machine) -> Finding:
    """The cards that are ``used`` by provider ``found``, and whether they are ``near``: those the accelerator names."""
    about: dict[str, Any] = {
        "rails": list(used),
        "nearest": list(near),
        "family": machine.family(),
        "places": {name: _place(name, machine.sys) for name in used},
    }
    if not found.startswith("efa"):
        return fine(Id.FABRIC_RAILS, f"one rail, over {', '.join(used) or found}", **about)
    # libfabric's names of EFA's domains are those of the cards, with "-rdm" or "-dgrm" behind.
    names = {name.split("-")[0] for name in used}
    if near and not names <= set(near):
        what = f"KV goes over {', '.join(sorted(names - set(near)))}, which are not the cards nearest to the device"
        return warning(Id.FABRIC_RAILS, what, "unset FI_EFA_IFACE, or attach all of the instance's EFA cards", **about)
    if device != "cpu" and not near and len(topology.efa_nics(machine.sys)) > 1:
        what = f"nothing tells which cards are nearest to the device, so all {len(used)} are used"
        return warning(
            Id.FABRIC_RAILS, what, "attach all of the instance's EFA cards, and show containers /sys", **about
        )
    return fine(Id.FABRIC_RAILS, f"{len(used)} rails, over {', '.join(used)}", **about)


def cards(transport: Transport) -> list[str]:
    """The network card of each rail, where the transport can tell."""
    return list(transport.core.facts.nics) if isinstance(transport, FabricTransport) else []


def _place(domain: str, sys: Path) -> dict[str, Any]:
    """Where a card is on PCI: its address, its node of memory, and the bridges above it."""
    device = sys / "class/infiniband" / domain.split("-", maxsplit=1)[0] / "device"
    if not device.exists():
        return {}
    path = device.resolve()
    node = path / "numa_node"
    above = [part.name for part in path.parents if part.name.count(":") == 2]
    return {"bdf": path.name, "node": node.read_text().strip() if node.is_file() else "", "bridges": above[::-1]}
