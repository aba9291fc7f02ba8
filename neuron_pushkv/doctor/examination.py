"""All checks of one node, in the order in which things must happen: environment, device, libfabric, peers."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from neuron_pushkv.config import ConnectorSettings, FleetSettings
from neuron_pushkv.doctor import configuration, environment, host, network
from neuron_pushkv.doctor.accelerators import NEURON_CORES, Device, one_core, open_device
from neuron_pushkv.doctor.findings import Finding, Id, Level, error, failed, fine
from neuron_pushkv.doctor.line import call, ours
from neuron_pushkv.doctor.machine import Machine
from neuron_pushkv.doctor.peer import Place, ranks, visit
from neuron_pushkv.doctor.side import Side
from neuron_pushkv.doctor.trial import Trial
from neuron_pushkv.doctor.worth import worth
from neuron_pushkv.errors import ConfigError, PushKVError
from neuron_pushkv.peers.handler import DOCTOR
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.choosing import wants_nixl
from neuron_pushkv.wire import Identity

START_SECONDS = 60.0
"""The longest that the other end on this machine may take to start: device runtimes are slow to come up."""
END_SECONDS = 10.0
"""The longest that it may take to end."""
NIXL_LIBFABRIC = "LIBFABRIC"
"""Name of NIXL's plugin that uses libfabric."""


@dataclass(frozen=True)
class Patient:
    """What is examined: an engine's settings, on a machine. ``fleet``: where they come from a fleet file.

    ``name`` is the engine's, ``device`` torch's name of its device type.
    """

    settings: ConnectorSettings
    machine: Machine
    device: str
    fleet: FleetSettings | None = None
    name: str = ""

    @property
    def cores(self) -> tuple[int, ...]:
        """Neuron cores that it may use."""
        return configuration.neuron_cores(self.machine.environment)


def patient(fleet: FleetSettings | None, name: str | None, settings: ConnectorSettings, device: str | None) -> Patient:
    """The engine of that name, or the fleet's first that pushes; with what its process will have as environment.

    Raises :class:`ConfigError` if there is none.
    """
    machine = Machine()
    if fleet is not None:
        pushing = [engine for engine in fleet.engines if engine.connector is not None]
        chosen = [engine for engine in pushing if name in (None, engine.name)]
        if not chosen or chosen[0].connector is None:
            known = ", ".join(engine.name for engine in pushing) or "none"
            raise ConfigError(f"the fleet has no engine {name or 'with a connector'}; engines with one: {known}")
        engine, settings = chosen[0], chosen[0].connector
        name = engine.name
        machine = replace(machine, environment={**os.environ, **fleet.environment, **engine.environment})
    return Patient(settings, machine, device or machine.device_type(), fleet, name or "")


def static(who: Patient) -> Iterator[Finding]:
    """What can be known without opening anything."""
    machine, settings, device = who.machine, who.settings, who.device
    if who.fleet is not None:
        yield from configuration.engines(who.fleet, os.environ)
    else:
        yield configuration.key(settings)
        yield configuration.deadlines(settings)
    yield host.vllm(needed=who.fleet is not None)
    yield host.connector(machine)
    yield from at_start(machine, settings, device)
    yield _of_libfabric(host.hugepages(machine, settings.provider), settings, device)


def at_start(machine: Machine, settings: ConnectorSettings, device: str) -> Iterator[Finding]:
    """The part of it that an engine asks for itself whenever it starts."""
    yield environment.accelerator(machine.environment, device)
    yield _of_libfabric(environment.fabric(machine.environment, settings, device), settings, device)
    yield _of_libfabric(environment.shm(machine.environment, settings, device), settings, device)
    yield _of_libfabric(host.memlock(machine, settings.provider), settings, device)
    yield _of_libfabric(host.infiniband(machine, settings.provider), settings, device)


def _of_libfabric(finding: Finding, settings: ConnectorSettings, device: str) -> Finding:
    """What ``finding`` says of libfabric's ways, as far as it matters to what moves KV.

    NIXL chooses the network by itself. Its backend LIBFABRIC may meet the same, but may do without the provider that
    is named: so it is warned, and no engine is ended.
    """
    if finding.level is Level.OK or not wants_nixl(settings, device):
        return finding
    if settings.nixl_backend == NIXL_LIBFABRIC:
        return replace(finding, level=Level.WARNING)
    what = f"KV goes through NIXL's backend {settings.nixl_backend}, which doesn't use our libfabric"
    return fine(finding.id, what, **finding.evidence)


def apply_environment(who: Patient, place: int) -> None:
    """What libraries read from the process's environment becomes what the engine's will be. Before any is loaded."""
    prefixes = ("FI_", "RDMAV_", "NEURON_")
    wanted = {name: value for name, value in who.machine.environment.items() if name.startswith(prefixes)}
    os.environ.update(wanted)
    one_core(who.device, place, who.cores)


@contextmanager
def opened(who: Patient) -> Iterator[tuple[Device, Transport | None, list[Finding]]]:
    """Device and network of that engine, as far as they can be had."""
    device = open_device(who.machine, who.device)
    transport, findings = network.open_network(who.settings, device.accelerator, [device.memory])
    try:
        if transport is not None:
            accelerator, found = device.accelerator, transport.provider
            near = accelerator.nics(device.memory) if found.startswith("efa") else ()
            findings.append(network.rails(found, network.cards(transport), near, accelerator.name, who.machine))
        yield device, transport, device.findings + findings
    finally:
        if transport is not None:
            transport.close()
        device.close()


def examine(who: Patient, peers: Sequence[Place]) -> Iterator[Finding]:
    """All of it. Without peers the transfer is tried with another process on this machine."""
    yield from static(who)
    apply_environment(who, 0)
    local = yield from _ports(who)
    with opened(who) as (device, transport, findings):
        yield from findings
        if transport is None:
            for place in peers:
                yield from visit(place, who.settings, None, local).findings
            return
        try:
            side = Side(transport, device)
        except PushKVError as failure:
            fix = "see accelerator.memory, host.memlock and fabric.library"
            yield failed(Id.ACCELERATOR_MEMORY, failure, fix)
            return
        try:
            for place in peers:
                seen = visit(place, who.settings, transport, local)
                yield from seen.findings
                if seen.status is not None and not seen.status.ranks:
                    yield from _try_out(who, place, transport, side)
            if not peers:
                yield from _with_ourselves(who, device.accelerator.name, transport, side)
        finally:
            side.close()


def _ports(who: Patient) -> Generator[Finding, None, Identity | None]:
    """Ports that must be free, unless the engine runs: then it is asked for a rank, which is returned."""
    local: Identity | None = None
    settings = who.settings
    listeners = [(f"the connector{' of ' + who.name if who.name else ''}", settings.host, settings.port)]
    for engine in who.fleet.engines if who.fleet else ():
        listeners.append((f"engine {engine.name}", engine.host, engine.port))
        if engine.connector is not None and engine.connector is not settings:
            listeners.append((f"the connector of {engine.name}", engine.connector.host, engine.connector.port))
    if who.fleet is not None and who.fleet.router is not None:
        listeners.append(("the router", who.fleet.router.host, who.fleet.router.port))
    running = False
    for what, address, port in listeners:
        found = host.port(what, address, port)
        if found.level is not Level.OK and (address, port) == (settings.host, settings.port):
            identities, asked = ranks(Place(address, port), ours(settings.key()), settings.connect_seconds)
            if asked.level is Level.OK:
                local, running = next(iter(identities), None), True
        if found.level is not Level.OK and running:
            found = fine(Id.HOST_PORTS, f"{what} runs at {address}:{port}", place=f"{address}:{port}")
        yield found
    return local


def _try_out(who: Patient, place: Place, transport: Transport, side: Side) -> Iterator[Finding]:
    try:
        line, _ = call(place.host, place.port, DOCTOR, ours(who.settings.key()), who.settings.connect_seconds)
    except (OSError, EOFError, PushKVError) as failure:
        yield error(Id.TRANSFER_BYTES, f"the doctor at {place} can't be asked for a transfer: {failure}", "try again")
        return
    bandwidth = 0.0
    with line:
        for finding in Trial(line, transport, side, who.machine).findings():
            yield finding
            if finding.id is Id.TRANSFER_BANDWIDTH:
                bandwidth = min(finding.evidence["out_bytes_per_second"], finding.evidence["in_bytes_per_second"])
    if bandwidth and who.fleet is not None:
        yield worth(who.fleet, bandwidth)


def _with_ourselves(who: Patient, kind: str, transport: Transport, side: Side) -> Iterator[Finding]:
    """A transfer with a process of the same settings, over the same network. ``kind``: of our side's memory."""
    # Where there is one core there is none for the other end, whose memory is the host's then.
    device = "cpu" if kind == "neuron" and len(who.cores) == 1 else kind
    command = [sys.executable, "-m", "neuron_pushkv.doctor.opposite", device]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(who)
    ) as child:
        try:
            said = _begin(child, who.settings)
            if not said.isdecimal():
                fix = "see the other findings; this is about a second process with the same settings"
                yield error(Id.TRANSFER_BYTES, f"the other end on this machine can't start: {said or 'no word'}", fix)
                return
            yield from _try_out(who, Place(who.settings.host, int(said)), transport, side)
        finally:
            # It reads the end of the pipe; what hangs in a device's runtime doesn't.
            with suppress(OSError, subprocess.TimeoutExpired):
                child.communicate(timeout=END_SECONDS)
            child.kill()


def _environment(who: Patient) -> dict[str, str]:
    """What the other end begins with: as we did, before :func:`apply_environment` left us one core."""
    ours = {name: value for name, value in os.environ.items() if name != NEURON_CORES}
    return {**ours, **who.machine.environment}


def _begin(child: subprocess.Popen[str], settings: ConnectorSettings) -> str:
    """Tell the other end its settings; returns its port, or why there is none."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(OSError):  # It has ended before it could read; then it says nothing either.
        child.stdin.write(settings.model_dump_json(exclude_unset=True) + "\n")
        child.stdin.flush()
    ready, _, _ = select.select([child.stdout], [], [], START_SECONDS)
    return child.stdout.readline().strip() if ready else f"nothing was heard of it within {START_SECONDS:g} s"
