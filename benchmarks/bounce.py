"""A whole prompt whose KV the network can't be shown, on either side: through staging caches, against a plain memcpy.

    python -m benchmarks.bounce --json bounce.json

The device is this machine's own memory, which the engine is told that only the accelerator can move: each batch is as
many memcpys as it has rows, in C and without the GIL. So every byte is copied three times, from the cache into staging
memory, over the network, and from there into the other cache; the first two go on at the same time. Beside it the same
prompt straight from cache to cache, and one memcpy of as many bytes. All take turns; timed as in ``bulk``, over the
first of ``--providers``.
"""

from __future__ import annotations

from benchmarks import pushing
from benchmarks.bulk import Copy, Push, Runner
from benchmarks.native import native
from benchmarks.options import Options, alone
from benchmarks.rows import Row, row
from benchmarks.work import ORDERS, Work
from neuron_pushkv.device.base import Accelerator, Copies, Memory
from neuron_pushkv.device.host import HostAccelerator


class Copying(HostAccelerator):
    """A device whose memory is moved in batches."""

    def read(self, copies: Copies) -> None:
        """As fast as this machine's memory is."""
        self._copy(copies, to_host=True)

    def write(self, copies: Copies) -> None:
        """Likewise."""
        self._copy(copies, to_host=False)

    def _copy(self, copies: Copies, *, to_host: bool) -> None:
        core = native()
        core.lib.copy_rows(core.ffi.cast("uint64_t *", copies.ctypes.data), len(copies), to_host)


class _Hidden(pushing.Side):
    def memory(self) -> Memory:
        return Memory(self.cache.address, self.cache.bytes, mapped=False)

    def accelerator(self) -> Accelerator:
        native()  # Compiled before anything is timed.
        return Copying()


class Sender(_Hidden, pushing.Sender):
    """Reads into its staging cache."""


class Receiver(_Hidden, pushing.Receiver):
    """Writes from its staging cache."""


class Bounced(Push):
    """A pair of them."""

    engine = "pushkv, bounced"
    sides = Sender, Receiver


def measure(options: Options) -> list[Row]:
    """In every order, over one provider."""
    work = Work(options.tokens)
    runners: list[Runner] = []
    rows = []
    try:
        runners.append(Copy(work))
        for pair in (Push, Bounced):
            runners.append(pair(work, options.providers[0], options.libfabric))
        for order in ORDERS:
            rows += _measure(runners, order, options.repeats)
            options.say(f"{order}: done")
    finally:
        for runner in runners:
            runner.close()
    return rows


def _measure(runners: list[Runner], order: str, repeats: int) -> list[Row]:
    writes = {runner: runner.prepare(order) for runner in runners}
    times: dict[Runner, list[float]] = {runner: [] for runner in runners}
    for _ in range(repeats):
        for runner in runners:
            times[runner].append(runner.run())
    return [
        row(
            "transfer",
            runner.engine,
            runner.provider,
            order=order,
            tokens=runner.work.tokens,
            size=runner.work.bytes,
            writes=writes[runner],
            seconds=times[runner],
            rate=True,
            versions=runner.versions,
        )
        for runner in runners
    ]


if __name__ == "__main__":
    alone(measure)
