"""The Neuron runtime of this process: initialised by us, or by the framework that runs here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from neuron_pushkv import __version__
from neuron_pushkv.device.neuron import order
from neuron_pushkv.device.neuron.declarations import ffi
from neuron_pushkv.device.neuron.library import Library
from neuron_pushkv.device.neuron.status import CLOSED, FAILURE, FORKED, SUCCESS, UNINITIALIZED, error_for
from neuron_pushkv.errors import NeuronError

logger = logging.getLogger(__name__)

FAMILIES = {
    1: "inf1",
    2: "trn1",
    3: "trn1n",
    4: "inf2",
    5: "trn2",
    6: "trn2n",
    7: "inf2e",
    8: "trn2p",
    9: "trn2u",
    10: "trn2e",
    11: "trn2eu",
    12: "trn2ac",
    13: "trn2uac",
    14: "trn3",
    15: "trn3pds98",
}
"""``NRT_INSTANCE_*`` of ``nrt.h``."""
_PROBE_BYTES = 4096


@dataclass(frozen=True)
class NeuronFacts:
    """What the runtime says of itself, for people. ``None``: this runtime can't say."""

    library: str
    version: str | None
    family: str | None
    architecture: str | None
    cores: int
    """Logical cores of the machine."""
    visible_cores: int
    """Of these, how many this process has."""
    bytes_used: int | None
    bytes_limit: int | None
    """Of the device memory of the core in use."""
    initialised_here: bool
    """Not by somebody else in this process."""
    dmabuf: str
    """The function that exports memory, or "none"."""
    attached_nic: bool
    """Whether the runtime can name the NIC that is attached to a device."""
    steps: str
    """What tells that a step has finished."""
    hint: str
    """What is known to be wrong."""


class Runtime:
    """See the module's text. ``core``: the core of the machine to claim where the environment names none.

    ``hint`` says what is wrong with the order of things (:mod:`~neuron_pushkv.device.neuron.order`), or nothing. Raises
    :class:`~neuron_pushkv.errors.DeviceError` without libnrt, in a forked child, and for a runtime that is closed.
    """

    def __init__(self, core: int, library: Path | None = None) -> None:
        first = order.libfabric_came_first()
        self.library = Library(library)
        self.initialised_here = self._state() == UNINITIALIZED
        if self.initialised_here:
            order.prepare(core)
            self.library.call("nrt_init", self.library.c.NRT_FRAMEWORK_TYPE_NO_FW, b"", __version__.encode())
        unmapped = order.unmapped()
        for wrong in filter(None, (first if first == order.LOST else "", unmapped)):
            logger.warning("%s", wrong)
        self.hint = "; ".join(filter(None, (first, unmapped)))

    def _state(self) -> int:
        """:data:`SUCCESS` if it is initialised, else :data:`UNINITIALIZED`. Asks by an allocation in host memory, since
        the calls that ask nothing of the runtime are allowed before it is initialised."""
        tensor = ffi.new("nrt_tensor_t **")
        placement = self.library.c.NRT_TENSOR_PLACEMENT_HOST
        status = self.library.status("nrt_tensor_allocate", placement, -1, _PROBE_BYTES, b"pushkv-probe", tensor)
        if status == SUCCESS:
            self.library.c.nrt_tensor_free(tensor)
        elif status == FAILURE:
            raise NeuronError(FAILURE, f"the Neuron runtime refuses every call, as it does when {FORKED}")
        elif status != UNINITIALIZED:
            raise error_for(status, "nrt_tensor_allocate" if status != CLOSED else "opening the Neuron runtime")
        return status

    def count(self, function: str) -> int:
        """One of the runtime's counts of cores."""
        number = ffi.new("uint32_t *")
        self.library.call(function, number)
        return int(number[0])

    @property
    def visible_cores(self) -> int:
        """Logical cores that this process has."""
        return self.count("nrt_get_visible_vnc_count")

    def version(self) -> str | None:
        """As "2.34.10.0"."""
        if not self.library.has("nrt_get_version"):
            return None
        version = ffi.new("nrt_version_t *")
        self.library.call("nrt_get_version", version, ffi.sizeof("nrt_version_t"))
        return f"{version.rt_major}.{version.rt_minor}.{version.rt_patch}.{version.rt_maintenance}"

    def instance(self) -> tuple[str | None, str | None]:
        """Family of the instance ("trn2") and architecture of its devices; ``None`` where the runtime can't say."""
        if not self.library.has("nrt_get_instance_info"):
            return None, None
        info = ffi.new("nrt_instance_info_t *")
        if self.library.status("nrt_get_instance_info", info, ffi.sizeof("nrt_instance_info_t")) != SUCCESS:
            return None, None
        return FAMILIES.get(info.family), ffi.string(info.arch_name).decode(errors="replace") or None

    def memory(self, vnc: int) -> tuple[int | None, int | None]:
        """Bytes of that core's memory that are used, and that there are."""
        if not self.library.has("nrt_get_vnc_memory_stats"):
            return None, None
        stats, written = ffi.new("nrt_vnc_memory_stats_t *"), ffi.new("size_t *")
        size = ffi.sizeof("nrt_vnc_memory_stats_t")
        if self.library.status("nrt_get_vnc_memory_stats", vnc, stats, size, written) != SUCCESS or written[0] < size:
            return None, None
        return int(stats.bytes_used), int(stats.bytes_limit)

    def host_device(self, device: int) -> int:
        """The machine's number of a device that a container may know by another."""
        number = ffi.new("uint32_t *")
        if not self.library.has("nrt_host_device_id_get"):
            return device
        return int(number[0]) if self.library.status("nrt_host_device_id_get", device, number) == SUCCESS else device

    def close(self) -> None:
        """End the runtime, if it was initialised here. Idempotent."""
        if self.initialised_here:
            self.initialised_here = False
            self.library.c.nrt_close()
