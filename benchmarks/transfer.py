"""All that KV transfers are to reach, measured in one run on one machine, with NIXL and memcpy beside it.

    python -m benchmarks.transfer --json transfer.json

The work is in ``work.py``; each part can be run by itself and says in its module how it measures: ``bulk`` (whole
prompts), ``streaming``, ``contact`` (new peers), ``pairing``, ``stepping`` (what engine steps cost). ``gil`` tells how
long the GIL is held. At the end each figure is shown beside what is aimed at (``targets``).
"""

from __future__ import annotations

from benchmarks import bulk, contact, pairing, stepping, streaming
from benchmarks.options import run

PARTS = (bulk.measure, streaming.measure, contact.measure, pairing.measure, stepping.measure)

if __name__ == "__main__":
    run("Measures KV transfers between processes of this machine.", PARTS)
