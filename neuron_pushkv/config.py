"""Every setting, once.

Three documents are validated here: the connector's ``kv_connector_extra_config`` (:class:`ConnectorSettings`), the
router's section (:class:`RouterSettings`) and a fleet file (:class:`FleetSettings`). Durations are seconds. Unknown
keys are refused, so that a misspelt setting is never silently a default.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from neuron_pushkv.errors import ConfigError

FLEET_KEY_VARIABLE = "PUSHKV_FLEET_KEY"
"""Environment variable that holds the fleet key where no setting does."""

Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
UserPort = Annotated[int, Field(ge=1, le=65535)]
Provider = Literal["efa", "efa-direct", "tcp", "shm"]
Settings = TypeVar("Settings", bound=BaseModel)


class Strict(BaseModel):
    """Base of every settings class: unknown keys are errors, values can't be changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address) can only be reached from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_port(text: str, where: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 address stands in brackets. Raises :class:`ConfigError`."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{where}: '{text}' is not host:port")
    if not 0 < int(port) < 65536:
        raise ConfigError(f"{where}: port {port} of '{text}' is not between 1 and 65535")
    return bare, int(port)


class Security(Strict):
    """What the connector and the router share about who may talk to whom."""

    fleet_key: str | None = Field(default=None, min_length=1, repr=False)
    """Shared secret of all engines and routers. Prefer ``fleet_key_file`` or the environment variable."""
    fleet_key_file: Path | None = None
    """File whose content, without surrounding white space, is the fleet key."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.fleet_key and self.fleet_key_file:
            raise ValueError("fleet_key and fleet_key_file are both set; keep one of them")
        return self

    def key(self) -> bytes | None:
        """The fleet key, from the setting, the file or ``PUSHKV_FLEET_KEY``; ``None`` if there is none.

        Raises :class:`ConfigError` if the file can't be read or is empty.
        """
        if self.fleet_key:
            return self.fleet_key.encode()
        if self.fleet_key_file:
            try:
                key = self.fleet_key_file.read_bytes().strip()
            except OSError as error:
                raise ConfigError(f"fleet_key_file {self.fleet_key_file} can't be read: {error.strerror}") from error
            if not key:
                raise ConfigError(f"fleet_key_file {self.fleet_key_file} is empty; put the fleet's shared secret in it")
            return key
        from_environment = os.environ.get(FLEET_KEY_VARIABLE, "").strip()
        return from_environment.encode() or None


class ConnectorSettings(Security):
    """``kv_connector_extra_config`` of one vLLM engine."""

    host: str = "127.0.0.1"
    """Address that this engine's listeners bind to and announce. Without a fleet key it must be a loopback address."""
    port: UserPort = 14600
    """Port of the engine's directory; data parallel rank ``n`` uses ``port + n``. Ranks listen on free ports."""
    allowed_remote_hosts: tuple[str, ...] = ()
    """Addresses, CIDRs or names that ``remote_host`` may be, besides loopback and the listener's own /24 (/64)."""
    provider: Provider = "efa"
    """libfabric provider. Start-up fails if the one that is found is another."""
    libfabric: Path | None = None
    """Path of libfabric.so.1; by default EFA's own, the loader's, the ``mpich`` wheel's (that first unless for EFA)."""
    transport: Literal["auto", "fabric", "nixl"] = "auto"
    """What moves KV: libfabric or NIXL. ``auto`` is NIXL for GPUs with provider ``shm``, and libfabric otherwise."""
    nixl_backend: Annotated[str, Field(pattern=r"^\w{1,32}$")] = "UCX"
    """NIXL's plugin, where NIXL is used: ``UCX``, ``LIBFABRIC``, ... The same on both sides."""
    progress_core: NonNegativeInt | None = None
    """CPU core for the thread that moves the data, one that nothing else is busy on; by default any."""

    push_granularity: Literal["step", "request", "layer"] = "step"
    """When KV moves: after each prefill step what it has filled; all of it when prefill ends (``request``); or each
    layer's while the next one is computed, where vLLM's per-layer hook runs (``layer``; it makes graphs piecewise)."""
    smallest_write_bytes: Annotated[int, Field(ge=0)] = 512
    """Between unlike layouts: smaller writes are packed into larger ones on the sender or, where that can't be, the
    peer is refused."""
    staging_bytes: PositiveInt = 64 << 20
    """Host memory that small writes are packed in, taken when the first peer needs it."""
    bounce: Literal["auto", "always"] = "auto"
    """When KV passes through host memory: where the network can't be shown the device's own, or ``always``. The latter
    also helps where registering the device's is refused, or small writes from it have to be packed."""
    bounce_bytes: PositiveInt = 1 << 30
    """That host memory, per rank, taken only where it is used. A quarter is for what is sent; the rest, for what is
    received, must hold the longest prompt's KV."""
    max_parked_bytes: Annotated[int, Field(ge=0)] | None = None
    """KV that finished requests may keep for receivers, per rank (as ``--kv-cache-memory-bytes``); beyond it the
    oldest is let go. By default half of the engine's KV cache."""

    block_order: Literal["vllm", "sorted", "runs"] = "sorted"
    """In which order vLLM's block pool hands blocks out: its own; the same blocks sorted, so that more of them are
    neighbours; or neighbours among the oldest quarter, which makes few, large writes if both sides do so (``runs``)."""

    connect_seconds: PositiveSeconds = 2.0
    """How long connecting to a peer and the handshake with it may take together."""
    unreachable_seconds: Seconds = 1.0
    """How long a peer that couldn't be reached isn't tried again."""
    unknown_source_seconds: PositiveSeconds = 10.0
    """How long a registration waits at a sender that does not know the source (and is idle or has begun two steps)."""
    no_progress_seconds: PositiveSeconds = 120.0
    """How long a receiver waits for a sender that has the source but reports no progress."""
    keep_unclaimed_seconds: PositiveSeconds = 30.0
    """How long finished KV is kept that nobody asked for, or whose delivery failed."""
    keep_delivered_seconds: Seconds = 1.0
    """How long finished KV is kept after its delivery, for a second one."""
    cancel_seconds: PositiveSeconds = 2.0
    """How long a receiver waits for CANCELLED, or for a failed delivery's count, before it fences the peer."""
    quarantine_seconds: Seconds | None = None
    """How long blocks stay unused after a fence; by default 5 s, and 0 s where the provider's fence is final."""

    @field_validator("allowed_remote_hosts")
    @classmethod
    def _networks_are_valid(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if "/" in host:
                ipaddress.ip_network(host, strict=False)
        return hosts

    @model_validator(mode="after")
    def _loopback_without_key(self) -> ConnectorSettings:
        if not is_loopback(self.host) and self.key() is None:
            raise ValueError(
                f"host {self.host} can be reached from other machines, so a fleet key is needed: set fleet_key_file "
                f"or {FLEET_KEY_VARIABLE}"
            )
        return self


class RouterSettings(Security):
    """The router: where it listens and which engines it sends to."""

    host: str = "127.0.0.1"
    """Address to listen on for clients."""
    port: UserPort = 8000
    """Port to listen on for clients."""
    prefill: tuple[str, ...] = ()
    """Base URLs of prefill engines, like ``http://127.0.0.1:8100``."""
    decode: tuple[str, ...] = ()
    """Base URLs of decode engines."""
    prefill_push: tuple[str, ...] = ()
    """``host:port`` of each prefill engine's directory, in the same order as ``prefill``."""
    decode_push: tuple[str, ...] = ()
    """The same for ``decode``."""
    connect_seconds: PositiveSeconds = 2.0
    """How long connecting to an engine may take."""
    request_seconds: PositiveSeconds = 600.0
    """How long one request may take from its first byte to its last."""

    @model_validator(mode="after")
    def _one_directory_each(self) -> RouterSettings:
        for urls, directories, name in (
            (self.prefill, self.prefill_push, "prefill"),
            (self.decode, self.decode_push, "decode"),
        ):
            if len(urls) != len(directories):
                raise ValueError(f"{name}_push must list one host:port for each of {name}'s {len(urls)} URLs")
        return self


class EngineSettings(Strict):
    """One vLLM server of a fleet on this machine."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """Its name in logs and towards its peers: small letters, digits and dashes. Stays the same over restarts."""
    role: Literal["prefill", "decode", "undivided"]
    """``undivided`` runs without the connector: the yardstick for tokens."""
    host: str = "127.0.0.1"
    """Address of its HTTP server."""
    port: UserPort
    """Port of its HTTP server."""
    connector: ConnectorSettings | None = None
    """Required for prefill and decode."""
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose KV didn't arrive: computed here, or ended with an error."""
    arguments: tuple[str, ...] = ()
    """Further arguments of ``vllm.entrypoints.openai.api_server``."""
    environment: dict[str, str] = {}
    """Environment variables for this engine, on top of the fleet's."""
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Processor cores that all its processes stay on; by default any. Engines whose ranks spin should not share any."""

    @model_validator(mode="after")
    def _connector_by_role(self) -> EngineSettings:
        if (self.connector is None) != (self.role == "undivided"):
            raise ValueError(f"engine {self.name}: prefill and decode need a connector section, undivided has none")
        return self


class FleetSettings(Strict):
    """A fleet file: engines and a router that ``pushkv up`` starts on this machine."""

    model: str
    """A model folder, a hub name, or ``tiny``: a small random model made on the spot, for trying things out."""
    arguments: tuple[str, ...] = ()
    """Arguments that every engine gets, before its own."""
    environment: dict[str, str] = {}
    """Environment variables that every engine gets."""
    engines: Annotated[tuple[EngineSettings, ...], Field(min_length=1)]
    """The vLLM servers, see below."""
    router: RouterSettings | None = None
    """The router in front of them, if there is to be one."""
    start_seconds: PositiveSeconds = 600.0
    """How long all of it may take to become ready."""

    @model_validator(mode="after")
    def _names_and_ports_differ(self) -> FleetSettings:
        names = [engine.name for engine in self.engines]
        if len(set(names)) != len(names):
            raise ValueError("engines must have different names")
        ports = [engine.port for engine in self.engines]
        ports += [engine.connector.port for engine in self.engines if engine.connector]
        ports += [self.router.port] if self.router else []
        twice = sorted({port for port in ports if ports.count(port) > 1})
        if twice:
            raise ValueError(f"port {twice[0]} is used twice")
        return self


def parse(settings: type[Settings], values: Any, where: str) -> Settings:
    """Validate ``values``; raises :class:`ConfigError` with one sentence that names ``where`` and the first fault."""
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_fault(settings, error)}") from error
    except ConfigError as error:  # The fleet key's file, which is read when it decides whether a host is allowed.
        raise ConfigError(f"{where}: {error}") from error


def load_fleet(path: Path) -> FleetSettings:
    """Read and validate a fleet file (YAML). Raises :class:`ConfigError`."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return parse(FleetSettings, values, str(path))


def _first_fault(settings: type[BaseModel], error: ValidationError) -> str:
    faults = error.errors()
    # A misspelt setting may also be a missing one; the spelling explains both.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(_keys(settings, first["loc"][:-1])))
        return f"unknown setting '{place}'" + (f"; known here: {known}" if known else "")
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "missing":
            message = "is missing"
        case "model_type" | "dict_type":
            message = "must be a mapping of settings to values"
        case "string_type" if isinstance(first["input"], (bool, int, float)):
            message = f"must be text; put {first['input']} in quotes"
    return f"{place}: {message}" if place else message


def _keys(settings: type[BaseModel], location: tuple[int | str, ...]) -> set[str]:
    """The keys that are known at ``location`` inside a document of that class."""
    fields = settings.model_fields
    for part in location:
        if isinstance(part, int):
            continue
        inner = fields.get(part)
        if inner is None:
            return set()
        models = _models(inner.annotation)
        if not models:
            return set()
        fields = models[0].model_fields
    return set(fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]
