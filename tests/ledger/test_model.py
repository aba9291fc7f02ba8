"""Random lives of many transfers: whatever happens in whatever order, the guarantees of the protocol hold."""

from __future__ import annotations

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from neuron_pushkv.orders import Offer, Ready

from .pair import BLOCK, Pair, content, sources, targets

PROMPTS = st.integers(1, 2)
TRANSFERS = st.sampled_from(["", "t1", "t2", "t3"])
LENGTHS = st.sampled_from([1, BLOCK, BLOCK + 1, 3 * BLOCK])


class Lives(RuleBasedStateMachine):
    """Sender requests ``p…`` and receiver requests ``d…``; every sender request has blocks of its own."""

    @initialize(quarantine=st.sampled_from([0.0, 5.0]))
    def begin(self, quarantine: float) -> None:
        self.pair = Pair(quarantine=quarantine)
        self.number = 0
        self.prompts: dict[str, tuple[int, int]] = {}
        self.transfers: dict[str, str] = {}
        self.tables: dict[str, tuple[int, ...]] = {}
        self.holds: dict[int, tuple[str, int]] = {}
        """Block -> whose prompt's which block it holds, or held until vLLM took it back."""
        self.taken_back: set[int] = set()
        self.ready: dict[str, int] = {}
        self.sealed: set[str] = set()
        self.running: set[str] = set()
        self.kept: set[str] = set()
        self.waiting: dict[str, tuple[int, int, int]] = {}
        self.asked: dict[str, tuple[int, int, int]] = {}
        self.landed: dict[int, int] = {}
        self.ends: dict[tuple[int, int, int], int] = {}
        self.in_doubt: list[tuple[int, int, int]] = []
        """Deliveries of which a write may still land, until their connection has been fenced."""
        self.checked_reports = self.checked_writes = 0

    # The sender's vLLM.

    @rule(prompt=PROMPTS, transfer=TRANSFERS, tokens=LENGTHS, deliveries=st.integers(1, 2))
    def offer(self, prompt: int, transfer: str, tokens: int, deliveries: int) -> None:
        self.offer_one(prompt, transfer, tokens, deliveries)

    def offer_one(self, prompt: int, transfer: str, tokens: int, deliveries: int) -> None:
        self.number += 1
        name = f"p{self.number}"
        self.prompts[name], self.transfers[name] = (prompt, tokens), transfer
        self.running.add(name)
        self.allocate(name)
        order = Offer(name, transfer, content(tokens, prompt), deliveries)
        self.pair.sender(self.pair.outbound.offer(order, self.pair.now))

    @precondition(lambda self: self.running - self.sealed)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running - self.sealed)))
        self.advance_one(name, self.prompts[name][1])

    @precondition(lambda self: self.running - self.sealed)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """A chunk of any size, which need not fill a block."""
        name = data.draw(st.sampled_from(sorted(self.running - self.sealed)))
        self.advance_one(name, data.draw(st.integers(self.ready[name] + 1, self.prompts[name][1])))

    def allocate(self, name: str) -> None:
        first = len(self.holds)
        self.tables[name] = tuple(range(first, first + -(-self.prompts[name][1] // BLOCK)))
        self.holds.update({block: (name, index) for index, block in enumerate(self.tables[name])})
        self.ready[name] = 0

    def advance_one(self, name: str, tokens: int) -> None:
        self.ready[name] = tokens
        if tokens == self.prompts[name][1]:
            self.sealed.add(name)
        order = Ready(name, tokens, (self.tables[name][: -(-tokens // BLOCK)],))
        self.pair.sender(self.pair.outbound.advance(order, self.pair.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(name)
        if name in self.sealed:
            self.kept.add(name)
        else:
            self.take_back(name)
        self.pair.finish(name, kept=name in self.sealed)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), asked_for=st.booleans())
    def preempt(self, data: st.DataObject, asked_for: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.take_back(name)
        self.sealed.discard(name)
        self.allocate(name)
        if asked_for:
            self.receive_one(self.prompts[name][0], self.transfers[name], self.prompts[name][1], hit=False)
            self.pair.flush()

    def take_back(self, name: str) -> None:
        """Writes that read its blocks end first, as the engine sees to."""
        self.pair.sender(self.pair.outbound.drain(name))
        for ticket, write in list(self.pair.tickets.items()):
            if ticket in self.pair.tickets and self.holds[sources(write)[0]][0] == name:
                self.end(ticket, in_doubt=False)
        assert not self.pair.outbound.reading(name)
        self.taken_back |= set(self.tables[name])

    # The receiver's vLLM.

    @rule(prompt=PROMPTS, transfer=TRANSFERS, tokens=LENGTHS, hit=st.booleans())
    def receive_anything(self, prompt: int, transfer: str, tokens: int, hit: bool) -> None:
        self.receive_one(prompt, transfer, tokens, hit)

    def receive_one(self, prompt: int, transfer: str, tokens: int, hit: bool) -> None:
        self.number += 1
        name = f"d{self.number}"
        start = BLOCK if hit and tokens > BLOCK else 0
        self.asked[name] = (prompt, start, tokens)
        self.pair.receive(name, transfer, start, tokens, prompt)
        (part,) = self.pair.inbound._by_request[name].parts
        self.waiting[name] = (part.connection, part.slot, part.epoch)
        self.ends[self.waiting[name]] = tokens

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), named=st.booleans(), hit=st.booleans())
    def receive_what_was_offered(self, data: st.DataObject, named: bool, hit: bool) -> None:
        """Most receivers ask for something that there is, or was."""
        offered = data.draw(st.sampled_from(sorted(self.prompts)))
        prompt, tokens = self.prompts[offered]
        self.receive_one(prompt, self.transfers[offered] if named else "", tokens, hit)

    @rule(prompt=PROMPTS, transfer=TRANSFERS, hit=st.booleans())
    def begin_a_stream(self, prompt: int, transfer: str, hit: bool) -> None:
        """A long prompt of which some is pushed and some is still to be computed."""
        self.offer_one(prompt, transfer, 3 * BLOCK, 1)
        self.advance_one(f"p{self.number}", 2 * BLOCK + 5)
        self.receive_one(prompt, transfer, 3 * BLOCK, hit)
        self.pair.flush()

    @rule(prompt=PROMPTS, transfer=TRANSFERS, tokens=LENGTHS, hit=st.booleans())
    def begin_a_push(self, prompt: int, transfer: str, tokens: int, hit: bool) -> None:
        """The short way to a write under way, which is where it gets interesting."""
        self.offer_one(prompt, transfer, tokens, 1)
        self.advance_one(f"p{self.number}", tokens)
        self.receive_one(prompt, transfer, tokens, hit)
        self.pair.flush()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self.pair.receiver(self.pair.inbound.withdraw(name, self.pair.now))

    # The world.

    @precondition(lambda self: self.pair.to_sender)
    @rule()
    def message_to_sender(self) -> None:
        self.pair.at_sender(self.pair.to_sender.popleft())

    @precondition(lambda self: self.pair.to_receiver)
    @rule()
    def message_to_receiver(self) -> None:
        self.pair.at_receiver(self.pair.to_receiver.popleft())

    @precondition(lambda self: self.pair.to_sender or self.pair.to_receiver)
    @rule()
    def all_messages(self) -> None:
        self.pair.flush()

    @precondition(lambda self: self.pair.tickets)
    @rule(data=st.data())
    def land_all(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pair.tickets)))
        left = self.pair.writes - self.landed.get(ticket, 0)
        self.landed[ticket] = self.pair.writes
        self.pair.land(ticket, left)

    @precondition(lambda self: any(self.landed.get(t, 0) < self.pair.writes for t in self.pair.tickets))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        open_ = [ticket for ticket in self.pair.tickets if self.landed.get(ticket, 0) < self.pair.writes]
        ticket = data.draw(st.sampled_from(open_))
        self.landed[ticket] = self.landed.get(ticket, 0) + 1
        self.pair.land(ticket, 1)

    @precondition(lambda self: self.pair.tickets)
    @rule(data=st.data(), in_doubt=st.booleans())
    def end_ticket(self, data: st.DataObject, in_doubt: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.pair.tickets))), in_doubt)

    def end(self, ticket: int, in_doubt: bool) -> None:
        landed = self.landed.get(ticket, 0)
        if landed == self.pair.writes:
            self.pair.written(ticket)
        else:
            write = self.pair.tickets.pop(ticket)
            if in_doubt:
                self.in_doubt.append(write.key)
            outcome = self.pair.outbound.ticket_failed(ticket, landed, int(in_doubt), "provoked", self.pair.now)
            self.pair.sender(outcome)

    @precondition(lambda self: self.waiting)
    @rule(really=st.sampled_from([True, False, False]))
    def cut(self, really: bool) -> None:
        if really:
            self.pair.cut()

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.5, 3, 12, 40, 130]), stepping=st.booleans())
    def time_passes(self, seconds: float, stepping: bool) -> None:
        """Deadlines act; messages stay where they are."""
        if stepping:
            self.pair.outbound.begin_step()
        self.pair.now += seconds
        self.pair.receiver(self.pair.inbound.tick(self.pair.now))
        self.pair.sender(self.pair.outbound.tick(self.pair.now))
        self.pair.outbound.end_step()

    # What must always hold.

    @invariant()
    def reports_are_true_and_given_once(self) -> None:
        for name, reason in self.pair.reports[self.checked_reports :]:
            key = self.waiting.pop(name)  # KeyError: told twice
            for ticket, write in self.pair.tickets.items():
                if write.key == key:
                    assert self.landed.get(ticket, 0) == self.pair.writes, f"{name} reported under a write"
            assert key not in self.in_doubt or key[0] != self.pair.connection, f"{name} reported with writes in doubt"
            event(f"reported: {reason}")
            if reason is None:
                self._right_bytes(name, key)
        self.checked_reports = len(self.pair.reports)

    def _right_bytes(self, name: str, key: tuple[int, int, int]) -> None:
        """Every block of the receiver was last written from a block of that prompt and that position."""
        written = {
            target: self.holds[source]
            for ticket, write in self.pair.all_writes.items()
            if write.key == key and self.landed.get(ticket, 0) == self.pair.writes
            for source, target in zip(sources(write), targets(write), strict=True)
        }
        prompt, start, end = self.asked[name]
        positions = [written[target][1] for target in sorted(written)]
        assert positions == list(range(start // BLOCK, -(-end // BLOCK)))
        assert {self.prompts[owner][0] for owner, _ in written.values()} == {prompt}

    @invariant()
    def nothing_reads_what_is_vllms_again(self) -> None:
        assert len(self.pair.freed) == len(set(self.pair.freed))
        freed = {block for name in self.pair.freed for block in self.tables[name]}
        for write in self.pair.tickets.values():
            assert not (freed | self.taken_back) & set(sources(write))

    @invariant()
    def nothing_is_pushed_before_it_is_computed(self) -> None:
        for write in list(self.pair.all_writes.values())[self.checked_writes :]:
            for block in sources(write):
                name, index = self.holds[block]
                assert self.ready[name] >= min((index + 1) * BLOCK, self.ends[write.key])
        self.checked_writes = len(self.pair.all_writes)

    @invariant()
    def slots_are_used_by_one_delivery(self) -> None:
        keys = [key[1] for key in self.waiting.values()]
        assert len(keys) == len(set(keys))

    def teardown(self) -> None:
        """Left alone, everything ends: within the longest deadlines, with nothing left on either side."""
        if not hasattr(self, "pair"):
            return
        self.pair.outbound.end_step()
        for _ in range(3):
            self.pair.pass_time(200, step=1)
        self.reports_are_true_and_given_once()
        assert not self.waiting
        assert self.pair.quiet()
        assert set(self.pair.freed) == self.kept
        assert self.pair.outbound.sources == len(self.running)
        assert not self.pair.outbound._deliveries._waiting
        assert not self.pair.outbound._deliveries._per_connection


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=250, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
