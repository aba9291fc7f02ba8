"""Random lives of many transfers: whatever happens in whatever order, the guarantees of the protocol hold."""

from __future__ import annotations

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from neuron_pushkv.errors import Reason

from .lives import ASKED, LENGTHS, PROMPTS, Lives
from .parts import RANKS, Link, Piece


class Model(Lives):
    """The lives of both sides in a world of messages, writes, connections and time."""

    # Messages and connections.

    def queues(self) -> list[tuple[Link, bool]]:
        return [
            (link, to_sender)
            for link in self.world.all_links()
            for to_sender in (True, False)
            if (link.to_sender if to_sender else link.to_receiver)
        ]

    @precondition(lambda self: self.queues())
    @rule(data=st.data())
    def message(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.queues()) - 1))
        self.world.deliver(*self.queues()[number])

    @precondition(lambda self: self.queues())
    @rule()
    def all_messages(self) -> None:
        self.world.deliver_all()

    @precondition(lambda self: self.world.waiting or self.intents)
    @rule(rank=st.sampled_from(RANKS), really=st.booleans(), lost=st.sampled_from(["", "r", "s", "rs"]))
    def cut(self, rank: int, really: bool, lost: str) -> None:
        """The network ends a connection; messages may be lost before either side sees it."""
        link = self.world.links[rank]
        if really:
            link.closing = True
            for side, queue in (("s", link.to_sender), ("r", link.to_receiver)):
                if side in lost:
                    queue.clear()

    def closing(self) -> list[tuple[Link, bool]]:
        return [
            (link, at_sender)
            for link in self.world.links
            for at_sender in (True, False)
            if link.closing and (link.sender_up if at_sender else link.receiver_up)
        ]

    @precondition(lambda self: self.closing())
    @rule(data=st.data())
    def see_the_end(self, data: st.DataObject) -> None:
        """One side sees that a connection has ended, with what came before it."""
        self.see(*self.closing()[data.draw(st.integers(0, len(self.closing()) - 1))])

    def see(self, link: Link, at_sender: bool) -> None:
        (self.world.sender_down if at_sender else self.world.receiver_down)(link)
        self.world.reconnect()

    # Writes.

    def pieces(self) -> list[Piece]:
        pieces = [piece for ticket in self.world.tickets.values() for piece in ticket.pieces]
        return [piece for piece in (*pieces, *self.world.flying) if self.world.may_land(piece)]

    @precondition(lambda self: self.pieces())
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.world.land(self.pieces()[data.draw(st.integers(0, len(self.pieces()) - 1))])

    @precondition(lambda self: self.pieces())
    @rule(data=st.data())
    def land_all(self, data: st.DataObject) -> None:
        """All of one delivery's."""
        key = data.draw(st.sampled_from(sorted({piece.key for piece in self.pieces()})))
        for piece in self.pieces():
            if piece.key == key and self.world.may_land(piece):
                self.world.land(piece)

    @precondition(lambda self: self.world.tickets)
    @rule(data=st.data())
    def end_ticket(self, data: st.DataObject) -> None:
        self.end_one(self.world.tickets[data.draw(st.sampled_from(sorted(self.world.tickets)))], data)

    @precondition(lambda self: self.world.tickets)
    @rule()
    def end_what_has_landed(self) -> None:
        for ticket in list(self.world.tickets.values()):
            if not ticket.left:
                self.world.end(ticket, 0, 0)

    @rule(fates=st.sampled_from([["partial"], ["whole", "partial"], ["failed"], ["partial", "failed"], ["put off"]]))
    def trouble_ahead(self, fates: list[str]) -> None:
        self.world.posts.extend(fates)

    @precondition(lambda self: self.world.partial)
    @rule()
    def room_again(self) -> None:
        key = self.world.partial.pop()
        rank = next(link.rank for link in self.world.all_links() if link.connection == key[0])
        self.world.sender(rank, self.world.outbound[rank].resume(key, self.world.now))

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.5, 3, 12, 40, 130]), stepping=st.booleans())
    def time_passes(self, seconds: float, stepping: bool) -> None:
        """Deadlines act; messages stay where they are."""
        for outbound in self.world.outbound if stepping else ():
            outbound.begin_step()
        self.tick(seconds)
        for outbound in self.world.outbound:
            outbound.end_step()

    def tick(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.receiver(self.world.inbound.tick(self.world.now))
        for rank in RANKS:
            self.world.sender(rank, self.world.outbound[rank].tick(self.world.now))

    # Transfers that nothing disturbs, amid all the rest.

    @rule(
        prompt=PROMPTS,
        tokens=LENGTHS,
        ranks=ASKED,
        hit=st.booleans(),
        less=st.booleans(),
        comes=st.sampled_from(["early", "late", "intends early", "intends late"]),
        course=st.sampled_from(["at once", "streams", "by layers", "preempted", "preempted by layers", "in part"]),
    )
    def go_well(
        self, prompt: int, tokens: int, ranks: tuple[int, ...], hit: bool, less: bool, comes: str, course: str
    ) -> None:
        """It must be served, whatever else is going on."""
        whole, tokens = tokens, max(tokens - less, 1)
        self.settle_connections()
        self.world.posts.clear()
        transfer = self.name("u")
        name = self.intend_one(prompt, transfer, tokens, ranks) if comes == "intends early" else ""
        if comes == "early":
            name = self.receive_one(prompt, transfer, tokens, hit, ranks)
        self.world.deliver_all()
        source = self.offer_one(prompt, transfer, whole, 1)
        if name in self.intents and course == "streams":
            self.admit_one(name, hit)
            self.world.deliver_all()
        self.compute_well(source, course)
        self.finish_one(source, kept=True)
        if comes == "intends late":
            name = self.intend_one(prompt, transfer, tokens, ranks)
            self.world.deliver_all()
        if comes.startswith("intends"):
            self.tick(35)  # Longer than what nobody asks for is kept.
            assert source not in [freed for rank in ranks for freed in self.world.freed[rank]]
            if self.closing():
                return  # Another's deadline has cut it off.
        if name in self.intents:
            self.admit_one(name, hit)
        name = name or self.receive_one(prompt, transfer, tokens, hit, ranks)
        self.world.deliver_all()
        self.push_well(source)
        assert (name, None) in self.world.reports
        event(f"went well: {comes}, {course}")

    @rule(tokens=LENGTHS, ranks=ASKED, landed=st.booleans())
    def give_up(self, tokens: int, ranks: tuple[int, ...], landed: bool) -> None:
        """Who withdraws under a push is told as soon as its writes have ended, and nobody is cut off for it."""
        self.settle_connections()
        self.world.posts.clear()
        transfer = self.name("w")
        prompt = 10 + self.number  # Nobody else asks for that content.
        source = self.offer_one(prompt, transfer, tokens, 1)
        self.advance_to(source, tokens)
        name = self.receive_one(prompt, transfer, tokens, False, ranks)
        self.world.deliver_all()
        self.withdraw_one(name)
        self.world.deliver_all()
        for rank in RANKS:
            for ticket in self.reading(rank, source):
                assert ticket.cancelled
                if landed:
                    self.world.land(ticket.left[0])
                self.end_one(ticket, None)
        self.world.deliver_all()
        assert (name, Reason.ABORTED) in self.world.reports
        assert not self.closing()

    @rule(tokens=LENGTHS, when=st.sampled_from(["before", "during", "after", "evicted"]))
    def go_unasked(self, tokens: int, when: str) -> None:
        """Who says that nobody will ask is believed at once, whenever that is; so is a scheduler that needs room."""
        self.settle_connections()
        transfer, source = self.name("v"), ""
        prompt = 10 + self.number  # As above.
        for stage in ("before", "during", "after"):
            if stage == "during":
                source = self.offer_one(prompt, transfer, tokens, 1)
            elif stage == "after":
                self.advance_to(source, tokens)
                self.finish_one(source, kept=True)
            if when == stage:
                self.release_one(transfer, RANKS)
                self.world.deliver_all()
        if when == "evicted":
            self.intend_one(prompt, transfer, tokens, RANKS)
            self.world.deliver_all()
            self.evict_one(source)
        assert all(source in freed for freed in self.world.freed)

    def settle_connections(self) -> None:
        self.world.deliver_all()
        while self.closing():
            self.see(*self.closing()[0])
            self.world.deliver_all()
        self.world.reconnect()

    def compute_well(self, name: str, course: str) -> None:
        """In steps of three to eight tokens."""
        tokens = self.prompts[name][1]
        done = 0
        while course != "at once" and (done := done + 3) < tokens:
            if course.endswith("by layers"):
                self.layer_ahead(name, done, "full.0")
                done += 4 if course == "by layers" and done % 2 else 0  # The step is longer than was said.
            if course == "preempted by layers":
                self.preempt_one(name)
            if course == "in part":
                self.world.posts.append("put off" if done % 2 else "partial")
            self.advance_to(name, min(done, tokens))
        if course == "preempted":
            self.preempt_one(name)
        if course == "streams" and self.ready[name] < tokens - 1:
            self.advance_to(name, tokens - 1)
        if done < tokens and course == "by layers":
            self.layer_ahead(name, tokens, "full.1")
        if self.ready[name] < tokens:
            self.advance_to(name, tokens)

    def push_well(self, source: str) -> None:
        """Land and end all that reads the source, until nothing is left to do."""
        self.world.posts.clear()
        while self.world.partial:
            self.room_again()
        for rank in RANKS:
            for ticket in self.reading(rank, source):
                for piece in ticket.left:
                    self.world.land(piece)
                self.world.end(ticket, 0, 0)
        self.world.deliver_all()

    # What must always hold, beside what the world asserts of each write, report and release.

    @invariant()
    def nothing_reads_what_is_vllms_again(self) -> None:
        for ticket in self.world.tickets.values():
            released = self.world.released[ticket.link.rank]
            assert not any(piece.source in released for piece in ticket.pieces)

    @invariant()
    def what_is_asked_for_is_in_one_place(self) -> None:
        slots = [slot for slot, (delivery, _) in self.world.inbound._by_slot.items() if delivery.order is not None]
        assert set(self.world.expected) == set(slots)

    def teardown(self) -> None:
        """Left alone, everything ends: within the longest deadlines, with nothing left on either side."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for name in sorted(self.intents):
            self.withdraw_one(name)
        for name in sorted(self.running):
            self.finish_one(name, kept=self.ready[name] == self.prompts[name][1])
        waited = 0.0
        while not self.quiet():
            assert waited < 1000, "something never ends"
            self.settle_connections()
            for name in sorted(self.unrouted):
                self.reach_one(name)
            while world.let_go:
                self.let_go_unasked()
            while world.partial:
                self.room_again()
            for ticket in list(world.tickets.values()):
                if ticket.cancelled or ticket.link.sender_fenced or not ticket.left:
                    world.end(ticket, 0, 0)
            self.tick(1 if waited < 10 else 6)
            waited += 1 if waited < 10 else 6
        for _, reason in world.reports:
            event(f"reported: {reason}")
        for rank, outbound in enumerate(world.outbound):
            deliveries, sources = outbound._deliveries, outbound._sources
            for table in (deliveries._by_ticket, deliveries._waiting, deliveries._per_connection, sources._done):
                assert not table
            assert not [*sources._by_transfer, *sources._by_content]
            assert sorted(world.freed[rank]) == sorted(self.kept)
        assert not [*world.inbound._by_slot, *world.expected]
        assert world.inbound._slots.taken == 0

    def quiet(self) -> bool:
        """Nothing is owed by anyone to anyone."""
        world = self.world
        owed = [len(world.inbound), *(len(outbound) + len(outbound.sources) for outbound in world.outbound)]
        return not (any(owed) or world.waiting or world.tickets or self.closing() or self.queues())


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
