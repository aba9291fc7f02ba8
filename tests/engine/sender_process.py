"""A sender in its own process, to be stopped and killed: reads commands from stdin, answers with one line each."""

from __future__ import annotations

import json
import sys

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.faults import FaultyTransport

from .hidden import HiddenAccelerator
from .sides import Side


def answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    options = json.loads(sys.argv[1])
    transport = FaultyTransport(FabricTransport(provider=options["provider"]), delay=options["delay"])
    settings = ConnectorSettings(port=options["port"])
    hidden = HiddenAccelerator() if options["hidden"] else None
    with Side(options["name"], transport, settings, hidden=hidden) as side:
        answer("ready")
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            if command == "reading":
                answer(str(bool(side.engine._outbound.reading(*arguments))))
            else:
                getattr(side, command)(*arguments)
                answer("ok")


if __name__ == "__main__":
    main()
