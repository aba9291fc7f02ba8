"""Decode legs on the scheduler side: each load is tried once, and vLLM hears its end once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from neuron_pushkv.connector.compat import NULL_BLOCK
from neuron_pushkv.connector.metadata import Refused
from neuron_pushkv.connector.parameters import DecodeLeg
from neuron_pushkv.content import Content
from neuron_pushkv.layout import Group
from neuron_pushkv.orders import Blocks, Intent, Receive


class _State(Enum):
    WANTED = auto()  # vLLM has no blocks for it yet, and may ask again
    WAITING = auto()  # ordered; vLLM holds the blocks until a worker reports it
    ABORTED = auto()  # the same, but the request is gone
    REFUSED = auto()  # as if ordered, but the workers have only to report that it failed
    SETTLED = auto()  # loaded, failed, or not needed; what is missing is computed


@dataclass(frozen=True)
class Wanted:
    """A prompt that is to be loaded."""

    leg: DecodeLeg
    content: Content
    traceparent: str = ""


@dataclass
class _Load:
    wanted: Wanted | None
    """``None`` for one that is refused and must fail by vLLM's policy."""
    state: _State
    announced: bool = False
    """Whether the workers have heard of it by an Intent, and of nothing else."""


@dataclass(frozen=True)
class Orders:
    """What the workers have not heard of."""

    receives: tuple[Receive, ...]
    withdrawn: tuple[str, ...]
    refused: tuple[Refused, ...]
    intents: tuple[Intent, ...]


class Receiving:
    """All decode legs of this engine."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        # vLLM computes the last token itself in any case. It sees the window before it, of which vLLM would not keep
        # the oldest token, had that last one been loaded.
        self._computed = 1 if any(group.window for group in groups) else 0
        self._loads: dict[str, _Load] = {}
        self._intents: dict[str, Intent] = {}
        self._receives: list[Receive] = []
        self._refused: list[Refused] = []
        self._withdrawn: list[str] = []

    def end(self, prompt: int) -> int:
        """Up to which token a prompt of that many tokens is loaded."""
        return prompt - self._computed

    def admit(self, request: str, wanted: Wanted | None) -> None:
        """Load it, or fail it where ``wanted`` is ``None``."""
        self._loads[request] = _Load(wanted, _State.WANTED)
        if wanted is None:
            return
        end = self.end(wanted.content.length)
        if end > 0:
            self._intents[request] = Intent(
                request=request,
                transfer=wanted.leg.transfer,
                remote=wanted.leg.remote,
                end_token=end,
                end_content=wanted.content.at(end),
            )

    def settle(self, request: str) -> None:
        """Don't load it (any more): its prompt is computed here."""
        load = self._loads.get(request)
        if load is not None and load.state is _State.WANTED:
            load.state, load.wanted = _State.SETTLED, None
            self._take_back(request, load)

    def wants(self, request: str) -> bool:
        """Whether a load is still to be asked for."""
        load = self._loads.get(request)
        return load is not None and load.state is _State.WANTED

    def wanted(self, request: str) -> Wanted | None:
        """What is to be loaded; ``None`` for one that is refused."""
        return self._loads[request].wanted

    def order(self, request: str, wanted: Wanted, external: int, tables: Blocks) -> None:
        """Blocks have been allocated: have the last ``external`` tokens of what was asked for pushed into them."""
        content, leg = wanted.content, wanted.leg
        end = self.end(content.length)
        start = end - external
        if not 0 <= start < end:
            raise ValueError(f"{external} tokens of {request} are to be loaded, of which {end} were asked for")
        receive = Receive(
            request=request,
            transfer=leg.transfer,
            remote=leg.remote,
            start_token=start,
            end_token=end,
            start_content=content.at(start),
            end_content=content.at(end),
            blocks=self._between(request, start, end, tables),
            traceparent=wanted.traceparent,
        )
        load = self._loads[request]
        load.state, load.wanted, load.announced = _State.WAITING, None, False
        self._intents.pop(request, None)
        self._receives.append(receive)

    def refuse(self, request: str, start: int, tables: Blocks) -> None:
        """vLLM waits for a load that can't be tried: the workers report it as failed with the next step.

        Only blocks from ``start`` on are named: those before it hold prefix hits that others may share.
        """
        load = self._loads.setdefault(request, _Load(None, _State.WANTED))
        self._take_back(request, load)
        load.state = _State.REFUSED
        blocks = tuple(table[start // group.block_size :] for group, table in zip(self._groups, tables, strict=True))
        self._refused.append(Refused(request, blocks))

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
        match load.state:
            case _State.WAITING:
                load.state = _State.ABORTED
                self._withdrawn.append(request)
            case _State.REFUSED:
                load.state = _State.ABORTED
            case _State.WANTED | _State.SETTLED:
                self._take_back(request, load)
                del self._loads[request]
            case _State.ABORTED:
                pass

    def take(self) -> Orders:
        """Orders that the workers have not heard of."""
        for request in self._intents:
            self._loads[request].announced = True
        orders = Orders(
            receives=tuple(self._receives),
            withdrawn=tuple(self._withdrawn),
            refused=tuple(self._refused),
            intents=tuple(self._intents.values()),
        )
        self._receives, self._withdrawn, self._refused, self._intents = [], [], [], {}
        return orders

    def _take_back(self, request: str, load: _Load) -> None:
        """Nothing follows its Intent."""
        self._intents.pop(request, None)
        if load.announced:
            load.announced = False
            self._withdrawn.append(request)

    def _between(self, request: str, start: int, end: int, tables: Blocks) -> Blocks:
        """Of each group's table the blocks for the tokens ``[start, end)``, as :class:`Receive` has them."""
        found = []
        for group, table in zip(self._groups, tables, strict=True):
            first = group.first_token(start, end)
            last = -(-end // group.block_size)
            blocks = table[first // group.block_size : last]
            if start % group.block_size or len(blocks) != last - first // group.block_size or NULL_BLOCK in blocks:
                raise ValueError(
                    f"tokens {start} to {end} of {request} don't fit blocks {list(table)} of {group.block_size} tokens"
                )
            found.append(blocks)
        return tuple(found)
