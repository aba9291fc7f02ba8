"""One connection per pair of ranks, and no way back for a process that has been restarted since."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from neuron_pushkv.errors import HandshakeRefused, Reason
from neuron_pushkv.peers.link import Link
from neuron_pushkv.wire import Identity, Rank

Pair: TypeAlias = tuple[str, Rank]
"""The other side's engine id and rank; ours are the same for all."""
MAX_REMEMBERED = 4096


class Pairs:
    """The worker connections that are up, by pair. ``ours`` is what the other sides know us by."""

    def __init__(self, ours: Pair) -> None:
        self.ours = ours
        self._up: dict[Pair, tuple[int, Link]] = {}
        self._newest: OrderedDict[Pair, int] = OrderedDict()
        self._replaced: OrderedDict[tuple[Pair, int], None] = OrderedDict()

    def current(self, pair: Pair, incarnation: int) -> Link | None:
        """The connection to that very process, if one is up."""
        known, link = self._up.get(pair, (None, None))
        return link if known == incarnation else None

    def check(self, pair: Pair, incarnation: int) -> None:
        """Raise :class:`HandshakeRefused` for ourselves, and for a process whose successor we have met."""
        if pair == self.ours:
            raise HandshakeRefused(
                Reason.REFUSED, f"both sides are engine {pair[0]}, {pair[1]}; give each engine its own engine_id"
            )
        if (pair, incarnation) in self._replaced:
            raise HandshakeRefused(
                Reason.STALE_INCARNATION,
                f"incarnation {incarnation:x} of engine {pair[0]} was replaced by {self._newest.get(pair, 0):x}; "
                "if two engines have that engine_id, give each its own",
            )

    def make_room(self, pair: Pair, incarnation: int) -> None:
        """End what is left of an older process of that name: it has been restarted, or it couldn't be here now."""
        known, link = self._up.get(pair, (incarnation, None))
        if link is not None and known != incarnation:
            link.end(Reason.PEER_LOST, f"engine {pair[0]} has been restarted")

    def add(self, theirs: Identity, link: Link) -> None:
        """It is up, and the only one of its pair."""
        pair = pair_of(theirs)
        newest = self._newest.pop(pair, theirs.incarnation)
        if newest != theirs.incarnation:
            self._replaced[pair, newest] = None
        self._newest[pair] = theirs.incarnation
        self._up[pair] = (theirs.incarnation, link)
        for memory in (self._newest, self._replaced):
            while len(memory) > MAX_REMEMBERED:
                memory.popitem(last=False)

    def remove(self, theirs: Identity, link: Link) -> None:
        """It has ended."""
        pair = pair_of(theirs)
        if self._up.get(pair) == (theirs.incarnation, link):
            del self._up[pair]


def pair_of(identity: Identity) -> Pair:
    """What tells the pairs of one node apart."""
    return (identity.engine_id, identity.rank)
