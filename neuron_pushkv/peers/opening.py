"""Connections that we open: tried again until their deadline, one at a time per pair, failures remembered."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from neuron_pushkv.errors import Reason
from neuron_pushkv.peers.core import Core
from neuron_pushkv.peers.handler import RANK, WORKER
from neuron_pushkv.peers.handshake import Opener, PeerRefused
from neuron_pushkv.peers.link import Link
from neuron_pushkv.peers.pairs import Pair, pair_of
from neuron_pushkv.wire import MAX_HANDSHAKE_BYTES, Refused, encode

Address: TypeAlias = tuple[str, int]

FIRST_DELAY_SECONDS = 0.02
LONGEST_DELAY_SECONDS = 0.25
MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class Failure:
    """Why an attempt, or all of them, came to nothing."""

    reason: Reason
    detail: str
    try_again: bool = False


@dataclass(eq=False)
class Opening:
    """One ``open()``, or several for the same worker, until it is answered."""

    role: str
    address: Address
    waits: int = 1
    """How many calls of ``open()`` it answers."""
    pair: Pair | None = None
    """Who is at that address, once that side has proved itself."""
    incarnation: int = 0
    proving: bool = False
    """We have sent our proof, and the other side's decision is on its way."""
    done: bool = False
    task: asyncio.Task[None] | None = None


class Openings:
    """All openings of one node."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._all: dict[Opening, None] = {}
        self._failures: dict[tuple[str, Address], tuple[float, Failure]] = {}

    def open(self, role: str, host: str, port: int) -> None:
        """Begin, join one under way, or answer at once from what is known."""
        address = (host, port)
        opening = Opening(role, address)
        if self._core.closing:
            self._fail(opening, Failure(Reason.SHUTDOWN, "this node is closing"))
            return
        failure = self._remembered(role, address)
        if failure is not None:
            self._fail(opening, failure)
            return
        if role == WORKER:
            for other in self._all:
                if (other.role, other.address) == (role, address):
                    other.waits += 1
                    return
        self._all[opening] = None
        opening.task = self._core.loop.create_task(self._run(opening))

    def proving(self, pair: Pair, incarnation: int) -> bool:
        """Whether one of ours to that process waits for its decision only."""
        return any(each.proving and (each.pair, each.incarnation) == (pair, incarnation) for each in self._all)

    def claim(self, pair: Pair) -> list[Opening]:
        """That pair's connection was opened by the other side: end ours, and leave their answers to the caller."""
        claimed = [opening for opening in self._all if opening.role == WORKER and opening.pair == pair]
        for opening in claimed:
            self._finish(opening)
            if opening.task is not None:
                opening.task.cancel()
        return claimed

    def answer(self, claimed: Sequence[Opening], answered: int) -> None:
        """The pair's connection is up, which was the answer for the first ``answered`` calls: tell the others."""
        for opening in claimed:
            for _ in range(opening.waits - answered):
                self._tell(opening, Failure(Reason.DUPLICATE, "the pair's one connection is up already"))
            answered = 0

    def close(self) -> None:
        """End them all. Their tasks may still have to run out."""
        for opening in list(self._all):
            self._fail(opening, Failure(Reason.SHUTDOWN, "this node is closing"))
            if opening.task is not None:
                opening.task.cancel()

    def succeed(self, opening: Opening) -> None:
        """Its own connection is about to be up."""
        self._finish(opening)

    async def _run(self, opening: Opening) -> None:
        core, (host, port) = self._core, opening.address
        seconds = core.timing.connect
        failure = Failure(Reason.UNREACHABLE, f"{host}:{port} did not answer within {seconds:g} s")
        delay = FIRST_DELAY_SECONDS
        try:
            async with asyncio.timeout(seconds):
                while True:
                    failed = await self._try(opening)
                    if failed is None or opening.done:
                        return
                    failure = failed
                    if not failure.try_again and opening.role != RANK:
                        break
                    if self._served(opening):
                        self._finish(opening)
                        self.answer([opening], answered=0)
                        return
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        except TimeoutError:
            if failure.reason is Reason.DUPLICATE:
                failure = Failure(Reason.UNREACHABLE, f"{failure.detail}, but it has not come up within {seconds:g} s")
        except Exception as error:  # noqa: BLE001 - logged and counted, and the caller gets its answer
            failure = Failure(*core.explain(error, f"{host}:{port}"))
        if not opening.done:
            self._remember(opening, failure)
            self._fail(opening, failure)

    async def _try(self, opening: Opening) -> Failure | None:
        """One connection and handshake; None when the connection is up."""
        core, (host, port) = self._core, opening.address
        attempt = Attempt(core, self, opening)
        try:
            await core.loop.create_connection(attempt.link, host, port)
            return await attempt.outcome
        except socket.gaierror as error:
            return Failure(Reason.UNREACHABLE, f"{host} isn't a name that can be resolved: {error.strerror}")
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            return Failure(Reason.UNREACHABLE, f"{host}:{port} can't be reached: {why}", try_again=True)
        except (ValueError, OverflowError) as error:
            return Failure(Reason.UNREACHABLE, f"{host!r}, port {port}, isn't an address: {error}")
        finally:
            attempt.abandon()

    def _served(self, opening: Opening) -> bool:
        pair = opening.pair
        return pair is not None and self._core.pairs.current(pair, opening.incarnation) is not None

    def _fail(self, opening: Opening, failure: Failure) -> None:
        self._finish(opening)
        for _ in range(opening.waits):
            self._tell(opening, failure)

    def _finish(self, opening: Opening) -> None:
        opening.done = True
        self._all.pop(opening, None)

    def _tell(self, opening: Opening, failure: Failure) -> None:
        core, (host, port) = self._core, opening.address
        core.call(core.handler.unreachable, opening.role, host, port, failure.reason, failure.detail)

    def _remember(self, opening: Opening, failure: Failure) -> None:
        # A rank can do nothing without its directory but try again, and is started before it.
        if opening.role == RANK:
            return
        key = (opening.role, opening.address)
        self._failures.pop(key, None)
        self._failures[key] = (self._core.loop.time() + self._core.timing.unreachable, failure)
        if len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def _remembered(self, role: str, address: Address) -> Failure | None:
        until, failure = self._failures.get((role, address), (0.0, None))
        if failure is not None and self._core.loop.time() >= until:
            del self._failures[role, address]
            return None
        return failure


class Attempt:
    """The stage of a link that we open, until it is up. ``outcome`` is None then."""

    def __init__(self, core: Core, openings: Openings, opening: Opening) -> None:
        self.outcome: asyncio.Future[Failure | None] = core.loop.create_future()
        self._core = core
        self._openings = openings
        self._opening = opening
        self._opener = Opener(core.ours, opening.role)
        self._link: Link | None = None
        self._challenged = False
        self._token: int | None = None

    def link(self) -> Link:
        """The protocol of the connection."""
        self._link = self._core.link(self, MAX_HANDSHAKE_BYTES)
        return self._link

    def made(self, link: Link) -> None:
        """See :class:`Stage`."""
        link.write(self._opener.hello())

    def frame(self, body: bytes) -> None:
        """See :class:`Stage`."""
        assert self._link is not None
        if self._opening.done:
            return  # It has been answered in another way, and this attempt is about to be abandoned.
        if self._challenged:
            self._welcome(self._link, body)
        else:
            self._challenge(self._link, body)

    def _challenge(self, link: Link, body: bytes) -> None:
        core, opening = self._core, self._opening
        challenge = self._opener.challenge(body)
        self._challenged = True
        if opening.role == WORKER:
            opening.pair, opening.incarnation = (challenge.engine_id, challenge.rank), challenge.incarnation
            core.pairs.check(opening.pair, opening.incarnation)
            if core.pairs.current(opening.pair, opening.incarnation) is not None:
                self._settle(Failure(Reason.DUPLICATE, "the pair's one connection is up already", try_again=True))
                link.end(Reason.DUPLICATE, "not needed")
                return
        identity, self._token = core.handler.identity(opening.role, self._opener.hello_sent)
        opening.proving = True
        link.write(self._opener.proof(identity))

    def _welcome(self, link: Link, body: bytes) -> None:
        core, opening = self._core, self._opening
        theirs = self._opener.welcome(body)
        core.check_room()
        core.handler.check(opening.role, theirs)
        if opening.role == WORKER:
            core.pairs.make_room(pair_of(theirs), theirs.incarnation)
        token, self._token = self._token, None
        self._settle(None)
        self._openings.succeed(opening)
        core.establish(link, opening.role, theirs, token, opening.address)
        self._openings.answer([opening], answered=1)

    def failed(self, error: Exception) -> None:
        """See :class:`Stage`."""
        assert self._link is not None
        reason, detail = self._core.explain(error, self._link.address)
        told = isinstance(error, PeerRefused)
        self._settle(Failure(reason, detail, try_again=told and reason is Reason.DUPLICATE))
        self._link.end(reason, detail, None if told else encode(Refused(reason, detail)))

    def ended(self, reason: Reason, detail: str) -> None:
        """See :class:`Stage`."""
        self._settle(Failure(Reason.UNREACHABLE, f"{detail} during the handshake", try_again=True))

    def abandon(self) -> None:
        """Nobody waits for this any more: end what isn't up."""
        if self._link is not None and self._link.stage is self:
            self._link.end(Reason.CANCELLED, "nobody waits for it")

    def _settle(self, outcome: Failure | None) -> None:
        self._opening.proving = False
        if not self.outcome.done():  # The deadline has cancelled it otherwise.
            self.outcome.set_result(outcome)
        if self._token is not None:
            self._core.call(self._core.handler.discard, self._token)
            self._token = None
