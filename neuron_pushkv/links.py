"""The peers that a worker is connected to: who may be, where their memory is, and how one is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from neuron_pushkv.errors import HandshakeRefused, LayoutError, Reason, TransportError
from neuron_pushkv.layout import check_equal
from neuron_pushkv.transport.base import Peer, Registration, Transport
from neuron_pushkv.wire import Identity, RemoteRegion


@dataclass
class Link:
    """One peer: its transport endpoint, its regions (in the layout's order) and how many blocks these have."""

    peer: Peer
    identity: Identity
    regions: tuple[RemoteRegion, ...]
    """With the transport's names for its memories."""
    fenced: bool = False

    @property
    def blocks(self) -> int:
        """Block ids below this may be written."""
        return self.identity.layout.blocks if self.identity.layout else 0


class Links:
    """``identity`` is ours without endpoint and regions; ``regions`` are our registrations in the layout's order."""

    def __init__(self, *, transport: Transport, identity: Identity, regions: Sequence[Registration]) -> None:
        assert identity.layout is not None
        self._transport = transport
        self._layout = identity.layout
        self._identity = identity
        self._memories = tuple(dict.fromkeys(registration.description for registration in regions))
        self._regions = tuple(
            RemoteRegion(self._memories.index(registration.description), region.address - registration.memory.address)
            for registration, region in zip(regions, self._layout.regions, strict=True)
        )
        self._links: dict[int, Link] = {}

    def identity(self, role: str) -> tuple[Identity, Peer | None]:
        """What we say of ourselves. For a worker: with an endpoint of its own, so that it alone can be fenced."""
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
        if role in ("rank", "lookup"):
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
            check_equal(self._layout, theirs.layout)
        except LayoutError as error:
            raise HandshakeRefused(Reason.LAYOUT_MISMATCH, str(error)) from error
        if any(region.blocks < theirs.layout.blocks for region in theirs.layout.regions):
            raise HandshakeRefused(Reason.LAYOUT_MISMATCH, "the peer's regions are smaller than its number of blocks")
        if theirs.rank.shard != ours.rank.shard:
            text = f"rank differs: {ours.rank} here, {theirs.rank} there; start both engines with the same sizes"
            raise HandshakeRefused(Reason.LAYOUT_MISMATCH, text)

    def add(self, connection: int, theirs: Identity, peer: Peer) -> None:
        """The connection is up. Raises :class:`TransportError`, with the endpoint closed, if theirs can't be used."""
        try:
            self._transport.connect(peer, theirs.endpoint)
            targets = [self._transport.attach(peer, description) for description in theirs.memories]
        except TransportError:
            self._transport.fence(peer)
            raise
        regions = tuple(RemoteRegion(targets[region.memory], region.offset) for region in theirs.regions)
        self._links[connection] = Link(peer, theirs, regions)

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
