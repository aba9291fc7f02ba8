"""Tables for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], names: int = 2) -> str:
    """In Markdown; the first ``names`` columns are words, the others figures. A line like the one above it in its
    first column leaves that empty."""
    rule = ["---"] * names + ["--:"] * (len(headings) - names)
    found = [headings, rule]
    above = ""
    for line in lines:
        found.append(["" if line[0] == above else line[0], *line[1:]])
        above = line[0]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in found)


def interval(row: Mapping[str, Any], digits: int = 1, scale: float = 1.0) -> str:
    """A value and the ends of its interval."""
    value, low, high = (row[each] * scale for each in ("value", "low", "high"))
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def provenance(about: Mapping[str, Any]) -> str:
    """Machine, versions and commit, as the raw results have them."""
    versions = ", ".join(f"{name} {each}" for name, each in about["versions"].items())
    return f"Measured on: {about['before']}. Versions: {versions}. Commit `{about['commit'][:12]}`."
