"""A sender's and a receiver's ledger joined by hand: messages, writes and time move only when a test says so."""

from __future__ import annotations

from collections import deque

from neuron_pushkv import wire
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.content import Content, seed
from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Group, Layout, Region
from neuron_pushkv.ledger import effects as fx
from neuron_pushkv.ledger.inbound import Inbound, Share
from neuron_pushkv.ledger.outbound import Outbound
from neuron_pushkv.ledger.registration import Receiver
from neuron_pushkv.orders import Finish, Intent, Offer, Ready, Receive, Remote
from neuron_pushkv.wire import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Done,
    Fail,
    Message,
    Progress,
    Register,
    Rejected,
)

BLOCK = 32
BLOCKS = 64
CONNECTION = 7
GROUP = Group(BLOCK)
LAYOUT = Layout("test", BLOCKS, (GROUP,), (Region("layer.0", "kv", 0, 0, 4096, 0, 0, 4096),))
REMOTE = Remote("127.0.0.1", 1)
SEED = seed("model")


def content(tokens: int, first: int = 1) -> Content:
    """A prompt of that many tokens; prompts with another ``first`` differ from the start."""
    return Content.of(SEED, [first + index for index in range(tokens)])


def packed(*blocks: int) -> bytes:
    """A block table as it crosses the wire."""
    return b"".join(block.to_bytes(4, "little") for block in blocks)


def sources(write: fx.Write) -> tuple[int, ...]:
    """The sender's blocks that a write reads, in token order."""
    (move,) = write.moves
    return tuple(int(block) for block in move.source[move.first // BLOCK : -(-move.end // BLOCK)])


def targets(write: fx.Write) -> tuple[int, ...]:
    """The receiver's blocks that it goes to."""
    (move,) = write.moves
    start = move.target_start
    return tuple(int(block) for block in move.target[(move.first - start) // BLOCK : -(-(move.end - start) // BLOCK)])


class Pair:
    """``reports``: what the receiver told vLLM. ``freed``: what the sender let go. ``sent``: how deliveries ended."""

    def __init__(
        self, settings: ConnectorSettings | None = None, quarantine: float = 0.0, *, late: bool = False
    ) -> None:
        settings = settings or ConnectorSettings()
        self.now = 1000.0
        self.inbound = Inbound(settings, quarantine)
        self.outbound = Outbound(settings, LAYOUT, late=late)
        self.to_sender: deque[Message] = deque()
        self.to_receiver: deque[Message] = deque()
        self.reports: list[tuple[str, Reason | None]] = []
        self.freed: list[str] = []
        self.sent: list[Reason | None] = []
        self.drops: list[str] = []
        self.events: list[str] = []
        self.tickets: dict[int, fx.Write] = {}
        self.all_writes: dict[int, fx.Write] = {}
        self.cancelled_tickets: list[int] = []
        self.expected: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.goals: dict[int, tuple[int, int]] = {}
        self.writes = 3
        self.connection = CONNECTION
        self._tickets = 0

    # Short forms of what both sides' vLLM does.

    def offer(self, request: str = "p", transfer: str = "t", tokens: int = 100, deliveries: int = 1) -> None:
        self.sender(self.outbound.offer(Offer(request, transfer, content(tokens), deliveries), self.now))

    def seal(self, request: str = "p", tokens: int = 100) -> None:
        blocks = tuple(range(-(-tokens // BLOCK)))
        self.sender(self.outbound.advance(Ready(request, tokens, (blocks,)), self.now))

    def finish(self, request: str = "p", kept: bool = True) -> None:
        self.sender(self.outbound.finish(Finish(request, kept), self.now))

    def receive(self, request: str = "d", transfer: str = "t", start: int = 0, end: int = 100, first: int = 1) -> None:
        prompt = content(end, first)
        blocks = tuple(range(10, 10 + GROUP.blocks_for(start, end)))
        order = Receive(request, transfer, REMOTE, start, end, prompt.at(start), prompt.at(end), (blocks,))
        routed = self.inbound.routed(request)
        self.receiver(self.inbound.receive(order, self.now))
        if not routed:
            self.receiver(self.inbound.connected(request, [Share(self.connection)], self.now))

    def intend(self, request: str = "d", transfer: str = "t", end: int = 100, first: int = 1) -> None:
        order = Intent(request, transfer, REMOTE, end, content(end, first).at(end))
        self.receiver(self.inbound.intend(order, self.now))
        self.receiver(self.inbound.connected(request, [Share(self.connection)], self.now))

    # The world between them.

    def flush(self) -> None:
        """Deliver all messages, in order, until none is left."""
        while self.to_sender or self.to_receiver:
            self.to_one_side()

    def to_one_side(self) -> None:
        if self.to_sender:
            self.at_sender(self.to_sender.popleft())
        elif self.to_receiver:
            self.at_receiver(self.to_receiver.popleft())

    def at_sender(self, message: Message) -> None:
        match message:
            case wire.Intent():
                self.sender(self.outbound.intend(self.connection, message, self.now))
            case Register():
                receiver = Receiver(BLOCKS, (GROUP,), (BLOCK,))
                self.sender(self.outbound.register(self.connection, message, receiver, self.now))
            case Cancel():
                self.sender(self.outbound.cancel(self.connection, message, self.now))
            case Done():
                self.sender(self.outbound.done(self.connection, message, self.now))
            case _:
                raise AssertionError(message)

    def at_receiver(self, message: Message) -> None:
        assert isinstance(message, Accepted | Progress | Rejected | Commit | Fail | Cancelled)
        self.receiver(self.inbound.heard(self.connection, message, self.now))

    def land(self, ticket: int | None = None, writes: int | None = None) -> None:
        """That many of a ticket's immediates arrive (all by default)."""
        write = self.tickets[ticket if ticket is not None else max(self.tickets)]
        _, slot, epoch = write.key
        if self.expected.get(slot) == epoch:
            self.counts[slot] += self.writes if writes is None else writes
            self._goal_reached(slot)

    def land_rest(self) -> None:
        """Whatever a goal still waits for arrives."""
        for slot, (_, count) in list(self.goals.items()):
            self.counts[slot] = count
            self._goal_reached(slot)

    def written(self, ticket: int | None = None) -> None:
        """The sender's completions come in."""
        ticket = ticket if ticket is not None else max(self.tickets)
        del self.tickets[ticket]
        self.sender(self.outbound.ticket_written(ticket, self.now))

    def failed(self, written: int, in_doubt: int = 0) -> None:
        ticket = max(self.tickets)
        self.land(ticket, written)
        del self.tickets[ticket]
        self.sender(self.outbound.ticket_failed(ticket, written, in_doubt, "provoked", self.now))

    def push(self) -> None:
        """Everything goes well from here."""
        self.flush()
        self.land()
        self.written()
        self.flush()

    def cut(self) -> None:
        """The connection ends; both sides fence, which fails the sender's tickets. The next one is another."""
        gone, self.connection = self.connection, self.connection + 1
        self.to_sender.clear()
        self.to_receiver.clear()
        self.receiver(self.inbound.peer_down(gone, Reason.PEER_LOST, "cut", self.now))
        self.sender(self.outbound.peer_down(gone, Reason.PEER_LOST, "cut", self.now))
        for ticket in list(self.tickets):
            del self.tickets[ticket]
            self.sender(self.outbound.ticket_failed(ticket, 0, 1, "fenced", self.now))

    def pass_time(self, seconds: float, step: float = 0.5) -> None:
        """Both sides' clocks go on, with their ticks and all messages."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            self.receiver(self.inbound.tick(self.now))
            self.sender(self.outbound.tick(self.now))
            self.flush()

    def quiet(self) -> bool:
        """Nothing is owed by anyone to anyone."""
        return not (len(self.inbound) or len(self.outbound) or self.tickets or self.expected)

    # Carrying out effects.

    def receiver(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send(_, message):
                    self.to_sender.append(message)
                case fx.Expect(slot, epoch):
                    self.expected[slot], self.counts[slot] = epoch, 0
                case fx.Goal(slot, epoch, count):
                    self.goals[slot] = (epoch, count)
                    self._goal_reached(slot)
                case fx.Forget(slot):
                    del self.expected[slot]
                    self.goals.pop(slot, None)
                case fx.Received(request=request, reason=reason):
                    self.reports.append((request, reason))
                case fx.Drop(_, _, detail):
                    self.drops.append(detail)
                    self.cut()
                case fx.Count(event):
                    self.events.append(event)
                case _:
                    raise AssertionError(effect)

    def sender(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send(_, message):
                    self.to_receiver.append(message)
                case fx.Write():
                    self._tickets += 1
                    self.tickets[self._tickets] = effect
                    self.all_writes[self._tickets] = effect
                    size = 4096 * len(sources(effect))
                    taken = self.outbound.posted(effect, effect.end, self._tickets, self.writes, size, self.now)
                    self.sender(taken)
                case fx.CancelTicket(ticket):
                    self.cancelled_tickets.append(ticket)
                case fx.Freed(request):
                    self.freed.append(request)
                case fx.Sent(reason=reason):
                    self.sent.append(reason)
                case fx.Drop(_, _, detail):
                    self.drops.append(detail)
                    self.cut()
                case fx.Count(event):
                    self.events.append(event)
                case _:
                    raise AssertionError(effect)

    def _goal_reached(self, slot: int) -> None:
        goal = self.goals.get(slot)
        if goal is not None and self.counts[slot] >= goal[1]:
            del self.goals[slot]
            self.receiver(self.inbound.arrived(slot, goal[0], self.counts[slot], self.now))
