"""The other end of a trial transfer on one machine: ``python -m neuron_pushkv.doctor.opposite DEVICE``.

Reads a connector's settings, one line of JSON, says at which port it serves or why it can't, and ends with its input.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TextIO

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.doctor.examination import Patient, apply_environment, opened
from neuron_pushkv.doctor.findings import Level
from neuron_pushkv.doctor.machine import Machine
from neuron_pushkv.doctor.serving import Server
from neuron_pushkv.errors import PushKVError


def main(device: str) -> None:
    """See the module's text."""
    # Standard output is for the answer alone: what libraries print there, from C too, goes where errors do.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        _serve(device, answer)


def _serve(device: str, answer: TextIO) -> None:
    settings = ConnectorSettings.model_validate_json(sys.stdin.readline())
    who = Patient(settings, Machine(), device)
    apply_environment(who, 1)
    with opened(who) as (memory, transport, findings):
        bad = next((finding for finding in findings if finding.level is Level.ERROR), None)
        if transport is None or bad is not None:
            _say(answer, bad.sentence if bad else "no network")
            return
        try:
            server = Server(settings, who.machine, transport, memory, 0)
        except PushKVError as failure:
            _say(answer, str(failure))
            return
        threading.Thread(target=server.run, args=(_silently,), daemon=True).start()
        _say(answer, str(server.listening[1]))
        sys.stdin.read()
        os._exit(0)  # The thread is in a call that nothing ends, and all of this process's memory goes with it.


def _say(answer: TextIO, line: str) -> None:
    answer.write(f"{line}\n")
    answer.flush()


def _silently(line: str) -> None:
    """The parent sees everything from its side."""


if __name__ == "__main__":
    main(sys.argv[1])
