"""Every control message, its framing, and how two processes prove the fleet key to each other.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one tagged struct. Numbers that leave a process
are durations, counts or sizes, never clock readings.

Handshake, opener to acceptor unless said: ``Hello``; back: ``Challenge`` (with the acceptor's proof); ``Proof`` (the
opener's proof and identity); back: ``Welcome`` (the acceptor's identity) or ``Refused``. Each proof is an HMAC-SHA256
under the fleet key over the opener's Hello, byte by byte as it was sent, and the acceptor's challenge, so it covers
both nonces, names and incarnations. Identities follow only once the other side has proved itself.

Types bound what has no answer (a slot wider than an immediate, an endless name): such a frame ends its connection.
What has one (token ranges, block ids) is left to the engine, which answers ``Rejected``.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from neuron_pushkv.errors import Reason, WireError
from neuron_pushkv.layout import Layout

PROTOCOL_MAJOR = 2
PROTOCOL_MINOR = 0
MAX_FRAME_BYTES = 16 << 20
"""Enough for a registration of several million blocks; more is a bad frame."""
MAX_HANDSHAKE_BYTES = 1 << 20
"""Bounds what a stranger can make us hold; an identity of 1,000 regions takes about a tenth."""
MAX_HELLO_BYTES = 4096
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HEADER_BYTES = 4
MAX_NAME = 512
"""Characters of a transfer id, engine id, host or other name. A longer one is a bad frame, so refuse it earlier."""
_LENGTH = struct.Struct(">I")

Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
ProofBytes = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Port = Annotated[int, Meta(ge=1, le=65535)]
SlotNumber = Annotated[int, Meta(ge=0, lt=1 << 20)]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 12)]
"""Slot and epoch are as wide as in a write's immediate, see ``transport.base``."""


class Rank(msgspec.Struct, frozen=True, order=True):
    """Which worker: data, pipeline and tensor parallel rank. Each data parallel rank is an engine of its own."""

    dp: Count = 0
    pp: Count = 0
    tp: Count = 0


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=False):
    """Base of all messages. Unknown fields are skipped, so a minor version may add some."""


class RemoteRegion(msgspec.Struct, frozen=True, array_like=True):
    """Where block 0 of one region is: ``offset`` bytes into the identity's ``memory``-th memory."""

    memory: Count
    offset: Count


class Identity(msgspec.Struct, frozen=True):
    """Who one side is, in O(regions). A directory or router has no cache and leaves the second half empty."""

    engine_id: Name
    incarnation: Count
    rank: Rank
    model: Annotated[str, Meta(max_length=4096)] = ""
    """Fingerprint of everything that KV depends on besides the prompt; equal on both sides or refused."""
    provider: Name = ""
    layout: Layout | None = None
    memories: tuple[Annotated[bytes, Meta(max_length=1 << 16)], ...] = ()
    """Descriptions for the transport's ``attach``."""
    regions: tuple[RemoteRegion, ...] = ()
    """One for each of the layout's regions, in its order."""
    endpoint: Annotated[bytes, Meta(max_length=4096)] = b""
    """Transport address of the endpoint that this side opened for the other."""
    ranks: tuple[tuple[Rank, Name, Port], ...] = ()
    """A directory's answer: rank, host and port of each worker's listener."""
    ready: bool = True
    """A directory's answer: whether all ranks have reported."""


class Hello(Message, frozen=True):
    """First message. ``role``: "worker" between ranks, "rank" from a worker to its directory, "router", "lookup"."""

    major: Count
    minor: Count
    role: Name
    engine_id: Name
    incarnation: Count
    rank: Rank
    nonce: Nonce


class Challenge(Message, frozen=True):
    """The acceptor's half of the proof. Its names tell the opener early which pair this connection would serve."""

    engine_id: Name
    incarnation: Count
    rank: Rank
    nonce: Nonce
    proof: ProofBytes


class Proof(Message, frozen=True):
    """The opener's half, with its identity."""

    proof: ProofBytes
    identity: Identity


class Welcome(Message, frozen=True):
    """The acceptor's identity; the connection is up."""

    identity: Identity
    minor: Count


class Refused(Message, frozen=True):
    """The handshake has failed; ``detail`` names both values."""

    reason: Reason
    detail: str


class Intent(Message, frozen=True):
    """Receiver to sender: a request for that prompt waits for blocks; keep its KV while this connection lives.

    A :class:`Register` of the same slot and epoch follows, or a :class:`Cancel`, which is not answered then.
    """

    transfer: Name
    slot: SlotNumber
    epoch: Epoch
    end_token: int
    end_content: Annotated[bytes, Meta(max_length=64)]


class Register(Message, frozen=True):
    """Receiver to sender: write the tokens ``[start_token, end_token)`` of that prompt into these blocks.

    ``blocks`` holds, per KV cache group of the receiver's layout, block ids of 4 bytes each (little endian), from the
    block of the group's first token on. ``transfer`` is empty where the proxy sent none; then contents alone decide.
    """

    transfer: Name
    slot: SlotNumber
    epoch: Epoch
    start_token: int
    end_token: int
    start_content: Annotated[bytes, Meta(max_length=64)]
    end_content: Annotated[bytes, Meta(max_length=64)]
    blocks: tuple[bytes, ...]
    heads: tuple[Count, Count] = (0, 1)
    """Which KV heads, by their global numbers, are wanted of this sender: the first, and one beyond the last."""
    askers: Annotated[int, Meta(ge=1)] = 1
    """How many ranks of the receiving engine ask this sender for this prompt, each for heads or layers of its own."""
    asked: Annotated[int, Meta(ge=1)] = 1
    """How many ranks of the sending engine the receiving engine asks for this prompt."""


class Accepted(Message, frozen=True):
    """Sender: at once. ``state`` is "unknown", "queued", "computing" or "sealed"."""

    slot: SlotNumber
    epoch: Epoch
    state: Name


class Progress(Message, frozen=True):
    """Sender: the state has changed, or ``steps`` (engine steps begun since the registration) has grown."""

    slot: SlotNumber
    epoch: Epoch
    state: Name
    steps: Count


class Rejected(Message, frozen=True):
    """Sender: only ever the first answer; nothing was or will be written."""

    slot: SlotNumber
    epoch: Epoch
    reason: Reason
    detail: str


class Commit(Message, frozen=True):
    """Sender: all writes are posted, this many. A Fail may still follow until Done."""

    slot: SlotNumber
    epoch: Epoch
    writes: Count
    tokens: Count


class Fail(Message, frozen=True):
    """Sender: every ticket has ended; ``writes`` in place, ``in_doubt`` unknown."""

    slot: SlotNumber
    epoch: Epoch
    writes: Count
    in_doubt: Count
    reason: Reason
    detail: str


class Cancel(Message, frozen=True):
    """Receiver: write no more."""

    slot: SlotNumber
    epoch: Epoch


class Cancelled(Message, frozen=True):
    """Sender: nothing of this epoch is or will be under way; ``writes`` were made."""

    slot: SlotNumber
    epoch: Epoch
    writes: Count


class Done(Message, frozen=True):
    """Receiver: all of it has arrived."""

    slot: SlotNumber
    epoch: Epoch


class Release(Message, frozen=True):
    """Router or receiver: nobody will ask for that transfer (again). ``asked``: see :class:`Register`."""

    transfer: Name
    asked: Annotated[int, Meta(ge=1)] = 1


class Listening(Message, frozen=True):
    """A worker to its own directory: where this rank listens, and what it serves."""

    rank: Rank
    host: Name
    port: Port
    provider: Name
    library: Name


class Freed(Message, frozen=True):
    """A worker to its own directory: this rank will not read these requests' blocks again.

    Each with how many of the engine's ranks were asked for it where all that asked have got it, otherwise with 0.
    """

    rank: Rank
    requests: tuple[tuple[str, Count], ...]


class LetGo(Message, frozen=True):
    """A directory to its own worker: nobody is going to ask this rank for these requests' blocks."""

    requests: tuple[str, ...]


class Status(Message, frozen=True):
    """Router to directory: answer with :class:`EngineStatus`."""


class EngineStatus(Message, frozen=True):
    """Directory to router: what this engine is and whether every rank is up."""

    engine_id: Name
    incarnation: Count
    ready: bool
    ranks: Count
    provider: Name
    library: Name
    kept_requests: Count
    release: Name = ""
    """Of this package."""
    vllm: Name = ""


class Ping(Message, frozen=True):
    """Each side, every second while nothing else is sent."""


class Bye(Message, frozen=True):
    """Planned leave: what is accepted will be finished, nothing new is taken."""

    reason: Reason


AnyMessage: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Refused
    | Intent
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
    | LetGo
    | Status
    | EngineStatus
    | Ping
    | Bye
)
Expected = TypeVar("Expected", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One whole frame. Raises :class:`WireError` if it would be longer than any peer accepts."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(
            Reason.BAD_FRAME, f"{type(message).__name__} takes {len(body)} bytes; the limit is {MAX_FRAME_BYTES}"
        )
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


def proof(key: bytes, side: str, hello: bytes, challenge: Challenge) -> bytes:
    """HMAC that shows knowledge of ``key``; the challenge's own ``proof`` is left out of it.

    ``hello`` is the body of the Hello as it crossed the wire: one from a later minor version has fields that this
    version would lose. ``side`` ("opener", "acceptor") keeps one from being reflected as the other.
    """
    names = (challenge.engine_id, challenge.incarnation, challenge.rank, challenge.nonce)
    text = _encoder.encode((side, hello, names))
    return hmac.new(key, text, hashlib.sha256).digest()


def proof_matches(expected: bytes, given: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(expected, given)
