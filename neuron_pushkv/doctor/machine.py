"""The machine as the checks see it. Tests give them another."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from neuron_pushkv.device import topology

_CAP_IPC_LOCK = 14
"""Bit of ``linux/capability.h``: whoever has it may pin any amount."""


def _locked_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


@dataclass(frozen=True)
class Machine:
    """``root`` is where ``dev``, ``proc`` and ``sys`` are; ``environment`` what the engine's process will have.

    ``locked_bytes``: how much memory this process may pin; ``None`` for any amount.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    locked_bytes: int | None = field(default_factory=_locked_bytes)

    @property
    def sys(self) -> Path:
        """sysfs."""
        return self.root / "sys"

    def devices(self, pattern: str) -> tuple[str, ...]:
        """Names of what is in ``/dev`` and matches, in order."""
        return tuple(sorted(path.name for path in (self.root / "dev").glob(pattern)))

    def accelerators(self) -> dict[str, tuple[str, ...]]:
        """Device types that there are, as torch names them, each with its devices."""
        found = {"neuron": self.devices("neuron[0-9]*"), "cuda": self.devices("nvidia[0-9]*")}
        return {kind: names for kind, names in found.items() if names}

    def device_type(self) -> str:
        """What an engine would compute on here."""
        return next(iter(self.accelerators()), "cpu")

    def family(self) -> str | None:
        """Of the instance, like "trn2"."""
        return topology.instance_family(self.sys)

    def lines(self, path: str) -> list[str]:
        """A file below the root, or nothing where there is none."""
        try:
            return (self.root / path).read_text().splitlines()
        except OSError:
            return []
