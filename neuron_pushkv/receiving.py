"""The receiving half of a worker: orders on their way to the ledger, routes to their senders, results for vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from neuron_pushkv.bounce.bounce import Bounce
from neuron_pushkv.bounce.landing import Landings
from neuron_pushkv.contacts.contacts import Contacts
from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Layout
from neuron_pushkv.ledger import effects as fx
from neuron_pushkv.ledger.inbound import Inbound, Share
from neuron_pushkv.orders import Intent, Receive, Remote, StepOrders
from neuron_pushkv.telemetry import Transfer, transfer_of
from neuron_pushkv.wire import Release

CarryOut: TypeAlias = Callable[[Sequence[fx.Effect]], None]


class Receiving:
    """Used under the engine's lock. ``layout`` is the cache that vLLM's blocks lie in; with ``bounce`` KV lands
    elsewhere first."""

    def __init__(
        self, inbound: Inbound, contacts: Contacts, layout: Layout, carry_out: CarryOut, bounce: Bounce | None
    ) -> None:
        self._inbound, self._contacts, self._layout, self._carry_out = inbound, contacts, layout, carry_out
        self._landings: Landings | None = bounce.landings(self.ended) if bounce else None
        self._sizes: dict[str, int] = {}
        self._releases: dict[str, str] = {}
        self._ended: list[Transfer] = []
        """Loads that vLLM has not heard of yet."""

    # What the scheduler side wants.

    def begin(self, orders: StepOrders, now: float) -> None:
        """Carry out what a step's orders say of KV that is to come to us."""
        for intent in orders.intents:
            self._intend(intent, now)
        for receive in orders.receives:
            self._receive(receive, now)
        for release in orders.releases:
            errand = f"release {len(self._releases)} {release.transfer}"
            self._releases[errand] = release.transfer
            self._reach(release.remote, errand, now)
        for request in orders.withdrawn:
            if self._landings is not None and self._landings.waits(request):
                self._landings.give_up(request)
            self._carry_out(self._inbound.withdraw(request, now))

    def tick(self, now: float) -> None:
        """Act on what has waited for too long."""
        self._carry_out(self._inbound.tick(now))
        if self._landings is not None:
            for request in self._landings.expired(now):
                self._carry_out(self._inbound.withdraw(request, now))

    def has_ended(self) -> bool:
        """Whether there is anything to :meth:`take`."""
        return bool(self._ended)

    def take(self) -> list[Transfer]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # What our contacts say.

    def reached(self, request: str, shares: Sequence[Share]) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        transfer = self._releases.pop(request, None)
        if transfer is None:
            self._carry_out(self._inbound.connected(request, shares, time.monotonic()))
            return
        for share in shares:
            self._contacts.send(share.connection, Release(transfer, share.asked))

    def unreachable(self, request: str, reason: Reason, detail: str) -> None:
        """See :class:`~neuron_pushkv.contacts.Owner`."""
        if self._releases.pop(request, None) is None:
            self._carry_out(self._inbound.unreachable(request, reason, detail))

    # What the ledger says.

    def received(self, effect: fx.Received) -> None:
        """Nothing more of it comes."""
        if self._landings is None:
            self.ended(effect)
        else:
            self._landings.land(effect)

    def ended(self, effect: fx.Received) -> None:
        """vLLM may have its blocks back."""
        size = self._sizes.pop(effect.request)
        peer = self._contacts.name(effect.connection)
        self._ended.append(transfer_of("in", effect, peer, size if effect.reason is None else 0))
        if self._landings is not None:
            self._admit(self._landings, time.monotonic())

    # Steps that several of the above share.

    def _intend(self, intent: Intent, now: float) -> None:
        self._carry_out(self._inbound.intend(intent, now))
        self._reach(intent.remote, intent.request, now)

    def _receive(self, order: Receive, now: float) -> None:
        size = sum(len(blocks) * self._layout.bytes_of(group) for group, blocks in enumerate(order.blocks))
        self._sizes.setdefault(order.request, size)
        if self._landings is None:
            self._start(order, now)
        elif order.request in self._landings:
            self._carry_out([fx.Count("duplicate_receive")])
        else:
            if not self._landings.add(order, now):
                self._carry_out(self._inbound.withdraw(order.request, now))
                return
            self._admit(self._landings, now)
            if self._landings.waits(order.request):
                self._carry_out([fx.Count("receive_waits_for_staging")])
                if not self._inbound.routed(order.request):  # So that its senders keep it meanwhile.
                    end = order.end_token, order.end_content
                    self._intend(Intent(order.request, order.transfer, order.remote, *end), now)

    def _admit(self, landings: Landings, now: float) -> None:
        while (order := landings.next()) is not None:
            self._start(order, now)

    def _start(self, order: Receive, now: float) -> None:
        routed = self._inbound.routed(order.request)
        self._carry_out(self._inbound.receive(order, now))
        if not routed:
            self._reach(order.remote, order.request, now)

    def _reach(self, remote: Remote, errand: str, now: float) -> None:
        self._contacts.reach((remote.host, remote.port), errand, now)
