"""Whether a request would find its way: a prefill and a decode engine that can reach each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from neuron_pushkv.doctor import agreement
from neuron_pushkv.doctor.findings import Finding, Level
from neuron_pushkv.router.fleet import Directories, DirectoryFailure, Engine, Fleet
from neuron_pushkv.router.upstream import Failure, Upstream
from neuron_pushkv.wire import EngineStatus


@dataclass
class EngineReport:
    """What was found out about one engine; ``problems`` is empty if it is ready."""

    engine: Engine
    status: EngineStatus | None = None
    problems: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        about = {"url": self.engine.url, "ready": not self.problems, "problems": self.problems}
        if self.status is not None:
            names = ("engine_id", "provider", "library", "release", "vllm", "ranks", "kept_requests")
            about |= {name: getattr(self.status, name) for name in names}
        return about


async def report(fleet: Fleet, directories: Directories, upstream: Upstream) -> dict[str, Any]:
    """Ask all engines at once, in bounded time. ``ready`` says whether all is well, ``problems`` what isn't.

    That two engines reach each other is judged by what both of them say: every worker listens, over the same libfabric
    provider. Only a transfer proves more, as ``pushkv doctor`` does one, whose checks of these things are the same.
    """
    prefill, decode = await asyncio.gather(*(_ask(engine, directories, upstream) for engine in fleet.pick()))
    problems, findings = prefill.problems + decode.problems, prefill.findings + decode.findings
    if prefill.status and decode.status:
        ours, theirs = prefill.status, decode.status
        between = [agreement.providers(str(prefill.engine), ours.provider, str(decode.engine), theirs.provider)]
        between.append(agreement.releases(str(prefill.engine), ours, str(decode.engine), theirs))
        problems += [finding.sentence for finding in between if finding.level is Level.ERROR]
        findings += between
    return {
        "ready": not problems,
        "problems": problems,
        "findings": [finding.document() for finding in findings],
        "prefill": [prefill.document()],
        "decode": [decode.document()],
    }


async def _ask(engine: Engine, directories: Directories, upstream: Upstream) -> EngineReport:
    found = EngineReport(engine)
    health, status = await asyncio.gather(_health(engine, upstream), _status(engine, directories))
    if health:
        found.problems.append(health)
    if isinstance(status, str):
        found.problems.append(status)
        return found
    found.status = status
    workers = agreement.workers(str(engine), status)
    found.findings.append(workers)
    if workers.level is Level.ERROR:
        found.problems.append(workers.sentence)
    return found


async def _health(engine: Engine, upstream: Upstream) -> str:
    try:
        response = await upstream.get(engine, "/health", {})
    except Failure as failure:
        return str(failure)
    return "" if response.status_code == 200 else f"{engine} answers /health with status {response.status_code}"


async def _status(engine: Engine, directories: Directories) -> EngineStatus | str:
    try:
        return await directories.status(engine, fresh=True)
    except DirectoryFailure as failure:
        return str(failure)
