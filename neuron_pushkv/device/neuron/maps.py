"""This process's memory mappings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mapping:
    """Addresses from ``start`` to before ``end``, and the file they show, if any."""

    start: int
    end: int
    path: str


def mappings() -> Iterator[Mapping]:
    """As the kernel lists them now (``/proc/self/maps``, see proc(5)): by address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *rest = line.split(maxsplit=5)
        start, _, end = addresses.partition("-")
        yield Mapping(int(start, 16), int(end, 16), rest[4] if len(rest) > 4 else "")


def holding(address: int, length: int) -> Mapping | None:
    """The one mapping that holds all of these bytes."""
    for mapping in mappings():
        if mapping.start <= address and address + length <= mapping.end:
            return mapping
    return None


def loaded(soname: str) -> Path | None:
    """The file of that shared library ("libnrt.so.1") that this process has loaded, through us or anybody else."""
    pattern = re.compile(rf"/{re.escape(soname)}(\.\d+)*$")
    return next((Path(mapping.path) for mapping in mappings() if pattern.search(mapping.path)), None)
