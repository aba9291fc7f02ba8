"""``kv_transfer_params``, checked: what a router or an older proxy asks of this engine for one request."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from neuron_pushkv.config import is_loopback
from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import Remote

MAX_TEXT = 256
MAX_DELIVERIES = 1 << 16
MAX_RANKS = 1 << 16
_SHOWN = 80


class BadParameters(Exception):
    """Parameters that can't be followed. ``str()`` says what is wrong, ``reason`` is what is counted."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class PrefillLeg:
    """Compute this prompt's KV for somebody else. ``deliveries`` is 1 where the proxy does not say how many."""

    transfer: str
    deliveries: int


@dataclass(frozen=True)
class DecodeLeg:
    """Get this prompt's KV from another engine."""

    transfer: str
    remote: Remote


Leg: TypeAlias = PrefillLeg | DecodeLeg


class AllowedHosts:
    """Which ``remote_host`` may be connected to: loopback, the listener's own /24 or /64, and what is listed.

    Names are compared as they are and never looked up here: this runs on vLLM's engine thread.
    """

    def __init__(self, own: str, listed: Iterable[str]) -> None:
        self._names: set[str] = {own.lower()}
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        address = _address(own)
        if address is not None and not address.is_loopback:
            prefix = 24 if address.version == 4 else 64
            self._networks.append(ipaddress.ip_network(f"{address}/{prefix}", strict=False))
        for entry in listed:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                self._names.add(entry.lower())

    def __contains__(self, host: str) -> bool:
        if host.lower() in self._names or is_loopback(host):
            return True
        address = _address(host)
        if address is None:
            return False
        return address.is_loopback or any(
            address.version == network.version and address in network for network in self._networks
        )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def parse(parameters: Any, hosts: AllowedHosts, tp_size: int, pp_size: int) -> Leg | None:
    """The leg that ``parameters`` describe, or ``None`` for a request that is nobody else's business.

    Keys that are not known are skipped: vLLM's own connectors send more than we need. ``None`` stands for an absent
    key. ``tp_size`` and ``pp_size`` are ours, and taken as the other engine's where the parameters don't say them.
    Raises :class:`BadParameters`.
    """
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping):
        raise BadParameters(Reason.BAD_PARAMETERS, f"kv_transfer_params must be an object, not {_show(parameters)}")
    sends = _flag(parameters, "do_remote_decode")
    receives = _flag(parameters, "do_remote_prefill")
    if sends and receives:
        raise BadParameters(Reason.BAD_PARAMETERS, "do_remote_decode and do_remote_prefill can't both be true")
    if sends:
        return PrefillLeg(
            transfer=_text(parameters, "transfer_id", optional=True),
            deliveries=_number(parameters, "deliveries", 1, MAX_DELIVERIES, default=1),
        )
    if receives:
        return _decode_leg(parameters, hosts, tp_size, pp_size)
    return None


def _decode_leg(parameters: Mapping[str, Any], hosts: AllowedHosts, tp_size: int, pp_size: int) -> DecodeLeg:
    remote = Remote(
        host=_text(parameters, "remote_host"),
        port=_number(parameters, "remote_port", 1, 65535),
        tp_size=_number(parameters, "tp_size", 1, MAX_RANKS, default=tp_size),
        pp_size=_number(parameters, "pp_size", 1, MAX_RANKS, default=pp_size),
    )
    leg = DecodeLeg(_text(parameters, "transfer_id", optional=True), remote)
    _text(parameters, "remote_engine_id")
    _text(parameters, "remote_request_id", optional=True)
    _number(parameters, "remote_num_tokens", 0, 1 << 31, default=0)
    if remote.host not in hosts:
        raise BadParameters(
            Reason.HOST_NOT_ALLOWED,
            f"remote_host {_show(remote.host)} is not allowed; add it to allowed_remote_hosts if it is one of yours",
        )
    return leg


def _flag(parameters: Mapping[str, Any], key: str) -> bool:
    value = parameters.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadParameters(Reason.BAD_PARAMETERS, f"{key} must be true or false, not {_show(value)}")


def _text(parameters: Mapping[str, Any], key: str, *, optional: bool = False) -> str:
    value = parameters.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str) or len(value) > MAX_TEXT or not (value or optional):
        raise BadParameters(
            Reason.BAD_PARAMETERS, f"{key} must be a string of at most {MAX_TEXT} characters, not {_show(value)}"
        )
    if not value.isprintable():
        raise BadParameters(Reason.BAD_PARAMETERS, f"{key} must be printable, not {_show(value)}")
    return value


def _number(parameters: Mapping[str, Any], key: str, least: int, most: int, *, default: int | None = None) -> int:
    value = parameters.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadParameters(
            Reason.BAD_PARAMETERS, f"{key} must be a whole number from {least} to {most}, not {_show(value)}"
        )
    return value


def _show(value: Any) -> str:
    """What a client sent, short enough for a log line."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
