"""What the world of the model test is made of: connections, tickets, single writes, and what receivers want."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.ledger import effects as fx
from neuron_pushkv.wire import Message

SIZE = 4
"""Tokens in a block of the sender's, and those that move together."""
WINDOW = 6
GROUPS = (Group(SIZE), Group(SIZE, WINDOW))
LAYERS = {"full.0": 0, "full.1": 0, "sliding": 1}
RANKS = (0, 1)
BLOCKS = 1 << 16
LAYOUT = Layout(
    "test", BLOCKS, GROUPS, tuple(Region(name, "kv", group, 0, 64, 0, 16, 16) for name, group in LAYERS.items())
)


@dataclass
class Link:
    """A connection between a sending rank and the receiver. Either side sees its end for itself."""

    rank: int
    connection: int
    to_sender: deque[Message] = field(default_factory=deque)
    to_receiver: deque[Message] = field(default_factory=deque)
    closing: bool = False
    sender_up: bool = True
    receiver_up: bool = True
    sender_fenced: bool = False
    fenced_at: float | None = None
    """When the receiver fenced the rank."""


@dataclass(eq=False)
class Piece:
    """One write: which tokens of a prompt, out of which of the rank's blocks, into which of the receiver's."""

    link: Link
    key: fx.Key
    layer: str
    source: int
    tokens: range
    target: int
    offset: int
    carried: tuple[object, ...] | None = None
    """What it has read, once that is on the way."""
    adrift: bool = False
    """The receiver will read it, from whatever is there by then."""
    landed: bool = False


@dataclass(eq=False)
class Ticket:
    """One call of the transport's."""

    number: int
    link: Link
    write: fx.Write
    pieces: list[Piece]
    cancelled: bool = False

    @property
    def left(self) -> list[Piece]:
        return [piece for piece in self.pieces if not piece.landed]


@dataclass(frozen=True)
class Asked:
    """What a receiver's request is to get. ``blocks``: for each group, from the one of ``first_token`` on."""

    prompt: int
    transfer: str
    start: int
    end: int
    ranks: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
