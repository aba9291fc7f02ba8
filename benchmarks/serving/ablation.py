"""What each of our own mechanisms buys: the same engines and prompts, with one setting changed.

Streaming is asked about over shm, where decode's core makes the copies while prefill's computes, as a network card
would. Contiguous block tables are asked about over tcp, where a write costs most, and on worn pools: on fresh ones
every order is a good one.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.serving.contestants import Contestant
from benchmarks.serving.handover import Cell


@dataclass(frozen=True)
class Question:
    """One cell, and the values of one of the connector's settings; what differs is said in terms of the first."""

    name: str
    setting: str
    values: tuple[str, ...]
    provider: str
    worn: bool
    cell: Cell

    def contestant(self, value: str) -> Contestant:
        """Our connector with the setting at that value."""
        extra = {"provider": self.provider, self.setting: value}
        return Contestant(f"{self.setting} {value}", "together", "PushKVConnector", extra, self.worn)


QUESTIONS = (
    Question("streaming", "push_granularity", ("request", "step", "layer"), "shm", False, Cell(4097, cached=False)),
    Question(
        "contiguous block tables", "block_order", ("vllm", "sorted", "runs"), "tcp", True, Cell(8193, cached=True)
    ),
)
