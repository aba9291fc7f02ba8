"""What the scheduler side of an engine tells its workers, step by step. Picklable, small, immutable."""

from __future__ import annotations

from dataclasses import dataclass, field

from neuron_pushkv.content import Content

Blocks = tuple[tuple[int, ...], ...]
"""Block ids per KV cache group, in token order."""


@dataclass(frozen=True)
class Receive:
    """Have tokens ``[start_token, end_token)`` of a prompt pushed into ``blocks``, which begin with start's block."""

    request: str
    transfer: str
    host: str
    port: int
    start_token: int
    end_token: int
    start_content: bytes
    end_content: bytes
    blocks: Blocks


@dataclass(frozen=True)
class Offer:
    """A request whose KV, once computed, may be pushed to whoever registers for it."""

    request: str
    transfer: str
    content: Content
    deliveries: int
    """How many receivers there will be; the KV is let go at once when that many are done."""


@dataclass(frozen=True)
class Ready:
    """Once this step is ready, ``blocks`` hold the first ``tokens`` tokens of an offered prompt."""

    request: str
    tokens: int
    blocks: Blocks


@dataclass(frozen=True)
class Finish:
    """vLLM has finished an offered request. ``kept``: its blocks carry a reference until Freed is reported."""

    request: str
    kept: bool


@dataclass(frozen=True)
class StepOrders:
    """All orders of one engine step, in the order in which they are carried out."""

    preempted: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    """Receiving requests that vLLM has aborted: stop, then report them finished."""
    finished: tuple[Finish, ...] = ()
    offers: tuple[Offer, ...] = ()
    receives: tuple[Receive, ...] = ()
    ready: tuple[Ready, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    """Events counted on the scheduler side since the last step, to be reported with the worker's own."""

    def __bool__(self) -> bool:
        return bool(
            self.preempted
            or self.withdrawn
            or self.finished
            or self.offers
            or self.receives
            or self.ready
            or self.counters
        )
