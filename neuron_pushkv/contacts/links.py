"""The peers that a worker is connected to: who may be, what each is asked for, and how one is cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from neuron_pushkv.errors import HandshakeRefused, LayoutError, Reason, TransportError
from neuron_pushkv.layout import Layout
from neuron_pushkv.ledger.inbound import Share
from neuron_pushkv.ledger.registration import Receiver
from neuron_pushkv.peers.handler import DOCTOR
from neuron_pushkv.plan.mapping import check
from neuron_pushkv.plan.packing import PackedPlan, choose
from neuron_pushkv.plan.pair import PairPlan
from neuron_pushkv.plan.shares import askers, shares
from neuron_pushkv.plan.staging import Staging
from neuron_pushkv.transport.base import Peer, Registration, Transport
from neuron_pushkv.wire import Identity, Rank, RemoteRegion

PLANS_PER_PEER = 16
"""A receiver has one share of heads, or a few; what asks for more gets new plans each time."""

Heads = tuple[int, int]


@dataclass
class Link:
    """One peer: its transport endpoint, and its regions with the transport's names for their memories."""

    peer: Peer
    identity: Identity
    layout: Layout
    regions: tuple[RemoteRegion, ...]
    fenced: bool = False
    plans: dict[Heads, tuple[PairPlan | PackedPlan, Receiver]] = field(default_factory=dict)


class Links:
    """``identity`` is ours without endpoint and regions; ``regions`` are our registrations in the layout's order.

    ``sizes`` are our engine's pipeline and tensor parallel sizes. Writes under ``smallest_write_bytes`` are packed in
    what ``staging`` gives.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        identity: Identity,
        sizes: tuple[int, int],
        regions: Sequence[Registration],
        smallest_write_bytes: int,
        staging: Callable[[], Staging],
    ) -> None:
        assert identity.layout is not None
        self._transport = transport
        self._layout = identity.layout
        self._layers = frozenset(region.layer for region in identity.layout.regions)
        self._identity = identity
        self._sizes = sizes
        self._registrations = tuple(regions)
        self._smallest_write_bytes = smallest_write_bytes
        self._staging = staging
        self._memories = tuple(dict.fromkeys(registration.description for registration in regions))
        self._regions = tuple(
            RemoteRegion(self._memories.index(registration.description), region.address - registration.memory.address)
            for registration, region in zip(regions, self._layout.regions, strict=True)
        )
        self._links: dict[int, Link] = {}

    # The handshake.

    def identity(self, role: str) -> tuple[Identity, Peer | None]:
        """What we say of ourselves. For a worker: with an endpoint of its own, so that it alone can be fenced."""
        if role == DOCTOR:
            return self._identity, None
        if role != "worker":
            return msgspec.structs.replace(self._identity, layout=None), None
        peer = self._transport.open_peer()
        endpoint = self._transport.address(peer)
        return msgspec.structs.replace(
            self._identity, memories=self._memories, regions=self._regions, endpoint=endpoint
        ), peer

    def check(self, role: str, theirs: Identity) -> None:
        """Refuse, naming both values, a worker whose KV can't be exchanged with ours."""
        ours = self._identity
        if role in ("rank", "lookup", DOCTOR):
            return
        if role != "worker":
            raise HandshakeRefused(Reason.REFUSED, f"a worker accepts workers, not '{role}'")
        if theirs.provider != ours.provider:
            text = f"transport differs: {ours.provider} here, {theirs.provider or 'none'} there; configure the same"
            raise HandshakeRefused(Reason.TRANSPORT_MISMATCH, text)
        if theirs.model != ours.model:
            text = f"model differs: {ours.model} here, {theirs.model or 'none'} there; serve the same weights and dtype"
            raise HandshakeRefused(Reason.MODEL_MISMATCH, text)
        if theirs.layout is None or len(theirs.regions) != len(theirs.layout.regions):
            raise HandshakeRefused(Reason.LAYOUT_MISMATCH, "the peer announces no memory for its KV cache")
        if any(region.memory >= len(theirs.memories) for region in theirs.regions):
            raise HandshakeRefused(Reason.LAYOUT_MISMATCH, "the peer's regions lie in memory that it doesn't describe")
        try:
            check(self._layout, theirs.layout)
        except LayoutError as error:
            raise HandshakeRefused(Reason.LAYOUT_MISMATCH, str(error)) from error

    def add(self, connection: int, theirs: Identity, peer: Peer) -> None:
        """The connection is up. Raises :class:`TransportError`, with the endpoint closed, if theirs can't be used."""
        try:
            self._transport.connect(peer, theirs.endpoint)
            targets = [self._transport.attach(peer, description) for description in theirs.memories]
        except TransportError:
            self._transport.fence(peer)
            raise
        regions = tuple(RemoteRegion(targets[region.memory], region.offset) for region in theirs.regions)
        assert theirs.layout is not None
        self._links[connection] = Link(peer, theirs, theirs.layout, regions)

    # As a receiver.

    def choose(self, theirs: Sequence[Rank]) -> tuple[Rank, ...]:
        """Which of an engine's ranks may hold a share of our layers and heads. Raises :class:`LayoutError`."""
        if not theirs:
            return ()
        pipeline, tensor = _sizes_of(theirs)
        stages = self._stages(pipeline)
        wanted = shares(self._layout, (self._identity.rank.tp, self._sizes[1]), tensor)
        return tuple(Rank(theirs[0].dp, pp, tp) for pp in stages for tp in sorted(wanted))

    def shares(self, connections: Mapping[Rank, int], ranks: Sequence[Rank]) -> list[Share]:
        """What to ask each of the chosen ones of an engine's ``ranks`` for. Raises :class:`LayoutError` if they don't
        hold all our layers."""
        pipeline, tensor = _sizes_of(ranks)
        rank, (our_pipeline, our_tensor) = self._identity.rank, self._sizes
        wanted = shares(self._layout, (rank.tp, our_tensor), tensor)
        everybody = {tp for mine in range(our_tensor) for tp in shares(self._layout, (mine, our_tensor), tensor)}
        stages = our_pipeline if pipeline == 1 else 1
        found, missing = [], set(self._layers)
        for theirs, connection in connections.items():
            layers = self._layers & {region.layer for region in self._links[connection].layout.regions}
            missing -= layers
            if layers:
                asking = askers(self._layout.heads, tensor, theirs.tp, our_tensor) * stages
                found.append(Share(connection, wanted[theirs.tp], asking, len(everybody) * pipeline))
        if missing:
            text = f"{len(missing)} of our layers are on none of the peer's ranks, {min(missing)} among them"
            raise LayoutError(f"{text}; serve the same model, and split it over ranks in the same way")
        return found

    def _stages(self, pipeline: int) -> tuple[int, ...]:
        """Pipeline ranks of the sender that may hold our layers."""
        ours = self._sizes[0]
        if ours == pipeline:
            return (self._identity.rank.pp,)
        if 1 not in (ours, pipeline):
            raise LayoutError(
                f"pipeline parallel size is {ours} here, {pipeline} there; use the same, or 1 on one side"
            )
        return tuple(range(pipeline))

    # As a sender.

    def plan(self, connection: int, heads: Heads) -> PairPlan | PackedPlan:
        """How our KV goes to that peer. Raises :class:`LayoutError` for heads that one of us hasn't got."""
        return self._planned(connection, heads)[0]

    def receiver(self, connection: int, heads: Heads) -> Receiver:
        """What our ledger has to know of that peer's cache. Raises like :meth:`plan`."""
        return self._planned(connection, heads)[1]

    def _planned(self, connection: int, heads: Heads) -> tuple[PairPlan | PackedPlan, Receiver]:
        link = self._links[connection]
        known = link.plans.get(heads)
        if known is None:
            plan = choose(
                self._layout,
                link.layout,
                heads,
                self._registrations,
                link.regions,
                smallest_write_bytes=self._smallest_write_bytes,
                staging=self._staging,
            )
            if len(link.plans) >= PLANS_PER_PEER:
                link.plans.clear()
            known = plan, Receiver(link.layout.blocks, link.layout.groups, plan.units)
            link.plans[heads] = known
        return known

    # Either.

    def get(self, connection: int) -> Link | None:
        """The peer behind a connection, if it is one."""
        return self._links.get(connection)

    def fence(self, connection: int) -> None:
        """Nothing of that peer's lands after this, and no write to it goes on. Idempotent."""
        link = self._links.get(connection)
        if link is not None and not link.fenced:
            link.fenced = True
            self._transport.fence(link.peer)

    def remove(self, connection: int) -> None:
        """Forget a fenced peer."""
        del self._links[connection]

    def __len__(self) -> int:
        return len(self._links)


def _sizes_of(ranks: Sequence[Rank]) -> tuple[int, int]:
    """An engine's pipeline and tensor parallel sizes."""
    return 1 + max(rank.pp for rank in ranks), 1 + max(rank.tp for rank in ranks)
