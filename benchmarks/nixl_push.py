"""NIXL over UCX, driven as vLLM's push connector drives it.

The agent has a progress thread and vLLM's default of four UCX threads. At first contact both sides' blocks are
described once, a descriptor for each block of each region. A transfer is the index lists of its blocks, one prepared
WRITE of all of them with a notification, and the receiver looks for that. The sender looks for the end too, as vLLM
does at every step: with several threads it is that look which sends the notification.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from benchmarks.gil import watch
from benchmarks.work import REGIONS, Cache, Work

REPORT_SECONDS = 30
WATCHED_PAUSE = 0.03
"""How often the end of a transfer whose GIL is watched is looked for: looking takes the GIL too."""
INSTALL = "NIXL is not installed, so its rows are missing: pip install --no-deps nixl==1.5.0 nixl-cu12==1.5.0"


def version() -> str | None:
    """NIXL's, or None where it can't be used."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        import nixl._api  # noqa: F401

        return version_of("nixl-cu12")
    except (ImportError, PackageNotFoundError):
        return None


class Side:
    """What both have."""

    def __init__(self, name: str, work: Work) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.work = work
        self.cache = Cache(work)
        self.cache.blank()
        self.table: list[int] = []
        self.agent: Any = nixl_agent(name, nixl_agent_config(num_threads=4, capture_telemetry=True))
        whole = [(self.cache.region(index), work.region_bytes, 0, "") for index in range(REGIONS)]
        self.agent.register_memory(self.agent.get_reg_descs(whole, "DRAM"))

    def close(self) -> None:
        """Without taking anything apart: UCX does not survive that at the end of a process."""
        os._exit(0)

    def contact(self) -> tuple[bytes, int]:
        """What the other side needs."""
        return self.agent.get_agent_metadata(), self.cache.address

    def descriptors(self, agent: str, start: int) -> Any:
        """Of every block of every region of a cache, prepared."""
        blocks: Any = np.arange(REGIONS * self.work.cache_blocks, dtype=np.uint64) * self.work.block_bytes + start
        table = np.stack((blocks, np.full_like(blocks, self.work.block_bytes), np.zeros_like(blocks)), axis=1)
        return self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(table, "DRAM"))

    def indices(self, table: list[int]) -> Any:
        """Of a block table's descriptors, region after region."""
        return (np.arange(REGIONS)[:, None] * self.work.cache_blocks + np.asarray(table)[None, :]).flatten()


class Sender(Side):
    """Has the prompt."""

    def connect(self, metadata: bytes, start: int) -> float:
        """First contact; returns how long it took."""
        began = time.perf_counter()
        name = self.agent.add_remote_agent(metadata)
        self.remote = self.descriptors(name if isinstance(name, str) else name.decode(), start)
        self.local = self.descriptors("NIXL_INIT_AGENT", self.cache.address)
        return time.perf_counter() - began

    def prepare(self, order: str, salt: int) -> None:
        """Put the prompt where the block table of that order says."""
        self.table = self.work.table(order, "sender")
        self.there = self.work.table(order, "receiver")
        self.cache.fill(self.table, salt)

    def seal(self, number: int, pause: float) -> int:
        """Its KV is ready: push it, and look every ``pause`` seconds for the end. Returns when it was ready."""
        ready = time.monotonic_ns()
        handle = self.agent.make_prepped_xfer(
            "WRITE",
            self.local,
            self.indices(self.table),
            self.remote,
            self.indices(self.there),
            notif_msg=f"t{number}:1".encode(),
        )
        self.agent.transfer(handle)
        while (state := self.agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR" or time.monotonic_ns() > ready + REPORT_SECONDS * 1e9:
                raise RuntimeError(f"NIXL's transfer {number} ended as {state}")
            time.sleep(pause)
        self.agent.release_xfer_handle(handle)
        return ready

    def watch(self, number: int, probed: bool) -> float:
        """One transfer; see :func:`benchmarks.gil.watch`."""
        return watch(lambda: self.seal(number, WATCHED_PAUSE), probed=probed)


class Receiver(Side):
    """Wants the prompt's KV."""

    def prepare(self, order: str) -> None:
        """Clear the cache, and choose blocks by the table of that order."""
        self.table = self.work.table(order, "receiver")
        self.cache.blank()

    def holds(self, salt: int) -> bool:
        """Whether it has come, every byte of it."""
        return self.cache.holds(self.table, salt)

    def report(self, number: int, pause: float) -> int:
        """Look every ``pause`` seconds for the notification; returns when it was there."""
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline:
            if any(f"t{number}:1".encode() in texts for texts in self.agent.get_new_notifs().values()):
                return time.monotonic_ns()
            time.sleep(pause)
        raise RuntimeError(f"no notification within {REPORT_SECONDS} s")

    def watch(self, number: int, probed: bool) -> float:
        """One transfer; see :func:`benchmarks.gil.watch`."""
        return watch(lambda: self.report(number, WATCHED_PAUSE), probed=probed)
