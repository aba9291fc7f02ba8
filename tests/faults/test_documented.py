"""The table of faults names tests that exist, and every case that a test here claims is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .side_process import ROOT

TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (F\d+) \|(.*)$", TABLE, re.MULTILINE)


def functions(path: Path) -> dict[str, str]:
    """Name -> docstring of each test in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    return {node.name: ast.get_docstring(node) or "" for node in tests}


def test_every_named_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name in named if name not in functions(ROOT / "tests" / file)]
    assert not missing


def test_every_case_has_one_row_and_a_test() -> None:
    cases = [case for case, _ in ROWS]
    assert len(set(cases)) == len(cases) > 30
    assert not [case for case, row in ROWS if "::test_" not in row]


def test_every_test_here_names_its_case_and_is_in_its_row() -> None:
    rows = dict(ROWS)
    lacking = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        for name, text in functions(path).items():
            cases = re.findall(r"\bF\d+\b", text)
            if name == "test_soak_finds":
                continue  # It tests the soak, not the package.
            if not cases or not any(f"faults/{path.name}::{name}`" in rows.get(case, "") for case in cases):
                lacking.append(f"{path.name}::{name}")
    assert not lacking
