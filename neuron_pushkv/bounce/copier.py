"""The thread that moves bytes between the device and the staging cache, a batch at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from neuron_pushkv.device.base import Accelerator, Copies
from neuron_pushkv.errors import DeviceError

logger = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20
"""How much is copied in one go. While it goes over the network the next batch is copied; and whoever wants to send does
not wait long for somebody who receives."""

Ended: TypeAlias = Callable[[DeviceError | None], None]


@dataclass(frozen=True, eq=False)
class _Job:
    to_host: bool
    copies: Copies
    ended: Ended


class Copier:
    """Copies in the order in which it is asked to, without ``lock``, which is the engine's, and without the GIL."""

    def __init__(self, accelerator: Accelerator, lock: threading.RLock) -> None:
        self._accelerator = accelerator
        self._lock = lock
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pushkv-copier", daemon=True)
        self._thread.start()

    def to_host(self, copies: Copies, ended: Ended) -> None:
        """Read from the device. ``ended`` is called under the lock, with what went wrong if something did."""
        self._jobs.put(_Job(True, copies, ended))

    def to_device(self, copies: Copies, ended: Ended) -> None:
        """Write to it, likewise."""
        self._jobs.put(_Job(False, copies, ended))

    def close(self) -> None:
        """Wait for the batch that is being copied; what comes after it is left. Not under the lock."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            error = self._copy(job)
            with self._lock:
                try:
                    job.ended(error)
                except Exception:
                    logger.exception("a bug in neuron_pushkv: please report it; the transfer concerned will time out")

    def _copy(self, job: _Job) -> DeviceError | None:
        try:
            if job.to_host:
                self._accelerator.read(job.copies)
            else:
                self._accelerator.write(job.copies)
        except DeviceError as error:
            return error
        except Exception as error:
            logger.exception("the accelerator %s has failed in a way of its own", self._accelerator.name)
            return DeviceError(f"{self._accelerator.name} could not copy {len(job.copies)} runs of memory: {error!r}")
        return None
