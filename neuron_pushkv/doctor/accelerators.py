"""Checks of the device: its runtime, and whether its memory can be shown to the network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from neuron_pushkv.device import accelerator_for
from neuron_pushkv.device.base import Accelerator, Memory
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.doctor.findings import Finding, Id, Level, failed, fine, warning
from neuron_pushkv.doctor.machine import Machine
from neuron_pushkv.errors import DeviceError

NEURON_CORES = "NEURON_RT_VISIBLE_CORES"
LEAST_BYTES = 64 << 20
"""Of the memory that is tried out; more where a device's slabs are larger."""


@runtime_checkable
class Tells(Protocol):
    """An accelerator that says what its runtime is. Optional: host memory has nothing to say."""

    def facts(self) -> Any:
        """A dataclass, or a mapping of names to plain values."""


@dataclasses.dataclass
class Device:
    """An accelerator and some of its memory. ``findings`` say what became of them; host memory is the last resort."""

    accelerator: Accelerator
    memory: Memory
    findings: list[Finding]

    def close(self) -> None:
        """Gives the memory back."""
        self.accelerator.free(self.memory)
        self.accelerator.close()


def facts(accelerator: Accelerator) -> dict[str, Any]:
    """What the accelerator's runtime says of itself, if it says anything."""
    if not isinstance(accelerator, Tells):
        return {}
    told = accelerator.facts()
    return dict(told) if isinstance(told, Mapping) else dataclasses.asdict(told)


def one_core(device: str, place: int, cores: tuple[int, ...]) -> None:
    """Have this process take one Neuron core of those it might, the ``place``-th: a core belongs to one process."""
    if device == "neuron":
        seen = cores or (0, 1)
        os.environ[NEURON_CORES] = str(seen[min(place, len(seen) - 1)])


def open_device(machine: Machine, device: str, length: int | None = None) -> Device:
    """Take the first device of that type, and ``length`` bytes of its memory. Never raises: see ``findings``."""
    present = machine.accelerators()
    about: dict[str, Any] = {"device": device, "present": {kind: len(names) for kind, names in present.items()}}
    host = HostAccelerator()
    try:
        accelerator = accelerator_for(device, -1 if device == "cpu" else 0)
        about["facts"] = told = facts(accelerator)
    except DeviceError as failure:
        fix = "on a machine without that device, use --device cpu"
        found = failed(Id.ACCELERATOR_RUNTIME, failure, fix, **about)
        return Device(host, host.allocate(length or LEAST_BYTES), [found])
    name = f"{device} {told['version']}" if told.get("version") else device
    findings = [fine(Id.ACCELERATOR_RUNTIME, f"the runtime of {name} is up", **about)]
    if device == "cpu":
        findings = [fine(Id.ACCELERATOR_RUNTIME, "KV lies in host memory", **about)]
    elif accelerator.hint:
        fix = "put that in order, or registering device memory fails"
        wrong = failed(Id.ACCELERATOR_RUNTIME, accelerator.hint, fix, **about)
        findings = [dataclasses.replace(wrong, level=Level.WARNING)]
    try:
        memory = accelerator.allocate(length or max(LEAST_BYTES, accelerator.slab_bytes))
    except DeviceError as failure:
        accelerator.close()
        findings.append(failed(Id.ACCELERATOR_MEMORY, failure, "end what else uses the device"))
        return Device(host, host.allocate(length or LEAST_BYTES), findings)
    found = mapping(accelerator, memory)
    if not memory.mapped:
        accelerator.free(memory)
        accelerator.close()
        return Device(host, host.allocate(length or LEAST_BYTES), [*findings, found])
    return Device(accelerator, memory, [*findings, found])


def mapping(accelerator: Accelerator, memory: Memory) -> Finding:
    """Whether the network can be shown that memory, and how."""
    about: dict[str, Any] = {"bytes": memory.length, "kind": memory.kind, "mapped": memory.mapped}
    if accelerator.name == "cpu":
        return fine(Id.ACCELERATOR_MEMORY, f"{memory.length >> 20} MiB of host memory", **about)
    if not memory.mapped:
        return warning(
            Id.ACCELERATOR_MEMORY,
            "device memory has no address here, so all KV goes through host memory",
            "set NEURON_RT_MAP_HBM=1 before the runtime is initialised",
            **about,
        )
    try:
        exported = accelerator.export(memory)
    except DeviceError as failure:
        fix = "install a newer runtime; meanwhile cards map device memory by the peer-memory path, if at all"
        return warning(Id.ACCELERATOR_MEMORY, str(failure), fix, **about)
    if exported is not None:
        os.close(exported.fd)
    how = "as a dmabuf" if exported is not None else "not as a dmabuf: cards map it by the peer-memory path, if at all"
    return fine(
        Id.ACCELERATOR_MEMORY, f"device memory is mapped, and exported {how}", dmabuf=exported is not None, **about
    )
