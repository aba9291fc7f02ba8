"""How memory is registered: by descriptors of the device's driver or by its address, in one part or in many.

Drivers and cards have limits of their own for the length of a registration, which nothing tells; so smaller and
smaller parts are tried. A part of device memory is offered by a descriptor first (a dmabuf, one for each rail, since a
card's driver can use each only once), which needs no module in the kernel that knows both card and device. Where there
is none, or it is refused, the library is given the address and finds its own way.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from neuron_pushkv.device.base import Dmabuf, Memory, MemoryKind
from neuron_pushkv.errors import DeviceError, RegistrationError
from neuron_pushkv.fabric.core import WHOLE, Core
from neuron_pushkv.fabric.opening import INTERFACES

SMALLEST_PART = 12
"""As a shift: a page."""
MOST_DESCRIPTORS = 512
"""Open at once. A process may have 1024 as a rule, for everything."""

logger = logging.getLogger(__name__)


def shifts(length: int, most_parts: int) -> Iterator[int]:
    """Sizes of parts to try, as shifts: the whole, then the largest power of two within ``length``, halves of that."""
    yield WHOLE
    for shift in range((length - 1).bit_length() - 1, SMALLEST_PART - 1, -1):
        if (length - 1) >> shift >= most_parts:
            return
        yield shift


def parts(memory: Memory, shift: int) -> Iterator[Memory]:
    """``memory`` in parts of ``1 << shift`` bytes, the last one shorter."""
    size = 1 << shift
    for start in range(0, memory.length, size):
        yield replace(memory, address=memory.address + start, length=min(size, memory.length - start))


class Registrar:
    """Registers host memory, and that of one kind of device. ``export`` and ``hint`` are its accelerator's."""

    def __init__(
        self, core: Core, device: MemoryKind, export: Callable[[Memory], Dmabuf | None] | None, hint: str
    ) -> None:
        self._core = core
        self._device = device
        self._export = export
        self._hint = f"; {hint}" if hint else ""
        self._copied = False

    def register(self, memory: Memory) -> tuple[int, bytes]:
        """Returns what :meth:`Core.register` does. Raises :class:`RegistrationError`."""
        if memory.kind is MemoryKind.HOST:
            return self._sized(memory, INTERFACES[MemoryKind.HOST])
        if not memory.mapped:
            raise RegistrationError(
                f"{memory.kind} memory that is not mapped can't be registered, since no card can be shown where it is; "
                f"it has to be copied through host memory{self._hint}"
            )
        if memory.kind is not self._device:
            raise RegistrationError(
                f"{memory.kind} memory can't be registered: this transport was opened for {self._device} memory"
            )
        try:
            return self._sized(memory, INTERFACES[memory.kind])
        except RegistrationError as error:
            facts = self._core.facts
            if facts.provider.startswith("tcp") and error.error == -errno.ENOSYS:
                return self._as_host_memory(memory)
            raise RegistrationError(
                f"{error}; libfabric {facts.version} at {facts.library} can't use that {memory.kind} memory"
                f"{self._hint}",
                error.error,
            ) from error

    def _as_host_memory(self, memory: Memory) -> tuple[int, bytes]:
        """Over tcp the CPU copies in any case, and can: the memory is mapped."""
        if not self._copied:
            self._copied = True
            logger.warning(
                "provider 'tcp' copies %s memory with the CPU through its mapping, which is slow and only for trying "
                "things out; set 'provider' to 'efa' for what the cards can do",
                memory.kind,
            )
        return self._sized(memory, INTERFACES[MemoryKind.HOST])

    def _sized(self, memory: Memory, interface: int) -> tuple[int, bytes]:
        first: RegistrationError | None = None
        for shift in shifts(memory.length, self._core.lib.PK_MOST_PARTS):
            registered = self._by_descriptors(memory, interface, shift)
            if registered is not None:
                return registered
            try:
                return self._core.register(memory, interface, shift)
            except RegistrationError as error:
                first = first or error
                if error.error in (0, -errno.ENOSYS):  # Whatever its size.
                    break
        assert first is not None
        raise first

    def _by_descriptors(self, memory: Memory, interface: int, shift: int) -> tuple[int, bytes] | None:
        facts = self._core.facts
        if self._export is None or memory.kind is MemoryKind.HOST or not facts.takes_dmabufs:
            return None
        if len(facts.nics) * len(range(0, memory.length, 1 << shift)) > MOST_DESCRIPTORS:
            return None
        dmabufs: list[Dmabuf] = []
        try:
            for _ in facts.nics:
                for part in parts(memory, shift):
                    dmabuf = self._export(part)
                    if dmabuf is None:
                        return None
                    dmabufs.append(dmabuf)
            return self._core.register(memory, interface, shift, dmabufs)
        except (DeviceError, RegistrationError) as error:
            logger.info("%s memory is not registered by descriptors (%s), but by its address", memory.kind, error)
            return None
        finally:
            for dmabuf in dmabufs:
                os.close(dmabuf.fd)
