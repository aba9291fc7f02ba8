"""Neuron devices behind the accelerator seam. Not run on one yet: see ``docs/first-hour.md``."""

from __future__ import annotations

from pathlib import Path

from neuron_pushkv.device.base import Copies, Dmabuf, Memory, MemoryKind, ReadyWord
from neuron_pushkv.device.neuron import maps, order
from neuron_pushkv.device.neuron.declarations import ffi
from neuron_pushkv.device.neuron.runtime import NeuronFacts, Runtime
from neuron_pushkv.device.neuron.status import RESOURCE, SUCCESS, error_for
from neuron_pushkv.device.neuron.steps import Steps
from neuron_pushkv.device.neuron.tensors import Tensors
from neuron_pushkv.errors import DeviceError

SLAB_BYTES = 256 << 20
"""From this size on the driver gives cards pages of 2 MiB, else of 4 KiB (aws-neuron-driver, ``neuron_p2p.c``)."""
_PAGE = 4096
_BDF_ROOM = 64


class NeuronAccelerator:
    """The Neuron core that torch calls ``neuron:<index>``; -1 for the first. ``library``: libnrt, if not the usual one.

    The runtime is taken as it is, or initialised if nobody has done so. ``device_folder`` and ``sys`` are where the
    kernel shows devices. Raises :class:`DeviceError`.
    """

    name = "neuron"
    needs_flush = True
    slab_bytes = SLAB_BYTES

    def __init__(
        self, index: int = -1, library: Path | None = None, device_folder: Path = Path("/dev"), sys: Path = Path("/sys")
    ) -> None:
        self._device_folder, self._sys = device_folder, sys
        self._runtime = Runtime(max(index, 0), library)
        self.hint = self._runtime.hint
        visible = self._runtime.visible_cores
        # Frameworks that show each process one core still number it by its rank.
        self._vnc = 0 if visible == 1 else max(index, 0)
        if self._vnc >= visible:
            self._runtime.close()
            raise DeviceError(
                f"neuron:{index} is not among the {visible} cores that this process sees; look at {order.VISIBLE_CORES}"
            )
        self._index = max(index, 0)
        self._tensors = Tensors(self._runtime.library, self._vnc)
        self._steps = Steps()

    def describe(self, address: int, length: int) -> Memory:
        """Raises :class:`DeviceError` for an address of 0, and for one that is not mapped here."""
        if address == 0:
            raise DeviceError(order.NO_ADDRESS)
        slab = self._tensors.holding(address, length)
        if slab is None and maps.holding(address, length) is None:
            raise DeviceError(
                f"{length} bytes at {address:#x} don't lie in one mapping of this process and can't be registered; set "
                f"{order.MAP_HBM}=1 before the Neuron runtime is initialised"
            )
        return Memory(address, length, MemoryKind.NEURON, self._index, slab is None or slab.mapped)

    def allocate(self, length: int) -> Memory:
        """A tensor of the runtime's, which frameworks on this core see as memory in use."""
        slab = self._tensors.allocate(length)
        if not slab.mapped:
            self.hint = self.hint or order.NO_ADDRESS
        return Memory(slab.address, length, MemoryKind.NEURON, self._index, slab.mapped)

    def free(self, memory: Memory) -> None:
        """Raises :class:`DeviceError` for what was not allocated here."""
        self._tensors.free(memory.address)

    def export(self, memory: Memory) -> Dmabuf | None:
        """By ``nrt_get_dmabuf_fd_v2``, or the older function; ``None`` also where these fail, as in runtime 2.32.31.

        The driver exports from a page on, and that page is the descriptor's start (aws-neuron-driver,
        ``neuron_dmabuf.c``). Raises :class:`~neuron_pushkv.errors.NeuronOutOfMemory` for NRT_RESOURCE, after which
        libfabric would not register it in any other way either (``src/hmem_neuron.c``).
        """
        library = self._runtime.library
        if not memory.mapped:
            return None
        fd, offset = ffi.new("int *"), ffi.new("uint64_t *")
        if library.has("nrt_get_dmabuf_fd_v2"):
            function = "nrt_get_dmabuf_fd_v2"
            status = library.status(function, memory.address, memory.length, fd, offset)
        elif library.has("nrt_get_dmabuf_fd"):
            function = "nrt_get_dmabuf_fd"
            offset[0] = memory.address % _PAGE
            status = library.status(function, memory.address - offset[0], memory.length + offset[0], fd)
        else:
            return None
        if status == RESOURCE:
            raise error_for(status, function)
        return Dmabuf(int(fd[0]), int(offset[0])) if status == SUCCESS else None

    def nics(self, memory: Memory) -> tuple[str, ...]:
        """The one that the runtime says is attached to the memory's device, else by the published tables."""
        from neuron_pushkv.device.topology import neuron_nics

        family, _ = self._runtime.instance()
        nics: tuple[str, ...] = neuron_nics(self._device(), self._attached_bdf(memory), family, sys=self._sys)
        return nics

    def _attached_bdf(self, memory: Memory) -> str | None:
        """PCI address of the NIC that is attached to that memory's device, as "0000:c9:00.0"."""
        if not memory.mapped or not self._runtime.library.has("nrt_get_attached_efa_bdf"):
            return None
        room, length = ffi.new("char[]", _BDF_ROOM), ffi.new("size_t *", _BDF_ROOM)
        address = ffi.cast("void *", memory.address)
        if self._runtime.library.status("nrt_get_attached_efa_bdf", address, room, length) != SUCCESS:
            return None
        return ffi.string(room).decode(errors="replace") or None

    def _device(self) -> int:
        """Number of the device that the core belongs to, as the machine counts (the N of ``/dev/neuronN``)."""
        cores = order.visible_cores()
        core = cores[self._vnc] if self._vnc < len(cores) else self._vnc
        devices = order.devices(self._device_folder)
        each = self._runtime.count("nrt_get_total_vnc_count") // devices if devices else 0
        return self._runtime.host_device(core // each) if each else self._index

    @property
    def failed(self) -> str:
        """A step of which PyTorch reported an error."""
        return self._steps.failed

    def begin_step(self, step: int, ended: int) -> None:
        """Told by the connector, for :meth:`mark_step`."""
        self._steps.begin(step, ended)

    def mark_step(self) -> ReadyWord | None:
        """By what PyTorch for Neuron offers, or else by vLLM's having the step's outputs. Raises :class:`DeviceError`
        where there is neither."""
        return self._steps.mark()

    def read(self, copies: Copies) -> None:
        """In batches, where the runtime has them."""
        self._tensors.read(copies)

    def write(self, copies: Copies) -> None:
        """Likewise."""
        self._tensors.write(copies)

    def facts(self) -> NeuronFacts:
        """What there is, for people."""
        runtime, library = self._runtime, self._runtime.library
        family, architecture = runtime.instance()
        used, limit = runtime.memory(self._vnc)
        exports = [name for name in ("nrt_get_dmabuf_fd_v2", "nrt_get_dmabuf_fd") if library.has(name)]
        return NeuronFacts(
            library=str(library.path),
            version=runtime.version(),
            family=family,
            architecture=architecture,
            cores=runtime.count("nrt_get_total_vnc_count"),
            visible_cores=runtime.visible_cores,
            bytes_used=used,
            bytes_limit=limit,
            initialised_here=runtime.initialised_here,
            dmabuf=exports[0] if exports else "none",
            attached_nic=library.has("nrt_get_attached_efa_bdf"),
            steps=self._steps.told_by,
            hint=self.hint,
        )

    def close(self) -> None:
        """The runtime is closed only if it was initialised here."""
        self._steps.close()
        self._tensors.close()
        self._runtime.close()
