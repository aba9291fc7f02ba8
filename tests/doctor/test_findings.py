"""Ids, levels and what becomes of them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import neuron_pushkv.doctor
from neuron_pushkv.doctor.findings import EXIT_CODES, Finding, Id, Level, document, error, failed, fine, warning, worst
from neuron_pushkv.doctor.report import as_json, show
from neuron_pushkv.errors import FabricError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(neuron_pushkv.doctor.__file__).parent


def test_every_id_is_documented_once_and_used() -> None:
    rows = re.findall(r"^\| `([a-z.]+)` \|", (ROOT / "docs" / "doctor.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(Id)
    code = "\n".join(path.read_text() for path in SOURCES.glob("*.py") if path.name != "findings.py")
    assert [check.name for check in Id if f"Id.{check.name}" not in code] == []


@pytest.mark.parametrize(
    ("levels", "expected"), [("", 0), ("ok", 0), ("ok warning", 1), ("warning error ok", 2), ("ok error", 2)]
)
def test_the_worst_finding_decides(levels: str, expected: int) -> None:
    findings = [Finding(Id.HOST_PORTS, Level(level), "x") for level in levels.split()]
    assert EXIT_CODES[worst(findings)] == expected
    assert document(findings)["exit_code"] == expected


def test_a_report_says_everything_to_people_and_programs() -> None:
    findings = [fine(Id.HOST_VLLM, "all well", version="1"), error(Id.PEER_LAYOUT, "bad", "mend it", ours=[1, 2])]
    told = json.loads(as_json(findings))
    assert told["level"] == "error"
    assert told["findings"][1] == {
        "id": "peer.layout",
        "level": "error",
        "what": "bad",
        "fix": "mend it",
        "evidence": {"ours": [1, 2]},
    }
    console = Console(file=io.StringIO(), width=100)
    show([*findings, warning(Id.HOST_PORTS, "so so", "see to it")], console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("host.vllm", "all well", "peer.layout", "mend it", "see to it", "(1 ok, 1 warning, 1 error)"):
        assert text in shown


def test_our_own_exceptions_are_split_into_what_is_and_what_to_do() -> None:
    found = failed(Id.FABRIC_LIBRARY, FabricError("none here (a; b); install one"), "?")
    assert (found.what, found.fix) == ("none here (a; b)", "install one")
    assert failed(Id.FABRIC_LIBRARY, FabricError("just so"), "do this").sentence == "just so; do this"
