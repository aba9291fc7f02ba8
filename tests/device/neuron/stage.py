"""Reads a line for each scene, plays it in a child, and answers with a line.

It never loads the runtime itself: that can't be used on the other side of a fork.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

from . import scenes


def play(scene: str, library: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """In a child: its exit code, and what it has said."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ.update(environment)
            try:
                getattr(scenes, scene)(Path(library), *arguments)
            except BaseException:  # noqa: BLE001 -- told by the test
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read().decode()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(play(*json.loads(line))), flush=True)
