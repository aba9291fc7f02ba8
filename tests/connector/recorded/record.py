"""Record what vLLM's real scheduler shows a connector: ``python -m tests.connector.recorded.record FOLDER``.

Run it once per vLLM version, each with that version importable (an unpacked wheel in PYTHONPATH will do; no model is
run, so it need not fit the installed torch). Writes ``FOLDER/vllm-<version>.json``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.connector.harness import model_folder
from tests.connector.recorded.scenarios import record


def main() -> None:
    """See the module's text."""
    (folder,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        recorded = record(model_folder(Path(scratch)))
    lines = [
        f'"{name}": {{"prompts": {_dump(one["prompts"])}, "free": {one["free"]}, "events": [\n'
        + ",\n".join(_dump(event) for event in one["events"])
        + "\n]}"
        for name, one in recorded.pop("scenarios").items()
    ]
    text = f'{_dump(recorded)[:-1]}, "scenarios": {{\n' + ",\n".join(lines) + "\n}}\n"
    (Path(folder) / f"vllm-{recorded['vllm']}.json").write_text(text)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    main()
