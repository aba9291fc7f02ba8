"""Checks of the settings themselves."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping

from neuron_pushkv.config import FLEET_KEY_VARIABLE, ConnectorSettings, EngineSettings, FleetSettings, is_loopback
from neuron_pushkv.doctor.findings import Finding, Id, error, failed, fine, warning
from neuron_pushkv.errors import ConfigError

LEAST_KEY_BYTES = 16
LEAST_QUARANTINE = 1.0
"""Seconds. A card may be busy with a packet that has arrived for far less; but no figure is published."""


def key(settings: ConnectorSettings) -> Finding:
    """Whether there is a fleet key where one is needed, and whether it is worth its name."""
    try:
        found = settings.key()
    except ConfigError as failure:
        return failed(Id.SECURITY_KEY, failure, "put the fleet's shared secret there, readable for this user")
    file = settings.fleet_key_file
    source = "fleet_key_file" if file else "fleet_key" if settings.fleet_key else FLEET_KEY_VARIABLE
    if found is None:
        # ConnectorSettings has refused other hosts without a key.
        return fine(Id.SECURITY_KEY, f"no fleet key, which is enough for host {settings.host}", host=settings.host)
    if file and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return warning(Id.SECURITY_KEY, f"fleet_key_file {file} can be read by others", f"chmod 600 {file}")
    if len(found) < LEAST_KEY_BYTES and not is_loopback(settings.host):
        return warning(
            Id.SECURITY_KEY,
            f"the fleet key has {len(found)} bytes, which can be guessed",
            "make one of 32 random bytes: head -c 32 /dev/urandom | base64",
        )
    return fine(Id.SECURITY_KEY, f"a fleet key from {source}", source=source)


def deadlines(settings: ConnectorSettings) -> Finding:
    """Whether the times fit each other."""
    reach = settings.connect_seconds + settings.unreachable_seconds
    times = {
        name: getattr(settings, name)
        for name in ("keep_unclaimed_seconds", "connect_seconds", "unreachable_seconds", "no_progress_seconds")
    }
    if settings.keep_unclaimed_seconds < 2 * reach:
        return warning(
            Id.CONFIG_DEADLINES,
            f"keep_unclaimed_seconds is {settings.keep_unclaimed_seconds:g}: finished KV may be let go before a "
            f"receiver has tried twice to reach it ({2 * reach:g} s)",
            f"set it to more than {2 * reach:g}",
            **times,
        )
    if settings.no_progress_seconds < settings.unknown_source_seconds:
        return warning(
            Id.CONFIG_DEADLINES,
            f"no_progress_seconds ({settings.no_progress_seconds:g}) is shorter than unknown_source_seconds "
            f"({settings.unknown_source_seconds:g}): a sender that has the prompt is given less time than one that "
            "has not",
            "set it to the longest that a prompt may be queued and computed",
            **times,
        )
    quarantine = settings.quarantine_seconds
    if quarantine is not None and quarantine < LEAST_QUARANTINE and settings.provider.startswith("efa"):
        return warning(
            Id.CONFIG_DEADLINES,
            f"quarantine_seconds is {quarantine:g}, but with {settings.provider} a write may land after the fence, in "
            "blocks that have another owner by then",
            "leave it unset (5 s)",
            **times,
        )
    return fine(Id.CONFIG_DEADLINES, "the deadlines fit each other", **times)


def engine(settings: EngineSettings, shared: tuple[str, ...]) -> Finding:
    """What an engine of a fleet file is started with. ``shared``: the arguments that all engines get."""
    for argument in (*shared, *settings.arguments):
        if argument.split("=")[0] in ("--kv-transfer-config", "--kv_transfer_config"):
            return error(
                Id.CONFIG_ENGINE,
                f"engine {settings.name}: its arguments have a {argument.split('=')[0]} of their own, which replaces "
                "the one that is made of its connector section (kv_role kv_both, engine_id, settings)",
                "take it out of `arguments`",
            )
    if settings.load_failure_policy == "fail":
        return warning(
            Id.CONFIG_ENGINE,
            f"engine {settings.name}: load_failure_policy is 'fail': requests whose KV doesn't arrive end in errors",
            "set it to 'recompute', unless that is what you want",
        )
    return fine(
        Id.CONFIG_ENGINE,
        f"engine {settings.name}: kv_role kv_both, KV that doesn't arrive is recomputed",
        kv_role="kv_both",
        load_failure_policy=settings.load_failure_policy,
    )


def engines(fleet: FleetSettings, environment: Mapping[str, str]) -> Iterator[Finding]:
    """All engines that have a connector, and that none takes another's Neuron cores."""
    taken: dict[int, str] = {}
    alike: list[Finding] = []
    for one in fleet.engines:
        if one.connector is None:
            continue
        yield engine(one, fleet.arguments)
        for found in (key(one.connector), deadlines(one.connector)):
            if found not in alike:
                alike.append(found)
                yield found
        cores = neuron_cores({**environment, **fleet.environment, **one.environment})
        shared = sorted(core for core in cores if core in taken)
        if shared:
            yield error(
                Id.ACCELERATOR_ENVIRONMENT,
                f"engines {taken[shared[0]]} and {one.name} both see Neuron core {shared[0]}; the runtime gives a core "
                "to one process",
                "give each engine cores of its own by NEURON_VISIBLE_DEVICES (vllm-neuron) or NEURON_RT_VISIBLE_CORES "
                "in its `environment`",
            )
        taken.update(dict.fromkeys(cores, one.name))


def neuron_cores(environment: Mapping[str, str]) -> tuple[int, ...]:
    """What ``NEURON_RT_VISIBLE_CORES`` ("0-3", "0,2") names, or vllm-neuron's ``NEURON_VISIBLE_DEVICES``.

    The latter names logical cores too, in spite of its name: vllm-neuron gives each of its workers one of them, by
    setting the former there. Parts that are no numbers are left out.
    """
    cores: list[int] = []
    named = environment.get("NEURON_RT_VISIBLE_CORES") or environment.get("NEURON_VISIBLE_DEVICES", "")
    for part in named.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)
