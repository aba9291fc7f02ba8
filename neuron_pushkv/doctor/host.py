"""Checks of the machine: what can be read from files, limits and package metadata."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from importlib.metadata import entry_points
from pathlib import Path

from neuron_pushkv import versions
from neuron_pushkv.doctor.findings import Finding, Id, error, fine, warning
from neuron_pushkv.doctor.machine import Machine

GIB = 1 << 30
LEAST_LOCKED = 64 << 20
"""Bytes that even an engine with its KV in device memory pins of the host's: staging, and libfabric's own buffers."""
OLDEST_VLLM = (0, 24)
NEWEST_VLLM = (0, 32)
"""Range of releases that the connector is held to by its tests (``connector/compat.py``)."""
PLUGIN = "pushkv"
CONNECTOR_MODULE = "neuron_pushkv.connector.connector"


def infiniband(machine: Machine, provider: str) -> Finding:
    """Whether a process here can open EFA's devices."""
    found = machine.devices("infiniband/uverbs*")
    if not provider.startswith("efa"):
        return fine(Id.HOST_INFINIBAND, f"provider {provider} needs no /dev/infiniband", devices=found)
    if not found:
        return error(
            Id.HOST_INFINIBAND,
            "there is no /dev/infiniband/uverbs*: this machine shows no EFA device",
            "attach network interfaces of type EFA and load the efa driver; give containers /dev/infiniband",
            devices=found,
        )
    shut = [name for name in found if not os.access(machine.root / "dev/infiniband" / name, os.R_OK | os.W_OK)]
    if shut:
        # Others may be what this engine uses: a container may be given a few of the machine's cards.
        return (error if len(shut) == len(found) else warning)(
            Id.HOST_INFINIBAND,
            f"{', '.join(shut)} of the {len(found)} devices in /dev/infiniband can't be opened by this user",
            "correct their permissions (0666 with EFA's own udev rules)",
            devices=found,
            shut=shut,
        )
    return fine(Id.HOST_INFINIBAND, f"{len(found)} devices in /dev/infiniband", devices=found)


def memlock(machine: Machine, provider: str) -> Finding:
    """Whether as much memory can be pinned as a KV cache takes."""
    locked = machine.locked_bytes
    if not provider.startswith("efa"):
        return fine(Id.HOST_MEMLOCK, f"provider {provider} pins no memory", bytes=locked)
    if locked is None:
        return fine(Id.HOST_MEMLOCK, "any amount of memory can be pinned", bytes=locked)
    what = f"only {locked / GIB:.3g} GiB of memory can be pinned (RLIMIT_MEMLOCK), and what is registered is pinned"
    fix = "set it to unlimited: in limits.conf, LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for Docker"
    return (error if locked < LEAST_LOCKED else warning)(Id.HOST_MEMLOCK, what, fix, bytes=locked)


def hugepages(machine: Machine, provider: str) -> Finding:
    """Whether there are large pages for the buffers of libfabric's EFA provider."""
    counts = {}
    for line in machine.lines("proc/meminfo"):
        if found := re.fullmatch(r"(HugePages_Total|HugePages_Free|Hugepagesize):\s+(\d+).*", line):
            counts[found[1]] = int(found[2])
    if provider.startswith("efa") and not counts.get("HugePages_Free"):
        return warning(
            Id.HOST_HUGEPAGES,
            "no huge page is free, so EFA's own buffers lie in small ones",
            "set vm.nr_hugepages as EFA's installer does, and give containers hugepages-2Mi",
            **counts,
        )
    return fine(Id.HOST_HUGEPAGES, f"{counts.get('HugePages_Free', 0)} huge pages are free", **counts)


def why_taken(host: str, port: int) -> str:
    """Why nobody could listen there now, or ""."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as failure:
        number = failure.errno or 0
        return (os.strerror(number) if number > 0 else str(failure.strerror)).lower()  # a resolver's numbers: its own
    return ""


def port(what: str, host: str, number: int) -> Finding:
    """Whether ``what`` could listen there."""
    why = why_taken(host, number)
    place = f"{host}:{number}"
    if why:
        fix = "end what uses it, or set another port"
        return error(Id.HOST_PORTS, f"{what} can't listen on {place} ({why})", fix, place=place)
    return fine(Id.HOST_PORTS, f"{what} can listen on {place}", place=place)


def vllm(needed: bool) -> Finding:
    """Which vLLM an engine would be. ``needed``: engines are to run here."""
    distribution, version = versions.vllm()
    if not version or importlib.util.find_spec("vllm") is None:
        what, fix = "vLLM is not installed here", "install it into this environment, if engines are to run here"
        return (error if needed else warning)(Id.HOST_VLLM, what, fix)
    about = {"distribution": distribution, "version": version}
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    span = ".".join(map(str, OLDEST_VLLM)), ".".join(map(str, NEWEST_VLLM))
    if numbers < OLDEST_VLLM:
        fix = f"install one between {span[0]} and {span[1]}"
        return error(Id.HOST_VLLM, f"vLLM {version} is too old for PushKVConnector", fix, **about)
    if numbers > NEWEST_VLLM:
        what = f"vLLM {version} is newer than any that PushKVConnector was tested with"
        return warning(Id.HOST_VLLM, what, f"try it out first, or use {span[1]}", **about)
    return fine(Id.HOST_VLLM, f"vLLM {version} ({distribution})", **about)


def connector(machine: Machine) -> Finding:
    """Whether vLLM will find ``PushKVConnector``."""
    entries = entry_points(group="vllm.general_plugins", name=PLUGIN)
    allowed = machine.environment.get("VLLM_PLUGINS")
    about = {"module": CONNECTOR_MODULE, "VLLM_PLUGINS": allowed}
    by_path = f'set "kv_connector_module_path": "{CONNECTOR_MODULE}" in --kv-transfer-config'
    if not entries:
        what = "vLLM will not find PushKVConnector by its name: this package is not installed in this environment"
        return warning(Id.HOST_CONNECTOR, what, f"install it with pip, or {by_path}", **about)
    if allowed is not None and PLUGIN not in allowed.split(","):
        what = f"VLLM_PLUGINS is '{allowed}', which leaves PushKVConnector out"
        return warning(Id.HOST_CONNECTOR, what, f"add '{PLUGIN}' to it, or {by_path}", **about)
    package = importlib.util.find_spec("vllm")
    if package is not None and package.origin is not None:
        interface = Path(package.origin).parent / "distributed/kv_transfer/kv_connector/v1/base.py"
        if not interface.is_file():
            what = "this vLLM has no connector interface of version 1, which PushKVConnector is made for"
            return error(Id.HOST_CONNECTOR, what, "install a vLLM that has", **about)
    return fine(Id.HOST_CONNECTOR, "vLLM finds PushKVConnector by its name", **about)
