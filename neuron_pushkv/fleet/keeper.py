"""Runs one command and sees to it that nothing of it outlives its supervisor.

``python keeper.py GRACE_SECONDS COMMAND...`` with a pipe from the supervisor as standard input. The keeper adopts
every orphan among the command's descendants, whatever session it has moved to. When the pipe ends (the supervisor is
gone, even by ``kill -9``) or a signal asks for it, the command gets SIGTERM and the grace time. Once the command has
ended, by itself or not, whatever is left of its descendants is killed. Exits with the command's status (128 + n for
signal n).

Started by its path and isolated, so that a keeper costs milliseconds and a few megabytes: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KILL_SECONDS = 10.0
"""How long killed processes may take to disappear; a process stuck in the kernel is not waited for any longer."""


def descendants(root: int) -> list[int]:
    """Process ids of all living descendants of ``root``, parents before children. Zombies are not alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:  # it ended while we looked
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def main(grace_seconds: float, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        _become(libc, keeper, command)

    watched = [sys.stdin.fileno(), wake]
    deadline: float | None = None
    while (status := _reap(child)) is None:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(watched, [], [], patience)
        if deadline is not None and time.monotonic() >= deadline:
            break
        asked = wake in ready and bool(set(os.read(wake, 4096)) - {signal.SIGCHLD})
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            watched.remove(sys.stdin.fileno())
            asked = True
        if asked and deadline is None:
            os.kill(child, signal.SIGTERM)
            deadline = time.monotonic() + grace_seconds
    ended = _kill_all(child)
    return status if status is not None else ended


def _become(libc: ctypes.CDLL, keeper: int, command: list[str]) -> None:
    """In the forked child: turn into the command, tied to the keeper's life."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it died before the line above
            os._exit(125)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _reap(child: int) -> int | None:
    """Collect whatever has ended; the child's exit status if it was among them."""
    result = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return result
        if pid == 0:
            return result
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            result = code if code >= 0 else 128 - code


def _kill_all(child: int) -> int:
    """Kill all descendants until there are none; the child's exit status if it ends only now, else 137."""
    result = 128 + signal.SIGKILL
    give_up = time.monotonic() + KILL_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < give_up:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        status = _reap(child)
        result = result if status is None else status
    return result


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
