"""Asks what only hardware can answer, of this machine and another. See docs/first-hour.md.

python -m benchmarks.first_hour --serve                    on the one
python -m benchmarks.first_hour --peer HOST:PORT           on the other
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any

from benchmarks.first_hour.channel import Channel
from benchmarks.first_hour.ends import End, Settings
from benchmarks.first_hour.questions import QUESTIONS, Both, Scale, Skipped
from benchmarks.rows import machine
from neuron_pushkv.errors import PushKVError

GIB = 1 << 30


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What only hardware can answer, as rows of JSON.")
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--serve", action="store_true", help="be the other side, for one run")
    side.add_argument("--peer", metavar="HOST:PORT", help="where the other side serves")
    parser.add_argument("--port", type=int, default=4880, help="with --serve: to listen on; 0 for any")
    parser.add_argument("--host", default="127.0.0.1", help="this machine's address, for listening and for tcp")
    parser.add_argument("--device", default="cpu", help="neuron, cuda or cpu; with a number after a colon: neuron:3")
    parser.add_argument("--provider", default="efa", help="efa, efa-direct or tcp")
    parser.add_argument("--libfabric", type=Path, help="libfabric.so.1 to use, if not the one that engines would")
    parser.add_argument("--size", type=int, default=GIB // 4, help="bytes of device memory on each side")
    parser.add_argument("--rounds", type=int, default=20_000, help="of the latency and the flush")
    parser.add_argument("--bandwidth-bytes", type=int, default=64 * GIB, help="to write over each card")
    parser.add_argument("--registered-bytes", type=int, default=80 * 10**9, help="to register at the most")
    parser.add_argument("--endpoints", type=int, default=4096, help="to open at the most")
    parser.add_argument("--cut-off-bytes", type=int, default=16 * GIB, help="to write to an endpoint that is closed")
    parser.add_argument("--only", nargs="+", choices=[ask.__name__ for ask in QUESTIONS], help="these questions alone")
    parser.add_argument("--json", type=Path, help="file for the rows; else they are printed")
    return parser.parse_args()


def serve(given: argparse.Namespace, end: End) -> None:
    """Be the other side until the asking one has gone."""
    with socket.create_server((given.host, given.port)) as listener:
        print(f"serving on {given.host}:{listener.getsockname()[1]}", flush=True)
        connection, _ = listener.accept()
        calls = (end.about, end.open, end.connect, end.echo, end.watch, end.cut_off)
        Channel(connection).serve({call.__name__: call for call in calls})


def asked(both: Both, only: list[str] | None) -> list[dict[str, Any]]:
    """A row for each question."""
    rows: list[dict[str, Any]] = [{"question": "machine", "answer": machine()}]
    for ask in QUESTIONS:
        if only and ask.__name__ not in only:
            continue
        row: dict[str, Any] = {"question": ask.__name__, "asked": (ask.__doc__ or "").strip()}
        try:
            row["answer"], row["evidence"] = ask(both)
        except Skipped as reason:
            row["skipped"] = str(reason)
        except (PushKVError, RuntimeError) as error:
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        result = next(f"{name}: {row[name]}" for name in ("answer", "skipped", "failed") if name in row)
        print(f"{row['question']}: {row['asked']} {result}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """One side of it."""
    given = arguments()
    device, _, index = given.device.partition(":")
    settings = Settings(given.provider, given.host, given.libfabric, device, int(index or 0), given.size)
    end = End(settings)
    try:
        if given.serve:
            serve(given, end)
            return
        host, _, port = given.peer.rpartition(":")
        scale = Scale(given.rounds, given.bandwidth_bytes, given.registered_bytes, given.endpoints, given.cut_off_bytes)
        try:
            channel = Channel(socket.create_connection((host, int(port)), timeout=10))
        except OSError as error:
            sys.exit(f"nobody answers at {given.peer} ({error}); start it there with --serve first")
        rows = asked(Both(end, channel, scale), given.only)
        channel.close()
    finally:
        end.close()
    text = json.dumps(rows, indent=1) + "\n"
    if given.json:
        given.json.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
