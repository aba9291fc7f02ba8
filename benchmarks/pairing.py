"""What it costs a sender to pair one more prompt with its registration while 5,000 others have found no partner.

    python -m benchmarks.pairing

Two engines with a connection between them. The sender's time is taken around what it does to check and pair a
registration that has arrived (from the decoded message to what is to be answered and written), and around the whole
step that offers one prompt: so pairing itself is less than what is shown. Either with nothing else known or with 5,000
of the other kind, and by transfer id as well as, for proxies that send none, by content alone. Prompts have 64 tokens.
"""

from __future__ import annotations

import logging
import time

from benchmarks import pushing
from benchmarks.options import Options, alone
from benchmarks.process import Remote
from benchmarks.rows import Row, free_port, row
from benchmarks.work import Work
from neuron_pushkv.engine import PushEngine
from neuron_pushkv.ledger.effects import Effect
from neuron_pushkv.orders import Offer, StepOrders
from neuron_pushkv.wire import Register

KNOWN = 5000
PAIRED = 100
"""Per measurement, which is their median."""
TOKENS = 64
PATIENCE_SECONDS = 600.0
CHUNK = 500
"""Registrations per step, so that one step's messages fit the connection's queue."""


class Timed(PushEngine):
    """Notes how long each registration has taken."""

    took: list[int]

    def _registered(self, connection: int, message: Register, now: float) -> list[Effect]:
        began = time.perf_counter_ns()
        effects = super()._registered(connection, message, now)
        self.took.append(time.perf_counter_ns() - began)
        return effects


class Sender(pushing.Sender):
    """One whose registrations are timed."""

    engine: Timed
    engine_class = Timed

    def open(self) -> None:
        """See above."""
        super().open()
        self.engine.took = []

    def hush(self) -> None:
        """Say nothing of the registrations whose receiver leaves with them."""
        logging.disable(logging.WARNING)

    def known(self) -> int:
        """Registrations received since the times were taken."""
        return len(self.engine.took)

    def took(self) -> list[float]:
        """Seconds of each registration since the last call."""
        took, self.engine.took = self.engine.took, []
        return [each / 1e9 for each in took]

    def offer_all(self, first: int, count: int, named: bool) -> list[float]:
        """One prompt per step; seconds of each step."""
        offers = [
            Offer(f"p{number}", f"t{number}" if named else "", pushing.prompt(TOKENS, number), 1)
            for number in range(first, first + count)
        ]
        took = []
        for offer in offers:
            began = time.perf_counter_ns()
            self.engine.begin_step(StepOrders(offers=(offer,)))
            took.append((time.perf_counter_ns() - began) / 1e9)
            self.engine.end_step()
        return took


class Receiver(pushing.Receiver):
    """One that wants many prompts."""

    def receive_all(self, first: int, count: int, named: bool, port: int) -> None:
        """All at once."""
        self.table = list(range(TOKENS // 16))
        for start in range(first, first + count, CHUNK):
            self.step(
                StepOrders(
                    receives=tuple(
                        self.wanted(number, port, pushing.prompt(TOKENS, number), None if named else "")
                        for number in range(start, min(start + CHUNK, first + count))
                    )
                )
            )


def measure(options: Options) -> list[Row]:
    """Both directions, with none and with many others known, by transfer id and by content."""
    rows = []
    for named in (True, False):
        for known in (0, KNOWN):
            for offers_first in (True, False):
                rows.append(_measure(options, named, known, offers_first))
    options.say("pairing: done")
    return rows


def _measure(options: Options, named: bool, known: int, offers_first: bool) -> Row:
    """``offers_first``: registrations are timed that arrive where their prompts, and ``known`` others, are known."""
    work = Work(TOKENS, spare_blocks=4)
    provider, port = options.providers[0], free_port()
    patience = {"unknown_source_seconds": PATIENCE_SECONDS, "no_progress_seconds": PATIENCE_SECONDS}
    sender = Remote(Sender, "sender", provider, options.libfabric, port, work, patience)
    receiver = None
    times: list[float] = []
    try:
        receiver = Remote(Receiver, "receiver", provider, options.libfabric, free_port(), work, patience)
        other = 1_000_000

        def register(first: int, count: int) -> list[float]:
            receiver.ask("receive_all", first, count, named, port)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while sender.ask("known") < count and time.monotonic() < deadline:
                time.sleep(0.05)
            return list(sender.ask("took"))

        def offer(first: int, count: int) -> list[float]:
            return list(sender.ask("offer_all", first, count, named))

        first, second = (offer, register) if offers_first else (register, offer)
        register(other, 1)  # The connection is made.
        first(other + 1, known)
        for repeat in range(options.repeats):
            number = 1 + repeat * PAIRED
            first(number, PAIRED)
            times += second(number, PAIRED)
        versions = {"libfabric": sender.ask("versions")}
    finally:
        sender.ask("hush")
        if receiver is not None:
            receiver.close()
        sender.close()
    what = "a registration pairs with an offer" if offers_first else "an offer pairs with a registration"
    return row(
        f"{what}, {known} others unmatched, by {'transfer id' if named else 'content'}",
        "pushkv",
        provider,
        tokens=TOKENS,
        seconds=times,
        versions=versions,
    )


if __name__ == "__main__":
    alone(measure)
