"""Why a process ended, in one sentence, from the last things that it wrote."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 64 << 10

_PREFIX = re.compile(r"^\s*(\([^)]*pid=\d+\)\s*)?((INFO|WARNING|ERROR|CRITICAL)\s+[\d:. -]+(\[[^\]]*\])?\s*)?")
_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"neuron_pushkv\.errors\.\w+: (.+)"), "{0}"),
    (re.compile(r"(?:^|\s)pushkv: (.+)"), "{0}"),
    (re.compile(r"[Aa]ddress already in use"), "its port is taken; end what uses it, or set another port"),
    (re.compile(r"error: (unrecognized arguments: .+|argument .+)"), "bad argument: {0}"),
    (
        re.compile(
            r"Repo id must be|not a valid model identifier|Can't load the config|Invalid repository|LocalEntryNotF"
        ),
        "the model is missing or its name is wrong; set `model` to a model folder, a hub name or `tiny`",
    ),
    (re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'"), "the Python package {0} is not installed"),
    (
        re.compile(r"[Cc]annot allocate memory|can't allocate memory|MemoryError"),
        "memory is short; lower --kv-cache-memory-bytes or run fewer engines",
    ),
    (re.compile(r"No available memory for the cache"), "the KV cache is too small; raise --kv-cache-memory-bytes"),
    (re.compile(r"No space left on device"), "the disk or shared memory is full"),
)
_RAISED = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)): (.+)")
_STAGES = (
    ("Application startup complete", "answering soon"),
    ("Starting vLLM server", "opening its port"),
    ("Loading weights took", "making the KV cache"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "starting its workers"),
    ("Using max model len", "starting the engine"),
)
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError|cancelled"
)


def reason(log: Path, status: int) -> str:
    """One sentence (or, where nothing is recognised, the last lines) on why the process that wrote ``log`` ended.

    ``status``: its exit status, 128 + n for signal n.
    """
    lines = tail(log)
    for pattern, sentence in _KNOWN:
        for line in reversed(lines):
            if match := pattern.search(line):
                return sentence.format(*match.groups())
    if status == 137:
        return "it was killed (signal 9), by hand or because memory ran out"
    for line in lines:
        if (match := _RAISED.search(line)) and not _CONSEQUENCE.search(line):
            return f"{match[1]}: {match[2]}"
    if any("EngineDeadError" in line for line in lines):
        return "its engine core has died; the log may say more"
    if status > 128:
        return f"it ended by signal {status - 128}"
    return f"it ended with status {status}; its last lines were:\n" + "\n".join(lines[-10:])


def stage(log: Path) -> str:
    """What a vLLM server that is not ready yet is busy with, as far as its log tells."""
    lines = tail(log)
    return next((text for mark, text in _STAGES if any(mark in line for line in lines)), "importing")


def tail(log: Path) -> list[str]:
    """The last lines of a log, without vLLM's own line heads and without empty ones."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    stripped = (_PREFIX.sub("", line).rstrip() for line in text.splitlines())
    return [line for line in stripped if line]
