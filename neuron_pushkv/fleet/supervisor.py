"""A fleet of engines and a router on this machine: started, watched, stopped, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from neuron_pushkv.config import FleetSettings
from neuron_pushkv.errors import FleetError
from neuron_pushkv.fleet import keeper
from neuron_pushkv.fleet.checks import check
from neuron_pushkv.fleet.commands import Command, commands, locate_model
from neuron_pushkv.fleet.reasons import reason, stage

GRACE_SECONDS = 10.0
"""How long a process has for ending by itself, once asked."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class State:
    """One process of a starting fleet, for showing progress."""

    name: str
    ready: bool
    seconds: float
    """Since its start; until it became ready, if it has."""
    doing: str


Progress = Callable[[Sequence[State]], None]


class Fleet:
    """The processes of a fleet file. A context manager: starts them on entry, stops them on exit.

    Each runs under a keeper (:mod:`neuron_pushkv.fleet.keeper`) in a session of its own, and writes to
    ``<logs>/<name>.log``. When this process ends, in whatever way, so do they.
    """

    def __init__(self, settings: FleetSettings, logs: Path, grace_seconds: float = GRACE_SECONDS) -> None:
        self.settings = settings
        self.logs = logs
        self._grace_seconds = grace_seconds
        self._members: dict[str, _Member] = {}

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Check what can be checked, make the tiny model if it is asked for, start all processes.

        Raises :class:`ConfigError` with one sentence, and then has started nothing.
        """
        model = locate_model(self.settings)
        check(self.settings, model)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.start_commands(commands(self.settings, model, self.logs))

    def start_commands(self, processes: Sequence[Command]) -> None:
        """Start these processes, unchecked; on an error none is left."""
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for command in processes:
                self._members[command.name] = _Member(command, self.logs, self._grace_seconds)
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, progress: Progress | None = None) -> None:
        """Return once every process answers; tells ``progress`` several times a second how far each is.

        Raises :class:`FleetError` if one ends before, or if it takes more than the settings' ``start_seconds``.
        """
        give_up = time.monotonic() + self.settings.start_seconds
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while True:
                self.check_alive()
                ready = [member.check_ready(client) for member in self._members.values()]
                if progress:
                    progress([member.state() for member in self._members.values()])
                if all(ready):
                    return
                if time.monotonic() > give_up:
                    slow = ", ".join(name for name, member in self._members.items() if not member.ready_after)
                    raise FleetError(
                        f"not ready after {self.settings.start_seconds:g} s: {slow}; see the logs in {self.logs}, "
                        "or raise start_seconds"
                    )
                time.sleep(POLL_SECONDS)

    def check_alive(self) -> None:
        """Raise :class:`FleetError`, with the reason, if a process has ended."""
        for member in self._members.values():
            if (status := member.process.poll()) is not None:
                raise FleetError(f"{member.command.name} has ended: {reason(member.log, status)} (log: {member.log})")

    def watch(self) -> None:
        """Wait until a process ends; raises :class:`FleetError` then."""
        while True:
            self.check_alive()
            time.sleep(POLL_SECONDS)

    def processes(self, name: str) -> list[int]:
        """Ids of all living processes of that member, its first one first; the keeper is not among them."""
        return keeper.descendants(self._members[name].process.pid)

    def kill(self, name: str) -> None:
        """End that member as a crash would: ``kill -9`` to all its processes at once. Returns when they are gone."""
        for pid in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._members[name].process.wait(keeper.KILL_SECONDS + self._grace_seconds)

    def restart(self, name: str) -> None:
        """Start a member again with the same command, ending it first if need be; :meth:`wait_ready` waits for it."""
        old = self._members[name]
        old.ask_to_end()
        old.wait(time.monotonic() + self._grace_seconds + keeper.KILL_SECONDS)
        self._members[name] = _Member(old.command, self.logs, self._grace_seconds)

    def stop(self) -> None:
        """Ask all processes to end, kill those that have not after the grace time. Returns when all are gone."""
        for member in self._members.values():
            member.ask_to_end()
        give_up = time.monotonic() + self._grace_seconds + keeper.KILL_SECONDS + 1.0
        for member in self._members.values():
            member.wait(give_up)
        self._members.clear()


class _Member:
    """One running command with its keeper and its log."""

    def __init__(self, command: Command, logs: Path, grace_seconds: float) -> None:
        self.command = command
        self.log = logs / f"{command.name}.log"
        self.ready_after: float | None = None
        self._started = time.monotonic()
        with self.log.open("ab") as output:
            output.truncate(0)
            self.process = _start(command, grace_seconds, output)

    def check_ready(self, client: httpx.Client) -> bool:
        if self.ready_after is None:
            try:
                answer = client.get(self.command.url + self.command.ready_path)
            except httpx.HTTPError:  # not listening yet, or too busy to answer
                return False
            if answer.status_code == httpx.codes.OK:
                self.ready_after = time.monotonic() - self._started
        return self.ready_after is not None

    def state(self) -> State:
        if self.ready_after is not None:
            return State(self.command.name, True, self.ready_after, "ready")
        return State(self.command.name, False, time.monotonic() - self._started, stage(self.log))

    def ask_to_end(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()  # the keeper reads the end of the pipe

    def wait(self, give_up: float) -> None:
        try:
            self.process.wait(max(0.1, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:  # the keeper itself hangs: its child dies with it
            self.process.kill()
            self.process.wait()


def _start(command: Command, grace_seconds: float, output: IO[bytes]) -> subprocess.Popen[bytes]:
    environment: Mapping[str, str] = {**os.environ, "PYTHONUNBUFFERED": "1", **command.environment}
    allowed = os.sched_getaffinity(0)
    try:
        # Of this thread alone: a process begins with the cores of the thread that starts it.
        os.sched_setaffinity(0, command.cores or allowed)
        return _spawn(command, grace_seconds, output, environment)
    finally:
        os.sched_setaffinity(0, allowed)


def _spawn(
    command: Command, grace_seconds: float, output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(grace_seconds), *command.arguments],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
