"""What a check says: a closed list of ids, three levels, and one sentence each for what is and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from neuron_pushkv import __version__


class Id(StrEnum):
    """Stable names of all checks; ``docs/doctor.md`` describes each."""

    CONFIG_ENGINE = "config.engine"
    CONFIG_DEADLINES = "config.deadlines"
    SECURITY_KEY = "security.key"
    HOST_PORTS = "host.ports"
    HOST_MEMLOCK = "host.memlock"
    HOST_HUGEPAGES = "host.hugepages"
    HOST_INFINIBAND = "host.infiniband"
    HOST_VLLM = "host.vllm"
    HOST_CONNECTOR = "host.connector"
    ACCELERATOR_RUNTIME = "accelerator.runtime"
    ACCELERATOR_ENVIRONMENT = "accelerator.environment"
    ACCELERATOR_MEMORY = "accelerator.memory"
    FABRIC_ENVIRONMENT = "fabric.environment"
    FABRIC_SHM = "fabric.shm"
    FABRIC_LIBRARY = "fabric.library"
    FABRIC_PROVIDER = "fabric.provider"
    FABRIC_RAILS = "fabric.rails"
    PEER_REACHABLE = "peer.reachable"
    PEER_PROTOCOL = "peer.protocol"
    PEER_HANDSHAKE = "peer.handshake"
    PEER_ENGINE = "peer.engine"
    PEER_PROVIDER = "peer.provider"
    PEER_VERSIONS = "peer.versions"
    PEER_RANKS = "peer.ranks"
    PEER_LAYOUT = "peer.layout"
    TRANSFER_BYTES = "transfer.bytes"
    TRANSFER_BANDWIDTH = "transfer.bandwidth"
    TRANSFER_LATENCY = "transfer.latency"
    TRANSFER_WORTH = "transfer.worth"


class Level(StrEnum):
    """How bad it is. A warning costs speed or safety; with an error nothing would be pushed."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


EXIT_CODES = {Level.OK: 0, Level.WARNING: 1, Level.ERROR: 2}


@dataclass(frozen=True)
class Finding:
    """``evidence`` is what was seen, as JSON can hold it; ``fix`` says what to do, and is empty if all is well."""

    id: Id
    level: Level
    what: str
    fix: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """What is wrong and what to do, in one."""
        return f"{self.what}; {self.fix}" if self.fix else self.what

    def document(self) -> dict[str, Any]:
        """As JSON."""
        found = {"id": self.id, "level": self.level, "what": self.what, "fix": self.fix}
        return {**found, "evidence": dict(self.evidence)}


def fine(check: Id, what: str, **evidence: Any) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, what, evidence=evidence)


def warning(check: Id, what: str, fix: str, **evidence: Any) -> Finding:
    """It works, worse than it could."""
    return Finding(check, Level.WARNING, what, fix, evidence)


def error(check: Id, what: str, fix: str, **evidence: Any) -> Finding:
    """It doesn't work."""
    return Finding(check, Level.ERROR, what, fix, evidence)


def failed(check: Id, failure: Exception | str, fix: str, **evidence: Any) -> Finding:
    """One of our exceptions, or its sentence. That ends with what to do as a rule; ``fix`` is for when not."""
    what, semicolon, advice = str(failure).rpartition("; ")
    return error(check, what if semicolon else advice, advice if semicolon else fix, **evidence)


def worst(findings: Iterable[Finding]) -> Level:
    """The level of all of them together."""
    return max((finding.level for finding in findings), key=EXIT_CODES.__getitem__, default=Level.OK)


def document(findings: Iterable[Finding]) -> dict[str, Any]:
    """A whole report as JSON."""
    listed = list(findings)
    level = worst(listed)
    return {
        "release": __version__,
        "level": level,
        "exit_code": EXIT_CODES[level],
        "findings": [finding.document() for finding in listed],
    }
