"""Findings for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from neuron_pushkv.doctor.findings import Finding, Level, document, worst

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def as_json(findings: Sequence[Finding]) -> str:
    """Everything, the evidence too."""
    return json.dumps(document(findings), indent=2, default=str)


def show(findings: Sequence[Finding], console: Console) -> None:
    """A table: one row for each finding, with what to do below what is wrong."""
    table = Table("check", "", "what was found", box=None, pad_edge=False)
    for finding in findings:
        text = Text(finding.what)
        if finding.fix:
            text.append(f"\n{finding.fix}", style="italic")
        table.add_row(finding.id, Text(finding.level, style=_STYLES[finding.level]), text)
    console.print(table)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    sentence = {
        Level.OK: "nothing stands in the way of pushing KV here",
        Level.WARNING: "KV can be pushed here, worse than it could",
        Level.ERROR: "no KV can be pushed here until the errors are put right",
    }[worst(findings)]
    numbers = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    console.print(f"{sentence} ({numbers})", soft_wrap=True)
