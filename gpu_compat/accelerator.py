"""The accelerator of CUDA devices."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gpu_compat.context import Context
from gpu_compat.copying import Copying
from gpu_compat.library import Library
from gpu_compat.memory import DeviceMemory
from gpu_compat.slabs import Slabs
from gpu_compat.steps import StreamWords, current_stream, open_marker
from neuron_pushkv.device import topology
from neuron_pushkv.device.base import Copies, Dmabuf, Memory, ReadyWord

SLAB_BYTES = 256 << 20
"""Descriptors and registrations are counted, so few and large ones."""
HOPPER = 9
"""Compute capability from which on no received write needs to be flushed (facts of NCCL's and EFA's plugins)."""

_NO_DMABUF = (
    "the CUDA driver offers no dmabufs here, so the card's driver must know CUDA memory itself: use NVIDIA's open "
    "kernel modules, or load efa_nv_peermem (EFA) or nvidia_peermem (InfiniBand)"
)
_NOT_SHOWN = "this device's memory is out of other devices' reach (no dmabufs, no GPUDirect RDMA)"


@dataclass(frozen=True)
class CudaFacts:
    """What a CUDA device and its driver can do, for people and for checks."""

    driver: str
    """The newest CUDA that it serves ("13.0")."""
    device: str
    """"NVIDIA H200"."""
    index: int
    bus_id: str
    """"0000:3b:00.0"."""
    capability: tuple[int, int]
    """(9, 0) is Hopper."""
    dmabuf: bool
    """Whether memory can be exported as a descriptor."""
    rdma: bool
    """Whether other devices can reach its memory by the driver's own interface (GPUDirect RDMA)."""
    stream_writes: bool
    """Whether the device writes ready words itself; else a thread of ours does, when an event has woken it."""
    needs_flush: bool


class CudaAccelerator:
    """CUDA device ``index`` (-1: the first) of those that the process sees. ``library``: libcuda, if not the usual one.

    Uses the device's primary context, as torch does. Raises :class:`~neuron_pushkv.errors.DeviceError`.
    """

    name = "cuda"
    slab_bytes = SLAB_BYTES

    def __init__(self, index: int = -1, library: Path | None = None) -> None:
        with ExitStack() as closing:
            self._context = Context(Library(library), max(index, 0))
            closing.callback(self._context.close)
            self._memory = DeviceMemory(self._context)
            self._copying = Copying(self._context)
            closing.callback(self._copying.close)
            self._slabs = Slabs(self._context, self._memory, self._copying)
            closing.callback(self._slabs.close)
            self._marker = open_marker(self._context)
            closing.callback(self._marker.close)
            self._facts = self._find_facts()
            self._closing = closing.pop_all()
        self.needs_flush = self._facts.needs_flush
        self.hint = "" if self._memory.dmabuf else _NO_DMABUF if self._memory.shown else _NOT_SHOWN

    def facts(self) -> CudaFacts:
        """What has been found."""
        return self._facts

    def _find_facts(self) -> CudaFacts:
        context = self._context
        version = context.number("cuDriverGetVersion")
        major = context.attribute("COMPUTE_CAPABILITY_MAJOR")
        ordering = context.attribute("GPU_DIRECT_RDMA_WRITES_ORDERING")
        return CudaFacts(
            driver=f"{version // 1000}.{version % 1000 // 10}",
            device=context.name(),
            index=context.index,
            bus_id=context.bus_id(),
            capability=(major, context.attribute("COMPUTE_CAPABILITY_MINOR")),
            dmabuf=self._memory.dmabuf,
            rdma=bool(context.attribute("GPU_DIRECT_RDMA_SUPPORTED")),
            stream_writes=isinstance(self._marker, StreamWords),
            needs_flush=major < HOPPER and ordering < context.library.c.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER,
        )

    def describe(self, address: int, length: int) -> Memory:
        """CUDA memory of this device in one piece; not managed, the host's, or torch's expandable segments."""
        return self._memory.describe(address, length)

    def allocate(self, length: int) -> Memory:
        """Allocated by ``cuMemAlloc``, so not by torch, whose own account of free memory doesn't see it."""
        return self._slabs.allocate(length)

    def free(self, memory: Memory) -> None:
        """Waits for the device's work, as ``cuMemFree`` does."""
        self._slabs.free(memory)

    def export(self, memory: Memory) -> Dmabuf | None:
        """A dmabuf of the pages that hold it, where driver and device have dmabufs."""
        return self._memory.export(memory)

    def nics(self, memory: Memory) -> tuple[str, ...]:
        """By the table of this instance's family, else by distance over PCI."""
        if not memory.mapped:
            return ()
        return topology.cuda_nics(self._facts.bus_id, self._facts.index, topology.instance_family())

    @property
    def failed(self) -> str:
        """A step of which the driver reported an error."""
        return self._marker.failed

    def mark_step(self) -> ReadyWord | None:
        """For the stream that torch launches on now in this thread, or the default stream."""
        return self._marker.mark(current_stream(self._context.index))

    def read(self, copies: Copies) -> None:
        """On a stream of its own, which waits for nothing else: what is read must have been computed."""
        self._copying.read(copies)

    def write(self, copies: Copies) -> None:
        """Likewise."""
        self._copying.write(copies)

    def close(self) -> None:
        """Waits for marked steps, since the device is yet to write their words. The primary context may live on."""
        self._closing.close()
