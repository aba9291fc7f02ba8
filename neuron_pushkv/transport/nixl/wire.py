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
_DESCRIPTION = struct.Struct("<4sQQIB")  # magic, then a place; then a checksum
_NOTIFICATION = struct.Struct("<4sQII")  # magic, number, immediate, writes
_ADDRESS_MAGIC, _DESCRIPTION_MAGIC, _NOTIFICATION_MAGIC = b"pkx1", b"pkd1", b"pkn1"
_WINDOW = 1024


def _seal(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


def _unseal(sealed: bytes, magic: bytes, least: int) -> bytes | None:
    """What was sealed; ``None`` if it is damaged, shorter than ``least``, or begins otherwise."""
    body = sealed[:-4]
    good = len(body) >= least and body.startswith(magic) and _seal(body) == sealed
    return body if good else None


def pack_address(provider: str, metadata: bytes) -> bytes:
    """The address of an agent with that metadata."""
    name = provider.encode()
    return _seal(_ADDRESS.pack(_ADDRESS_MAGIC, len(name)) + name + metadata)


def unpack_address(provider: str, address: bytes) -> bytes:
    """The metadata in it. Raises :class:`TransportError` if it is of another provider, or no address at all."""
    body = _unseal(address, _ADDRESS_MAGIC, _ADDRESS.size)
    if body is None:
        raise TransportError("that is not an address of a NIXL agent of neuron_pushkv")
    _, size = _ADDRESS.unpack_from(body)
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
        return _seal(_DESCRIPTION.pack(_DESCRIPTION_MAGIC, *self))


def unpack_place(description: bytes) -> Place:
    """Raises :class:`TransportError`."""
    body = _unseal(description, _DESCRIPTION_MAGIC, _DESCRIPTION.size)
    numbers = _DESCRIPTION.unpack(body)[1:] if body is not None and len(body) == _DESCRIPTION.size else ()
    if not numbers or numbers[-1] >= len(KINDS):
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
