"""Decode legs on the scheduler side: each load is tried once, and vLLM hears its end once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from neuron_pushkv.connector.metadata import Refused
from neuron_pushkv.connector.parameters import DecodeLeg
from neuron_pushkv.content import Content
from neuron_pushkv.orders import Receive


class _State(Enum):
    WANTED = auto()  # vLLM has no blocks for it yet, and may ask again
    WAITING = auto()  # ordered; vLLM holds the blocks until a worker reports it
    ABORTED = auto()  # the same, but the request is gone
    SETTLED = auto()  # loaded, failed, or not needed; what is missing is computed


@dataclass
class _Load:
    leg: DecodeLeg | None
    """``None`` for one that is refused and must fail by vLLM's policy."""
    state: _State


class Receiving:
    """All decode legs of this engine."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._loads: dict[str, _Load] = {}
        self._receives: list[Receive] = []
        self._refused: list[Refused] = []
        self._withdrawn: list[str] = []

    def knows(self, request: str) -> bool:
        """Whether it has been decided what to do about this request."""
        return request in self._loads

    def admit(self, request: str, leg: DecodeLeg | None) -> None:
        """Load it, or fail it where ``leg`` is ``None``."""
        self._loads[request] = _Load(leg, _State.WANTED)

    def settle(self, request: str) -> None:
        """Don't load it (any more): its prompt is computed here."""
        load = self._loads.setdefault(request, _Load(None, _State.SETTLED))
        if load.state is _State.WANTED:
            load.state = _State.SETTLED

    def wants(self, request: str) -> bool:
        """Whether a load is still to be asked for."""
        load = self._loads.get(request)
        return load is not None and load.state is _State.WANTED

    def leg(self, request: str) -> DecodeLeg | None:
        """Where it is to be loaded from."""
        return self._loads[request].leg

    def order(self, request: str, leg: DecodeLeg, content: Content, start: int, table: Sequence[int]) -> None:
        """Blocks have been allocated: have the tokens from ``start`` to the prompt's end pushed into them."""
        end = content.length
        first, last = start // self._block_size, -(-end // self._block_size)
        blocks = tuple(table[first:last])
        if not 0 <= start < end or start % self._block_size or len(blocks) != last - first:
            raise ValueError(f"tokens {start} to {end} of {request} don't fit {len(table)} blocks")
        receive = Receive(
            request=request,
            transfer=leg.transfer,
            host=leg.host,
            port=leg.port,
            start_token=start,
            end_token=end,
            start_content=content.at(start),
            end_content=content.at(end),
            blocks=(blocks,),
        )
        self._loads[request].state = _State.WAITING
        self._receives.append(receive)

    def refuse(self, request: str, start: int, table: Sequence[int]) -> None:
        """vLLM waits for a load that can't be tried: the workers report it as failed with the next step.

        Only blocks from ``start`` on are named: those before it hold prefix hits that others may share.
        """
        self._loads[request] = _Load(None, _State.WAITING)
        self._refused.append(Refused(request, (tuple(table[start // self._block_size :]),)))

    def reported(self, requests: Iterable[str]) -> None:
        """All workers have reported these."""
        for request in requests:
            load = self._loads.get(request)
            if load is None:
                continue
            if load.state is _State.ABORTED:
                del self._loads[request]
            else:
                load.state = _State.SETTLED

    def finished(self, request: str) -> None:
        """vLLM has ended the request. If a load is under way it must still be reported, so it is only withdrawn."""
        load = self._loads.get(request)
        if load is None:
            return
        if load.state is _State.WAITING:
            load.state = _State.ABORTED
            if load.leg is not None:
                self._withdrawn.append(request)
        elif load.state is not _State.ABORTED:
            del self._loads[request]

    def take(self) -> tuple[tuple[Receive, ...], tuple[str, ...], tuple[Refused, ...]]:
        """Orders that the workers have not heard of."""
        taken = tuple(self._receives), tuple(self._withdrawn), tuple(self._refused)
        self._receives, self._withdrawn, self._refused = [], [], []
        return taken
