"""One NIXL agent, which serves as one endpoint; everything here that knows NIXL's own interface.

The bindings beneath NIXL's Python API are used, because that API has no way to set how often the progress thread looks
at its devices: as it is, that thread never sleeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import secrets
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from neuron_pushkv.device.base import Memory
from neuron_pushkv.errors import FabricError, RegistrationError, TransportError
from neuron_pushkv.transport.nixl.parts import Part
from neuron_pushkv.transport.nixl.wire import KINDS, Place

PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""NIXL's builds. Where several are installed its package "nixl" chooses, by torch's CUDA."""
UCX = "UCX"

UCX_CONFIGURATION = "TLS=^sm"
"""UCX without the transports that copy into another process's memory by themselves (CMA and its like, called ``sm``).

They are its fastest between processes of one host, but nothing that the receiver does ends them: a sender that is
stopped in the middle of a copy goes on with it when it is resumed, whatever has become of that memory.
"""

_EVENT_DRIVEN_DELAY = 50_000
"""Microseconds. UCX's thread sleeps until there is work; this long at most, should it have missed something."""
_POLLING_DELAY = 1000
"""Microseconds between two looks of other backends' progress threads."""
_NETLINK = "libnl-route-3.so.200"


@cache
def bindings() -> Any:
    """NIXL's compiled module. Raises :class:`FabricError` if there is none."""
    builds = [name for name in PACKAGES if find_spec(name) is not None]
    if not builds:
        raise FabricError("NIXL is not installed; pip install 'neuron-pushkv[nixl]', or set transport to 'fabric'")
    name = builds[0] if len(builds) == 1 else "nixl"
    _keep_netlinks_apart()
    try:
        return importlib.import_module(f"{name}._bindings")
    except ImportError as error:
        raise FabricError(f"NIXL can't be imported: {error}") from error


def _keep_netlinks_apart() -> None:
    """Load the system's netlink library first, bound to itself.

    NIXL's wheels bring their own, and the system's may be loaded after it (by libefa). Its start-up then calls into the
    wheel's, and the process ends with a segmentation fault where it should just end.
    """
    try:
        ctypes.CDLL(_NETLINK, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    except OSError:
        return  # No such library here, so there is nothing to keep apart.


@cache
def problems() -> tuple[type[Exception], ...]:
    """What the bindings raise: their own exceptions, and RuntimeError for any other of C++."""
    library = bindings()
    own = [getattr(library, name) for name in dir(library) if name.startswith("nixl") and name.endswith("Error")]
    return (*own, RuntimeError, ValueError)


def library_name() -> str:
    """For people: "NIXL 1.5.0"."""
    package = bindings().__name__.partition(".")[0].replace("_", "-")
    try:
        return f"NIXL {version(package)}"
    except PackageNotFoundError:
        return "NIXL"


def is_confined() -> bool:
    """Whether UCX does without what a fence can't end; it is as the environment says where that says anything."""
    return "UCX_TLS" not in os.environ


class Agent:
    """An agent with one backend. Its methods are called by one thread at a time."""

    def __init__(self, backend: str) -> None:
        library = bindings()
        config = library.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = library.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = _EVENT_DRIVEN_DELAY if backend == UCX else _POLLING_DELAY
        self.name = secrets.token_hex(8)
        self.remote: str | None = None
        self._agent = library.nixlAgent(self.name, config)
        self._segments = dict(zip(KINDS, (library.DRAM_SEG, library.VRAM_SEG), strict=True))
        plugins = self._agent.getAvailPlugins()
        if backend not in plugins:
            raise FabricError(
                f"NIXL has no backend '{backend}'; set nixl_backend to one of {', '.join(sorted(plugins))}"
            )
        try:
            self._backend = self._agent.createBackend(
                backend, {"engine_config": UCX_CONFIGURATION} if backend == UCX else {}
            )
        except problems() as error:
            raise FabricError(f"NIXL can't start its backend '{backend}': {error}") from error

    def register(self, memory: Memory) -> None:
        """Raises :class:`RegistrationError`."""
        try:
            self._agent.registerMem(self._regions(memory), [self._backend])
        except problems() as error:
            raise RegistrationError(
                f"NIXL can't register {memory.length} bytes of {memory.kind} memory: {error}"
            ) from error

    def deregister(self, memory: Memory) -> None:
        """Undo that. Raises :class:`TransportError`."""
        try:
            self._agent.deregisterMem(self._regions(memory), [self._backend])
        except problems() as error:
            raise TransportError(f"NIXL can't deregister {memory.kind} memory: {error}") from error

    def _regions(self, memory: Memory) -> Any:
        rows = [(memory.address, memory.length, max(memory.ordinal, 0), "")]
        return bindings().nixlRegDList(self._segments[memory.kind], rows)

    def metadata(self) -> bytes:
        """How to reach this agent, and the memory that is registered by now."""
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> None:
        """Raises :class:`TransportError`."""
        try:
            self.remote = self._agent.loadRemoteMD(metadata).decode()
        except problems() as error:
            raise TransportError(f"NIXL can't use the peer's address: {error}") from error

    def reaches(self, place: Place) -> bool:
        """Whether the remote agent has named that memory."""
        library = bindings()
        rows = library.nixlXferDList(self._segments[KINDS[place.kind]], [place[:3]])
        return bool(self._agent.checkRemoteMD(self.remote, rows) == library.NIXL_SUCCESS)

    def prepare(self, part: Part, notification: bytes) -> int:
        """A write that is not posted yet; returns NIXL's handle. Raises :class:`TransportError`."""
        library = bindings()
        try:
            return int(
                self._agent.createXferReq(
                    library.NIXL_WRITE,
                    library.nixlXferDList(self._segments[part.local_kind], part.local),
                    library.nixlXferDList(self._segments[part.remote_kind], part.remote),
                    self.remote,
                    notification,
                    [self._backend],
                )
            )
        except problems() as error:
            raise TransportError(_sentence(error)) from error

    def post(self, handle: int) -> None:
        """Raises :class:`TransportError`; some of it may have been written then."""
        try:
            self._agent.postXferReq(handle)
        except problems() as error:
            raise TransportError(_sentence(error)) from error

    def is_done(self, handle: int) -> bool:
        """Whether all its bytes are in place, and its notification is sent. Raises :class:`TransportError`."""
        library = bindings()
        try:
            state = self._agent.getXferStatus(handle)
        except problems() as error:
            raise TransportError(_sentence(error)) from error
        return bool(state == library.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Forget a write. One that has not ended is cancelled as far as the backend can."""
        with contextlib.suppress(*problems()):  # What can't be cancelled ends with the agent.
            self._agent.releaseXferReq(handle)

    def notifications(self) -> dict[str, list[bytes]]:
        """What has come since the last call, by the sending agent's name. Raises :class:`TransportError`."""
        try:
            found: dict[str, list[bytes]] = self._agent.getNotifs({}, [self._backend])
        except problems() as error:
            raise TransportError(_sentence(error)) from error
        return found

    def close(self) -> None:
        """Its worker and its connections are gone when this returns."""
        if self.remote is not None:
            # The peer hears of it and stops. Without that, UCX's thread does not end before it has read all that comes.
            with contextlib.suppress(*problems()):
                self._agent.invalidateRemoteMD(self.remote)
        self._agent = None


def _sentence(error: Exception) -> str:
    if "REMOTE_DISCONNECT" in str(error):
        return "the peer's end of the connection is gone"
    return f"NIXL: {error}"
