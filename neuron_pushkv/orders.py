"""What the scheduler side of an engine tells its workers, step by step. Picklable, small, immutable."""

from __future__ import annotations

from dataclasses import dataclass, field

from neuron_pushkv.content import Content

Blocks = tuple[tuple[int, ...], ...]
"""Block ids per KV cache group, in token order."""


@dataclass(frozen=True)
class Remote:
    """Another engine: its directory's address, and its sizes as its parameters say them."""

    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True)
class Intent:
    """A request has arrived that will want its prompt's KV, once vLLM has blocks for it. A Receive follows, or the
    request is withdrawn; it is not reported to vLLM before a Receive."""

    request: str
    transfer: str
    remote: Remote
    end_token: int
    end_content: bytes


@dataclass(frozen=True)
class Receive:
    """Have tokens ``[start_token, end_token)`` of a prompt pushed into ``blocks``.

    A group's blocks begin with the one of ``start_token``; a sliding window group's with the one of its layout's
    ``first_token(start_token, end_token)``.
    """

    request: str
    transfer: str
    remote: Remote
    start_token: int
    end_token: int
    start_content: bytes
    end_content: bytes
    blocks: Blocks
    traceparent: str = ""
    """W3C trace context of the request, if it has one."""


@dataclass(frozen=True)
class Offer:
    """A request whose KV, once computed, may be pushed to whoever registers for it."""

    request: str
    transfer: str
    content: Content
    deliveries: int
    """How many receivers there will be; the KV is let go at once when that many are done."""
    traceparent: str = ""


@dataclass(frozen=True)
class Ready:
    """Once this step is ready, ``blocks`` hold the first ``tokens`` tokens of an offered prompt.

    A group's blocks begin with the one of token 0. A sliding window group's are named only when the prompt is complete
    (empty before), with -1 for those that vLLM has let go of.
    """

    request: str
    tokens: int
    blocks: Blocks


@dataclass(frozen=True)
class Finish:
    """vLLM has finished an offered request. ``kept``: its blocks carry a reference until Freed is reported."""

    request: str
    kept: bool


@dataclass(frozen=True)
class Release:
    """Nobody of this engine will ask that one for that transfer's KV (again)."""

    transfer: str
    remote: Remote


@dataclass(frozen=True)
class StepOrders:
    """All orders of one engine step, in the order in which they are carried out."""

    preempted: tuple[str, ...] = ()
    finished: tuple[Finish, ...] = ()
    evicted: tuple[str, ...] = ()
    """Kept requests whose blocks are wanted back, because what is kept is capped: let go as soon as nothing reads."""
    offers: tuple[Offer, ...] = ()
    intents: tuple[Intent, ...] = ()
    receives: tuple[Receive, ...] = ()
    releases: tuple[Release, ...] = ()
    withdrawn: tuple[str, ...] = ()
    """Receiving requests that vLLM has aborted: stop, then report them finished; of an Intent alone, nothing."""
    cached: tuple[Ready, ...] = ()
    """Prefix hits that earlier steps have filled: they need not wait for this one."""
    ready: tuple[Ready, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    """Events counted on the scheduler side since the last step, to be reported with the worker's own."""

    def __bool__(self) -> bool:
        return any(
            (
                self.preempted,
                self.withdrawn,
                self.finished,
                self.evicted,
                self.offers,
                self.releases,
                self.intents,
                self.receives,
                self.cached,
                self.ready,
                self.counters,
            )
        )
