"""Every control message, its framing, and how two processes prove the fleet key to each other.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one tagged struct. Numbers that leave a process
are durations, counts or sizes, never clock readings.

Handshake, opener to acceptor unless said: ``Hello``; back: ``Challenge`` (with the acceptor's proof); ``Proof`` (the
opener's proof and identity); back: ``Welcome`` (the acceptor's identity) or ``Refused``. Each proof is an HMAC-SHA256
under the fleet key over the opener's Hello and the acceptor's challenge, so it covers both nonces and incarnations.
Identities follow only once the other side has proved itself.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TypeAlias, TypeVar

import msgspec

from neuron_pushkv.errors import Reason, WireError
from neuron_pushkv.layout import Layout

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
MAX_FRAME_BYTES = 16 << 20
"""Enough for a registration of several million blocks; more is a bad frame."""
MAX_HANDSHAKE_BYTES = 1 << 20
NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")


class Rank(msgspec.Struct, frozen=True, order=True):
    """Which worker of an engine: data, pipeline and tensor parallel rank."""

    dp: int = 0
    pp: int = 0
    tp: int = 0


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base of all messages. Unknown fields are skipped, so a minor version may add some."""


class RemoteRegion(msgspec.Struct, frozen=True):
    """Where a peer writes block 0 of one region: ``address`` as its provider wants it, and the memory key."""

    address: int
    key: int


class Identity(msgspec.Struct, frozen=True):
    """Who one side is, in O(regions). A directory or router has no cache and leaves the second half empty."""

    engine_id: str
    incarnation: int
    rank: Rank
    model: str = ""
    """Fingerprint of everything that KV depends on besides the prompt; equal on both sides or refused."""
    provider: str = ""
    layout: Layout | None = None
    regions: tuple[RemoteRegion, ...] = ()
    """One for each of the layout's regions, in its order."""
    endpoint: bytes = b""
    """Transport address of the endpoint that this side opened for the other."""
    ranks: tuple[tuple[Rank, str, int], ...] = ()
    """A directory's answer: rank, host and port of each worker's listener."""
    ready: bool = True
    """A directory's answer: whether all ranks have reported."""


class Hello(Message):
    """First message. ``role``: "worker" between ranks, "rank" from a worker to its own directory, "router", "lookup"."""

    major: int
    minor: int
    role: str
    engine_id: str
    incarnation: int
    rank: Rank
    nonce: bytes


class Challenge(Message):
    """The acceptor's half of the proof."""

    incarnation: int
    nonce: bytes
    proof: bytes


class Proof(Message):
    """The opener's half, with its identity."""

    proof: bytes
    identity: Identity


class Welcome(Message):
    """The acceptor's identity; the connection is up."""

    identity: Identity
    minor: int


class Refused(Message):
    """The handshake has failed; ``detail`` names both values."""

    reason: Reason
    detail: str


class Register(Message):
    """Receiver to sender: write the tokens ``[start_token, end_token)`` of that prompt into these blocks.

    ``blocks`` holds, per KV cache group, the ids of the blocks from the one of ``start_token`` on. ``transfer`` is
    empty where the proxy sent none; then the contents alone decide.
    """

    transfer: str
    slot: int
    epoch: int
    start_token: int
    end_token: int
    start_content: bytes
    end_content: bytes
    blocks: tuple[tuple[int, ...], ...]
    block_size: int


class Accepted(Message):
    """Sender: at once. ``state`` is "unknown", "queued", "computing" or "sealed"."""

    slot: int
    epoch: int
    state: str


class Progress(Message):
    """Sender: the state has changed, or ``steps`` (engine steps begun since the registration) has grown."""

    slot: int
    epoch: int
    state: str
    steps: int


class Rejected(Message):
    """Sender: only ever the first answer; nothing was or will be written."""

    slot: int
    epoch: int
    reason: Reason
    detail: str


class Commit(Message):
    """Sender: all writes are posted, this many. A Fail may still follow until Done."""

    slot: int
    epoch: int
    writes: int
    tokens: int


class Fail(Message):
    """Sender: every ticket has ended; ``writes`` in place, ``in_doubt`` unknown."""

    slot: int
    epoch: int
    writes: int
    in_doubt: int
    reason: Reason
    detail: str


class Cancel(Message):
    """Receiver: write no more."""

    slot: int
    epoch: int


class Cancelled(Message):
    """Sender: nothing of this epoch is or will be under way; ``writes`` were made."""

    slot: int
    epoch: int
    writes: int


class Done(Message):
    """Receiver: all of it has arrived."""

    slot: int
    epoch: int


class Release(Message):
    """Router or receiver: nobody will ask for that transfer (again)."""

    transfer: str


class Listening(Message):
    """A worker to its own directory: where this rank listens, and what it serves."""

    rank: Rank
    host: str
    port: int
    provider: str
    library: str


class Freed(Message):
    """A worker to its own directory: this rank will not read these requests' blocks again."""

    rank: Rank
    requests: tuple[str, ...]


class Status(Message):
    """Router to directory: answer with :class:`EngineStatus`."""


class EngineStatus(Message):
    """Directory to router: what this engine is and whether every rank is up."""

    engine_id: str
    incarnation: int
    ready: bool
    ranks: int
    provider: str
    library: str
    kept_requests: int


class Ping(Message):
    """Each side, every second while nothing else is sent."""


class Bye(Message):
    """Planned leave: what is accepted will be finished, nothing new is taken."""

    reason: Reason


AnyMessage: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Refused
    | Register
    | Accepted
    | Progress
    | Rejected
    | Commit
    | Fail
    | Cancel
    | Cancelled
    | Done
    | Release
    | Listening
    | Freed
    | Status
    | EngineStatus
    | Ping
    | Bye
)
Expected = TypeVar("Expected", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One whole frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Length of the body behind a 4-byte header. Raises :class:`WireError` beyond ``limit``."""
    (length,) = _LENGTH.unpack(header)
    if length > limit:
        raise WireError(Reason.BAD_FRAME, f"a frame of {length} bytes is over the limit of {limit}")
    return int(length)


def decode(body: bytes) -> AnyMessage:
    """The message in a frame's body. Raises :class:`WireError` for anything that isn't one of ours."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(Reason.BAD_FRAME, f"not a message of protocol {PROTOCOL_MAJOR}: {error}") from error


def proof(key: bytes, side: str, hello: Hello, incarnation: int, nonce: bytes) -> bytes:
    """HMAC that shows knowledge of ``key``. ``side`` ("opener", "acceptor") keeps one from being reflected as the other."""
    text = side.encode() + b"\0" + _encoder.encode(hello) + b"\0" + incarnation.to_bytes(8, "big") + nonce
    return hmac.new(key, text, hashlib.sha256).digest()


def proof_matches(expected: bytes, given: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(expected, given)
