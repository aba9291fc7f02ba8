"""What both sides' vLLM may do, as rules of a state machine; :mod:`test_model` adds the world between them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from neuron_pushkv import wire
from neuron_pushkv.content import Content, seed
from neuron_pushkv.errors import Reason
from neuron_pushkv.orders import Finish, Intent, Offer, Ready, Receive, Remote

from .parts import GROUPS, LAYERS, RANKS, SIZE, Asked, Ticket
from .world import World

PROMPTS = st.integers(1, 2)
TRANSFERS = st.sampled_from(["", "t1", "t2", "t3"])
LENGTHS = st.sampled_from([1, SIZE, SIZE + 1, 3 * SIZE, 4 * SIZE + 2])
ASKED = st.sampled_from([(0, 1), (0, 1), (0,), (1,)])
REMOTE = Remote("127.0.0.1", 1)


def content(tokens: int, prompt: int) -> Content:
    """Prompts with another number differ from the start."""
    return Content.of(seed("model"), [100 * prompt + index for index in range(tokens)])


class Lives(RuleBasedStateMachine):
    """Sender requests ``p…`` and receiver requests ``d…``; each has blocks of its own, which nobody has after it."""

    @initialize(
        quarantine=st.sampled_from([0.0, 5.0]), block_size=st.sampled_from([SIZE, 2 * SIZE]), late=st.booleans()
    )
    def begin(self, quarantine: float, block_size: int, late: bool) -> None:
        """``late``: the receiver reads writes in doubt from whatever lies there by then."""
        self.world = World(quarantine, block_size, late)
        self.number = self.block = 0
        self.prompts: dict[str, tuple[int, int]] = {}
        self.transfers: dict[str, str] = {}
        self.ready: dict[str, int] = {}
        self.ahead: dict[str, tuple[int, set[str]]] = {}
        """Of a step that is under way: its tokens, and the layers whose hooks have been called."""
        self.running: set[str] = set()
        self.kept: set[str] = set()
        self.intents: dict[str, tuple[int, str, int, tuple[int, ...]]] = {}
        self.unrouted: dict[str, tuple[int, ...]] = {}
        """Requests that wait for their connections, and the ranks that they need."""

    def name(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"

    def take(self, count: int) -> tuple[int, ...]:
        """Blocks that nobody has had."""
        self.block += count
        return tuple(range(self.block - count, self.block))

    # The sender's vLLM.

    @rule(prompt=PROMPTS, transfer=TRANSFERS, tokens=LENGTHS, deliveries=st.integers(1, 2))
    def offer(self, prompt: int, transfer: str, tokens: int, deliveries: int) -> None:
        self.offer_one(prompt, transfer, tokens, deliveries)

    def offer_one(self, prompt: int, transfer: str, tokens: int, deliveries: int) -> str:
        name = self.name("p")
        self.prompts[name], self.transfers[name] = (prompt, tokens), transfer
        self.running.add(name)
        self.allocate(name)
        order = Offer(name, transfer, content(tokens, prompt), deliveries)
        for rank in RANKS:
            self.world.sender(rank, self.world.outbound[rank].offer(order, self.world.now))
        return name

    def allocate(self, name: str) -> None:
        count = -(-self.prompts[name][1] // SIZE)
        self.world.tables[name] = (self.take(count), self.take(count))
        self.ready[name] = 0
        self.ahead.pop(name, None)

    def computing(self) -> list[str]:
        return sorted(name for name in self.running if self.ready[name] < self.prompts[name][1])

    def compute(self, rank: int, name: str, tokens: int, layers: list[str]) -> Ready:
        """Write those layers' KV of the first so many tokens, and say which blocks hold it."""
        prompt, length = self.prompts[name]
        tables = self.world.tables[name]
        for layer in layers:
            for token in range(tokens):
                place = layer, tables[LAYERS[layer]][token // SIZE], token % SIZE
                self.world.memory[rank][place] = (prompt, layer, rank, token)
        window: tuple[int, ...] = ()
        if tokens == length:
            gone = GROUPS[1].first_token(0, max(length - 1, 1)) // SIZE
            window = (-1,) * gone + tables[1][gone:]
        return Ready(name, tokens, (tables[0][: -(-tokens // SIZE)], window))

    def advance_to(self, name: str, tokens: int) -> None:
        if name in self.ahead and self.ahead.pop(name)[0] != tokens:
            self.repeat(name)
        self.ready[name] = tokens
        for rank in RANKS:
            order = self.compute(rank, name, tokens, list(LAYERS))
            self.world.sender(rank, self.world.outbound[rank].advance(order, self.world.now))

    def layer_ahead(self, name: str, tokens: int, layer: str) -> None:
        self.ahead.setdefault(name, (tokens, set()))[1].add(layer)
        for rank in RANKS:
            order = self.compute(rank, name, tokens, [layer])
            self.world.sender(rank, self.world.outbound[rank].advance_layer(order, layer, self.world.now))

    def repeat(self, name: str) -> None:
        """What is being pushed of that source may be pushed again, and so may layers that have gone ahead of others."""
        for rank in RANKS:
            outbound = self.world.outbound[rank]
            self.world.repeats |= {ticket.write.key for ticket in self.reading(rank, name)}
            source = outbound._sources.get(name)
            for key in source.active if source is not None else ():
                if any(track.ahead for track in outbound._deliveries[key].tracks):
                    self.world.repeats.add(key)

    def reading(self, rank: int, name: str) -> list[Ticket]:
        return self.world.reads(rank, [block for table in self.world.tables[name] for block in table])

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), whole=st.booleans())
    def advance(self, data: st.DataObject, whole: bool) -> None:
        """A chunk of any size, which need not fill a block; it may end a step of which some layers have gone ahead."""
        name = data.draw(st.sampled_from(self.computing()))
        length = self.prompts[name][1]
        known = [self.ahead[name][0]] * 3 if name in self.ahead else []
        self.advance_to(name, length if whole else data.draw(st.sampled_from([*known, *self.chunks(name)])))

    def chunks(self, name: str) -> range:
        return range(self.ready[name] + 1, self.prompts[name][1] + 1)

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), layer=st.sampled_from([*LAYERS, "full.0"]))
    def advance_layer(self, data: st.DataObject, layer: str) -> None:
        name = data.draw(st.sampled_from(self.computing()))
        tokens = self.ahead[name][0] if name in self.ahead else data.draw(st.sampled_from(self.chunks(name)))
        self.layer_ahead(name, tokens, layer)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data: st.DataObject, failed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.finish_one(name, not failed and self.ready[name] == self.prompts[name][1], data)

    def finish_one(self, name: str, kept: bool, data: st.DataObject | None = None) -> None:
        self.running.discard(name)
        if kept:
            self.kept.add(name)
        for rank in RANKS:
            if not kept:
                self.take_back(rank, name, data)
            outbound = self.world.outbound[rank]
            self.world.sender(rank, outbound.finish(Finish(name, kept), self.world.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), then=st.sampled_from(["", "somebody registers", "it is computed again"]))
    def preempt(self, data: st.DataObject, then: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        prompt, tokens = self.prompts[name]
        self.preempt_one(name, data)
        if then == "somebody registers":
            self.receive_one(prompt, self.transfers[name], tokens, False, RANKS)
        elif then:
            self.advance_to(name, tokens)
        if then:
            self.world.deliver_all()

    def preempt_one(self, name: str, data: st.DataObject | None = None) -> None:
        for rank in RANKS:
            self.take_back(rank, name, data)
        self.allocate(name)

    def take_back(self, rank: int, name: str, data: st.DataObject | None) -> None:
        """Writes that read its blocks end first, as the engine sees to; or their receiver is cut off."""
        self.repeat(name)
        outbound, reading = self.world.outbound[rank], self.reading(rank, name)
        self.world.sender(rank, outbound.drain(name))
        if reading and data is not None and data.draw(st.sampled_from([False, False, True]), label="too slow"):
            for link in {id(ticket.link): ticket.link for ticket in reading}.values():
                link.closing = link.sender_fenced = True
        for ticket in reading:
            self.end_one(ticket, data)
        assert not outbound.reading(name)
        self.world.release(rank, name)

    def end_one(self, ticket: Ticket, data: st.DataObject | None) -> None:
        """As written if all has landed. If not, none is in doubt, or all are, of which some still fly."""
        doubt = ticket.left and data is not None and data.draw(st.booleans(), label="in doubt")
        flying = data.draw(st.integers(0, len(ticket.left)), label="flying") if data is not None and doubt else 0
        self.world.end(ticket, len(ticket.left) if doubt else 0, flying)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.evict_one(data.draw(st.sampled_from(sorted(self.kept))))

    def evict_one(self, name: str) -> None:
        for rank in RANKS:
            self.world.sender(rank, self.world.outbound[rank].evict(name, self.world.now))

    @precondition(lambda self: self.world.let_go)
    @rule()
    def let_go_unasked(self) -> None:
        rank, name = self.world.let_go.pop(0)
        self.world.sender(rank, self.world.outbound[rank].evict(name, self.world.now))

    # The receiver's vLLM.

    @rule(prompt=PROMPTS, transfer=TRANSFERS, tokens=LENGTHS, hit=st.booleans(), ranks=ASKED, later=st.booleans())
    def receive_anything(
        self, prompt: int, transfer: str, tokens: int, hit: bool, ranks: tuple[int, ...], later: bool
    ) -> None:
        self.receive_one(prompt, transfer, tokens, hit, ranks, later=later)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), named=st.booleans(), hit=st.booleans(), less=st.booleans(), ranks=ASKED)
    def receive_what_was_offered(
        self, data: st.DataObject, named: bool, hit: bool, less: bool, ranks: tuple[int, ...]
    ) -> None:
        """Most receivers ask for something that there is, or was; for all its tokens, or all but the last."""
        offered = data.draw(st.sampled_from(sorted(self.prompts)))
        prompt, tokens = self.prompts[offered]
        self.receive_one(prompt, self.transfers[offered] if named else "", max(tokens - less, 1), hit, ranks)

    def receive_one(
        self,
        prompt: int,
        transfer: str,
        tokens: int,
        hit: bool,
        ranks: tuple[int, ...],
        *,
        name: str = "",
        later: bool = False,
    ) -> str:
        """``name``: of the intent that it was, if any; its way to the senders may be known already."""
        name = name or self.name("d")
        groups = self.world.groups
        start = groups[0].block_size if hit and tokens > groups[0].block_size else 0
        blocks = tuple(self.take(group.blocks_for(group.first_token(start, tokens), tokens)) for group in groups)
        self.world.owners.update({block: name for table in blocks for block in table})
        self.world.waiting[name] = Asked(prompt, transfer, start, tokens, ranks, blocks)
        text = content(tokens, prompt)
        order = Receive(name, transfer, REMOTE, start, tokens, text.at(start), text.at(tokens), blocks)
        routed = self.world.inbound.routed(name)
        self.world.receiver(self.world.inbound.receive(order, self.world.now))
        if not routed:
            self.unrouted[name] = ranks
            if not later:
                self.reach_one(name)
        return name

    @rule(prompt=PROMPTS, tokens=LENGTHS, hit=st.booleans(), ranks=ASKED, short=st.sampled_from([0, 0, 1, 5]))
    def begin_a_push(self, prompt: int, tokens: int, hit: bool, ranks: tuple[int, ...], short: int) -> None:
        """The short way to writes under way, with some of a long prompt still to come: where it gets interesting."""
        transfer = self.name("w")
        source = self.offer_one(prompt, transfer, tokens, 1)
        if tokens > short:
            self.advance_to(source, tokens - short)
        self.receive_one(prompt, transfer, tokens, hit, ranks)
        self.world.deliver_all()

    @rule(prompt=PROMPTS, transfer=TRANSFERS, tokens=LENGTHS, ranks=ASKED, later=st.booleans())
    def intend(self, prompt: int, transfer: str, tokens: int, ranks: tuple[int, ...], later: bool) -> None:
        self.intend_one(prompt, transfer, tokens, ranks, later)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), ranks=ASKED)
    def intend_what_was_offered(self, data: st.DataObject, ranks: tuple[int, ...]) -> None:
        offered = data.draw(st.sampled_from(sorted(self.prompts)))
        prompt, tokens = self.prompts[offered]
        self.intend_one(prompt, self.transfers[offered], tokens, ranks)

    def intend_one(self, prompt: int, transfer: str, tokens: int, ranks: tuple[int, ...], later: bool = False) -> str:
        name = self.name("d")
        self.intents[name] = (prompt, transfer, tokens, ranks)
        order = Intent(name, transfer, REMOTE, tokens, content(tokens, prompt).at(tokens))
        self.world.receiver(self.world.inbound.intend(order, self.world.now))
        self.unrouted[name] = ranks
        if not later:
            self.reach_one(name)
        return name

    @precondition(lambda self: self.intents)
    @rule(data=st.data(), hit=st.booleans())
    def admit(self, data: st.DataObject, hit: bool) -> None:
        """What was intended has got its blocks."""
        self.admit_one(data.draw(st.sampled_from(sorted(self.intents))), hit)

    def admit_one(self, name: str, hit: bool) -> None:
        prompt, transfer, tokens, ranks = self.intents.pop(name)
        self.receive_one(prompt, transfer, tokens, hit, ranks, name=name)

    @precondition(lambda self: self.unrouted)
    @rule(data=st.data())
    def reach(self, data: st.DataObject) -> None:
        self.reach_one(data.draw(st.sampled_from(sorted(self.unrouted))))

    def reach_one(self, name: str) -> None:
        """Its connections are there, or can't be had."""
        self.world.reconnect()
        ranks, inbound = self.unrouted.pop(name), self.world.inbound
        if all(self.world.links[rank].receiver_up for rank in ranks):
            self.world.receiver(inbound.connected(name, self.world.shares(ranks), self.world.now))
        else:
            self.world.receiver(inbound.unreachable(name, Reason.UNREACHABLE, "provoked"))

    @precondition(lambda self: self.world.waiting or self.intents)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.withdraw_one(data.draw(st.sampled_from(sorted({*self.world.waiting, *self.intents}))))

    def withdraw_one(self, name: str) -> None:
        self.intents.pop(name, None)
        self.world.receiver(self.world.inbound.withdraw(name, self.world.now))

    @rule(transfer=st.sampled_from(["t1", "t2", "t3"]), ranks=ASKED)
    def release(self, transfer: str, ranks: tuple[int, ...]) -> None:
        self.release_one(transfer, ranks)

    def release_one(self, transfer: str, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            if not self.world.links[rank].closing:
                self.world.links[rank].to_sender.append(wire.Release(transfer, len(ranks)))
