"""What two doctors say to each other, once each has shown that it holds the fleet key. One asks, the other answers."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from neuron_pushkv.errors import Reason, WireError
from neuron_pushkv.transport.base import EPOCHS, SLOTS
from neuron_pushkv.wire import Count, Message, Name

Bytes = Annotated[bytes, Meta(max_length=1 << 16)]
Slot = Annotated[int, Meta(ge=0, lt=SLOTS)]
Epoch = Annotated[int, Meta(ge=0, lt=EPOCHS)]
Rounds = Annotated[int, Meta(ge=1, le=1 << 16)]
Size = Annotated[int, Meta(ge=0, le=1 << 40)]
Piece = Annotated[int, Meta(ge=4096, le=1 << 40)]
Writes = Annotated[int, Meta(ge=0, lt=1 << 31)]


class About(Message, frozen=True):
    """Both sides, first: where to write to, and what is to be expected of it. ``line_rate`` in bytes/s, 0: unknown."""

    provider: Name
    device: Name
    family: Name
    line_rate: Count
    endpoint: Bytes
    memory: Bytes
    size: Size


class Push(Message, frozen=True):
    """Write that pattern to me, in writes of ``piece`` bytes with that immediate."""

    slot: Slot
    epoch: Epoch
    seed: Count
    size: Size
    piece: Piece


class Pushed(Message, frozen=True):
    """The answer: how many immediates there are to count, and how long it took until all was in place, in seconds."""

    writes: Writes
    seconds: float


class Expect(Message, frozen=True):
    """I am going to write to you: clear that many bytes, and count. Answered by :class:`Ready`."""

    slot: Slot
    epoch: Epoch
    size: Size


class Ready(Message, frozen=True):
    """Go on."""


class Compare(Message, frozen=True):
    """I have written that pattern. Answered by :class:`Compared`."""

    slot: Slot
    epoch: Epoch
    seed: Count
    size: Size
    writes: Writes


class Compared(Message, frozen=True):
    """How many words of 8 bytes are not as they should be, and the place of the first, in bytes."""

    wrong: Count
    first: Count


class Echo(Message, frozen=True):
    """Answer each of my next writes with one of yours, that often. Answered by :class:`Ready`, before the first."""

    slot: Slot
    epoch: Epoch
    rounds: Rounds


class Trouble(Message, frozen=True):
    """Instead of any answer: what went wrong."""

    detail: str


Word: TypeAlias = About | Push | Pushed | Expect | Ready | Compare | Compared | Echo | Trouble

_decoder: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def decode(body: bytes) -> Word:
    """Raises :class:`WireError` for what is none of these."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(Reason.BAD_FRAME, f"not a word of a doctor: {error}") from error
