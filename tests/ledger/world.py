"""Two ranks of a sending engine and a receiver, joined by hand: each message and each single write moves when told to.

Memory is kept token by token, so that it can be seen what a write carried, and who owned the place that it went to.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from neuron_pushkv import wire
from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Group
from neuron_pushkv.ledger import effects as fx
from neuron_pushkv.ledger.inbound import Inbound, Share
from neuron_pushkv.ledger.outbound import Outbound
from neuron_pushkv.ledger.registration import Receiver
from neuron_pushkv.wire import Accepted, Cancelled, Commit, Fail, Message, Progress, Rejected

from .parts import BLOCKS, LAYERS, LAYOUT, RANKS, SIZE, WINDOW, Asked, Link, Piece, Ticket


class World:
    """``waiting``: requests that vLLM waits for; ``reports``: what it was told. A breach is an AssertionError."""

    def __init__(self, quarantine: float, block_size: int, late: bool) -> None:
        settings = ConnectorSettings()
        self.now, self.quarantine, self.late = 1000.0, quarantine, late
        self.groups = (Group(block_size), Group(block_size, WINDOW))
        self.inbound = Inbound(settings, quarantine)
        self.outbound = [Outbound(settings, LAYOUT, late=late) for _ in RANKS]
        self.connections = 10
        self.links = [Link(rank, self.next_connection()) for rank in RANKS]
        self.old_links: list[Link] = []
        self.waiting: dict[str, Asked] = {}
        self.reports: list[tuple[str, Reason | None]] = []
        self.keys: dict[fx.Key, str] = {}
        self.owners: dict[int, str] = {}
        """The receiver's blocks, by whose they are until it is reported."""
        self.received: dict[tuple[int, str, int, int], object] = {}
        self.memory: list[dict[tuple[str, int, int], object]] = [{} for _ in RANKS]
        self.tables: dict[str, tuple[tuple[int, ...], ...]] = {}
        """The blocks of each request of the sender's, on both ranks."""
        self.released: list[set[int]] = [set() for _ in RANKS]
        self.freed: list[list[str]] = [[] for _ in RANKS]
        self.got: Counter[str] = Counter()
        self.let_go: list[tuple[int, str]] = []
        """What the directory is going to tell a rank: nobody will ask it for that."""
        self.tickets: dict[int, Ticket] = {}
        self.flying: list[Piece] = []
        """Writes whose ticket has ended in doubt: they land, or don't."""
        self.partial: list[fx.Key] = []
        self.posts: deque[str] = deque()
        """What becomes of the next writes: whole, partial, put off or failed."""
        self.pushed: Counter[tuple[fx.Key, str, int]] = Counter()
        self.repeats: set[fx.Key] = set()
        """Deliveries of which something may be pushed twice."""
        self.expected: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.goals: dict[int, int] = {}
        self.events: Counter[str] = Counter()
        self.numbers = 0

    def next_connection(self) -> int:
        self.connections += 1
        return self.connections

    def shares(self, ranks: Sequence[int]) -> list[Share]:
        return [Share(self.links[rank].connection, (rank, rank + 1), 1, len(ranks)) for rank in ranks]

    # Messages and connections.

    def deliver(self, link: Link, to_sender: bool) -> None:
        if to_sender:
            self._tell_sender(link, link.to_sender.popleft())
        else:
            message = link.to_receiver.popleft()
            assert isinstance(message, Accepted | Progress | Rejected | Commit | Fail | Cancelled)
            self.receiver(self.inbound.heard(link.connection, message, self.now))

    def deliver_all(self) -> None:
        while queues := [
            (link, to_sender)
            for link in self.all_links()
            for to_sender in (True, False)
            if (link.to_sender if to_sender else link.to_receiver)
        ]:
            self.deliver(*queues[0])

    def all_links(self) -> list[Link]:
        return [*self.links, *self.old_links]

    def _tell_sender(self, link: Link, message: Message) -> None:
        outbound, connection = self.outbound[link.rank], link.connection
        match message:
            case wire.Intent():
                effects = outbound.intend(connection, message, self.now)
            case wire.Register():
                receiver = Receiver(BLOCKS, self.groups, (SIZE, SIZE))
                effects = outbound.register(connection, message, receiver, self.now)
            case wire.Cancel():
                effects = outbound.cancel(connection, message, self.now)
            case wire.Done():
                effects = outbound.done(connection, message, self.now)
            case wire.Release(transfer, asked):
                effects = outbound.release(transfer, asked, self.now)
            case _:
                raise AssertionError(message)
        self.sender(link.rank, effects)

    def sender_down(self, link: Link) -> None:
        """The rank sees that the connection has ended; its tickets fail through events of their own."""
        link.closing, link.sender_up, link.sender_fenced = True, False, True
        link.to_sender.clear()
        self.sender(link.rank, self.outbound[link.rank].peer_down(link.connection, Reason.PEER_LOST, "cut", self.now))

    def receiver_down(self, link: Link) -> None:
        """The receiver sees it."""
        link.closing, link.receiver_up = True, False
        link.to_receiver.clear()
        self._fence_rank(link)
        self.receiver(self.inbound.peer_down(link.connection, Reason.PEER_LOST, "cut", self.now))

    def _fence_rank(self, link: Link) -> None:
        if link.fenced_at is None:
            link.fenced_at = self.now
        if not self.quarantine:
            self.flying = [piece for piece in self.flying if piece.link is not link]

    def reconnect(self) -> None:
        """Where both sides have seen a connection's end there is a new one."""
        for rank, link in enumerate(self.links):
            if not (link.sender_up or link.receiver_up):
                self.old_links.append(link)
                self.links[rank] = Link(rank, self.next_connection())

    # Writes.

    def may_land(self, piece: Piece) -> bool:
        link = piece.link
        on_the_way = piece.carried is not None or piece.adrift
        if piece.landed or (not on_the_way and (link.sender_fenced or link.fenced_at is not None)):
            return False
        return link.fenced_at is None or self.now < link.fenced_at + self.quarantine

    def land(self, piece: Piece) -> None:
        """Its bytes and its immediate arrive, in whosever blocks that is."""
        assert self.may_land(piece)
        piece.landed = True
        if piece in self.flying:
            self.flying.remove(piece)
        request = self.owners[piece.target]
        assert request in self.waiting, f"{request} was written to after its report"
        for index, value in enumerate(piece.carried or self._read(piece)):
            self.received[piece.link.rank, piece.layer, piece.target, piece.offset + index] = value
        _, slot, epoch = piece.key
        if self.expected.get(slot) == epoch:
            self.counts[slot] += 1
            self._reach(slot)

    def _read(self, piece: Piece) -> tuple[object, ...]:
        if piece.source in self.released[piece.link.rank]:
            assert piece.adrift, "read from blocks that are vLLM's again"
            return ("overwritten",) * SIZE
        memory = self.memory[piece.link.rank]
        return tuple(memory.get((piece.layer, piece.source, index)) for index in range(SIZE))

    def end(self, ticket: Ticket, doubt: int, flying: int) -> None:
        """The sender's transport ends it: written if all has landed, else with so many in doubt, some flying."""
        del self.tickets[ticket.number]
        outbound, left = self.outbound[ticket.link.rank], ticket.left
        written, doubt = len(ticket.pieces) - len(left), min(doubt, len(left))
        for piece in left[: min(flying, doubt)]:
            if self.may_land(piece):
                if self.late:
                    piece.adrift = True
                else:
                    piece.carried = self._read(piece)
                self.flying.append(piece)
        if left:
            effects = outbound.ticket_failed(ticket.number, written, doubt, "provoked", self.now)
        else:
            effects = outbound.ticket_written(ticket.number, self.now)
        self.sender(ticket.link.rank, effects)

    def release(self, rank: int, request: str) -> None:
        """The request's blocks are vLLM's again, and nothing may read them."""
        blocks = {block for table in self.tables[request] for block in table}
        assert not self.reads(rank, blocks)
        self.released[rank] |= blocks

    def reads(self, rank: int, blocks: Iterable[int]) -> list[Ticket]:
        """Tickets that read any of the rank's blocks."""
        wanted = set(blocks)
        return [
            ticket
            for ticket in self.tickets.values()
            if ticket.link.rank == rank and any(piece.source in wanted for piece in ticket.pieces)
        ]

    def _pieces(self, link: Link, write: fx.Write, end: int) -> list[Piece]:
        found = []
        for move in write.moves:
            size = self.groups[move.group].block_size
            for layer in (name for name, group in LAYERS.items() if group == move.group):
                if write.layers is not None and layer not in write.layers:
                    continue
                for first in range(move.first, end, SIZE):
                    target, offset = divmod(first - move.target_start, size)
                    source, begin = divmod(first, SIZE)
                    assert begin == 0
                    blocks = int(move.source[source]), int(move.target[target])
                    tokens = range(first, min(first + SIZE, end))
                    found.append(Piece(link, write.key, layer, blocks[0], tokens, blocks[1], offset))
        return found

    def _post(self, rank: int, write: fx.Write) -> None:
        outbound = self.outbound[rank]
        if not outbound.wants(write.key):
            return
        fate = self.posts.popleft() if self.posts else "whole"
        link = next(link for link in self.all_links() if link.connection == write.key[0])
        if fate == "failed" or link.sender_fenced:
            self.sender(rank, outbound.post_failed(write.key, Reason.WRITE_FAILED, "provoked", self.now))
            return
        if fate == "put off":
            self.partial.append(write.key)
            self.repeats.add(write.key)
            return
        end = write.end
        if fate == "partial" and write.end - write.first > SIZE:
            end = write.first + SIZE
            self.partial.append(write.key)
            self.repeats.add(write.key)
        pieces = self._pieces(link, write, end)
        if not pieces:
            self.sender(rank, outbound.skipped(write, self.now))
            return
        self.numbers += 1
        self.tickets[self.numbers] = Ticket(self.numbers, link, write, pieces)
        for piece in pieces:
            self._check_post(rank, piece)
        size = 64 * len(pieces)
        self.sender(rank, outbound.posted(write, end, self.numbers, len(pieces), size, self.now))

    def _check_post(self, rank: int, piece: Piece) -> None:
        """It is computed, in that layer, and pushed for the first time."""
        asked = self.waiting.get(self.keys[piece.key])
        values = self._read(piece)
        for index, token in enumerate(piece.tokens):
            assert values[index] is not None, f"token {token} of {piece.layer} was pushed before it was computed"
            assert asked is None or values[index] == (asked.prompt, piece.layer, rank, token)
        self.pushed[piece.key, piece.layer, piece.tokens.start] += 1
        assert self.pushed[piece.key, piece.layer, piece.tokens.start] == 1 or piece.key in self.repeats

    # Carrying out effects.

    def receiver(self, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send(connection, message):
                    link = next(link for link in self.all_links() if link.connection == connection)
                    if isinstance(message, wire.Register):
                        order = self.inbound._by_slot[message.slot][0].order
                        assert order is not None
                        self.keys[connection, message.slot, message.epoch] = order.request
                    if not link.closing:
                        link.to_sender.append(message)
                case fx.Expect(slot, epoch):
                    self.expected[slot], self.counts[slot] = epoch, 0
                case fx.Goal(slot, _, count):
                    self.goals[slot] = count
                    self._reach(slot)
                case fx.Forget(slot):
                    self.expected.pop(slot, None)
                    self.goals.pop(slot, None)
                case fx.Received():
                    self._reported(effect)
                case fx.Drop(connection):
                    link = next(link for link in self.all_links() if link.connection == connection)
                    link.closing = True
                    self._fence_rank(link)
                case fx.Count(event):
                    self.events[event] += 1
                case _:
                    raise AssertionError(effect)

    def _reach(self, slot: int) -> None:
        if self.counts[slot] >= self.goals.get(slot, 1 << 62):
            del self.goals[slot]
            self.receiver(self.inbound.arrived(slot, self.expected[slot], self.counts[slot], self.now))

    def _reported(self, effect: fx.Received) -> None:
        asked = self.waiting.pop(effect.request)  # KeyError: told twice, or of an intent.
        self.reports.append((effect.request, effect.reason))
        keys = {key for key, name in self.keys.items() if name == effect.request}
        pieces = [piece for ticket in self.tickets.values() for piece in ticket.pieces]
        for piece in (*pieces, *self.flying):
            assert piece.key not in keys or not self.may_land(piece), f"{effect.request} was reported under a write"
        if effect.reason is None:
            self._check_bytes(asked)

    def _check_bytes(self, asked: Asked) -> None:
        """Every token of every layer, of each rank that was asked."""
        for rank in asked.ranks:
            for layer, number in LAYERS.items():
                group = self.groups[number]
                begin = group.first_token(asked.start, asked.end)
                base = begin // group.block_size
                for token in range(Group(SIZE, group.window).first_token(asked.start, asked.end), asked.end):
                    block, offset = asked.blocks[number][token // group.block_size - base], token % group.block_size
                    assert self.received[rank, layer, block, offset] == (asked.prompt, layer, rank, token)

    def sender(self, rank: int, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send(connection, message):
                    link = next(link for link in self.all_links() if link.connection == connection)
                    if not link.closing:
                        link.to_receiver.append(message)
                case fx.Write():
                    self._post(rank, effect)
                case fx.CancelTicket(ticket):
                    self.tickets[ticket].cancelled = True
                case fx.Freed(request, asked):
                    self._freed(rank, request, asked)
                case fx.Drop(connection):
                    link = next(link for link in self.all_links() if link.connection == connection)
                    link.closing = link.sender_fenced = True
                case fx.Sent():
                    pass
                case fx.Count(event):
                    self.events[event] += 1
                case _:
                    raise AssertionError(effect)

    def _freed(self, rank: int, request: str, asked: int) -> None:
        """Its blocks are the next one's at once. Where all that asked have got it, the others hear so."""
        assert request not in self.freed[rank], "let go of twice"
        self.freed[rank].append(request)
        self.release(rank, request)
        self.got[request] += asked > 0
        if asked and self.got[request] >= asked:
            self.let_go += [(other, request) for other in RANKS if request not in self.freed[other]]
