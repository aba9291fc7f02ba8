"""What NIXL transports tell each other: addresses, descriptions of memory, and the notifications that follow writes."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from neuron_pushkv.device.base import MemoryKind
from neuron_pushkv.errors import TransportError

KINDS = (MemoryKind.HOST, MemoryKind.CUDA)
"""Memory that NIXL knows, by the number that stands for it."""

_ADDRESS = struct.Struct("<4sH")  # magic, bytes of provider; then the provider, NIXL's metadata and a checksum
_DESCRIPTION = struct.Struct("<4sQQIB")  # magic, then a place
_NOTIFICATION = struct.Struct("<4sQII")  # magic, number, immediate, writes
_ADDRESS_MAGIC, _DESCRIPTION_MAGIC, _NOTIFICATION_MAGIC = b"pkx1", b"pkd1", b"pkn1"
_WINDOW = 1024


def pack_address(provider: str, metadata: bytes) -> bytes:
    """The address of an agent with that metadata."""
    name = provider.encode()
    body = _ADDRESS.pack(_ADDRESS_MAGIC, len(name)) + name + metadata
    return body + zlib.crc32(body).to_bytes(4, "little")


def unpack_address(provider: str, address: bytes) -> bytes:
    """The metadata in it. Raises :class:`TransportError` if it is of another provider, or no address at all."""
    body = address[:-4]
    good = len(body) >= _ADDRESS.size and zlib.crc32(body).to_bytes(4, "little") == address[-4:]
    magic, size = _ADDRESS.unpack_from(body) if good else (b"", 0)
    if magic != _ADDRESS_MAGIC:
        raise TransportError("that is not an address of a NIXL agent of neuron_pushkv")
    theirs = body[_ADDRESS.size : _ADDRESS.size + size].decode(errors="replace")
    if theirs != provider:
        raise TransportError(
            f"the peer's endpoint is of provider '{theirs}', ours of '{provider}'; "
            "set the same nixl_backend on both sides"
        )
    return body[_ADDRESS.size + size :]


class Place(NamedTuple):
    """Memory on either side, as NIXL names it."""

    address: int
    length: int
    ordinal: int
    kind: int
    """An index of ``KINDS``."""

    def pack(self) -> bytes:
        """Its description for peers."""
        return _DESCRIPTION.pack(_DESCRIPTION_MAGIC, *self)


def unpack_place(description: bytes) -> Place:
    """Raises :class:`TransportError`."""
    try:
        magic, *numbers = _DESCRIPTION.unpack(description)
    except struct.error:
        magic, numbers = b"", []
    if magic != _DESCRIPTION_MAGIC or numbers[-1] >= len(KINDS):
        raise TransportError("that is not a description of memory from neuron_pushkv's NIXL transport")
    return Place(*numbers)


class Notification(NamedTuple):
    """What a part says when it has arrived."""

    number: int
    """Counted by the sender, for each peer: a notification that comes twice is credited once."""
    immediate: int
    writes: int

    def pack(self) -> bytes:
        """As it travels."""
        return _NOTIFICATION.pack(_NOTIFICATION_MAGIC, *self)


def unpack_notification(message: bytes) -> Notification | None:
    """``None`` if it is none of ours."""
    try:
        magic, *numbers = _NOTIFICATION.unpack(message)
    except struct.error:
        return None
    notification = Notification(*numbers)
    return notification if magic == _NOTIFICATION_MAGIC and notification.writes else None


class Window:
    """Which numbers have been seen, in a bounded way: one that is far behind the highest counts as seen."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen = 0
        """A bit for each of the last numbers, the highest first."""

    def is_new(self, number: int) -> bool:
        """Whether it comes for the first time; it has been seen from then on."""
        ahead = number - self._highest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, _WINDOW) | 1) % (1 << _WINDOW)
            self._highest = number
            return True
        if -ahead >= _WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True
