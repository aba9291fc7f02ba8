"""A trial transfer with another doctor: a pattern written both ways and compared, then how fast and how soon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from neuron_pushkv.doctor import rates, words
from neuron_pushkv.doctor.agreement import providers
from neuron_pushkv.doctor.findings import Finding, Id, Level, error, failed, fine, warning
from neuron_pushkv.doctor.line import Line
from neuron_pushkv.doctor.machine import Machine
from neuron_pushkv.doctor.network import cards
from neuron_pushkv.doctor.side import WAIT_SECONDS, WORD_BYTES, Side
from neuron_pushkv.errors import PushKVError, TransportError
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.wire import encode

PIECE = 1 << 20
"""Bytes of a write: what is published of EFA is near the line rate from there on."""
ROUNDS = 3
"""Transfers each way. The first one pays for connections and mappings, so the best counts."""
ECHOES = 100
_OUT, _IN, _ECHO = 1, 2, 3
_Reply = TypeVar("_Reply", bound=words.Word)


@dataclass(frozen=True)
class Rate:
    """One way, at its best: bytes per second, and how many words were wrong in all rounds."""

    bytes_per_second: float
    wrong: int
    first: int


class Trial:
    """``line`` leads to a doctor that serves, which has said Welcome."""

    def __init__(self, line: Line, transport: Transport, side: Side, machine: Machine) -> None:
        self._line = line
        self._transport = transport
        self._side = side
        self._machine = machine
        self._epoch = 0

    def findings(self) -> Iterator[Finding]:
        """All of it. A transfer that fails ends it."""
        try:
            yield from self._findings()
        except (PushKVError, OSError, EOFError) as failure:
            fix = "look at the other doctor's output, and let both machines' security groups pass all traffic of each"
            yield failed(Id.TRANSFER_BYTES, failure, fix)

    def _findings(self) -> Iterator[Finding]:
        theirs = self._read(words.About)
        family = self._machine.family()
        ours = self._side.about(family, rates.line_rate(family, len(cards(self._transport))))
        agreed = providers("this side", ours.provider, "the other", theirs.provider)
        if agreed.level is not Level.OK:
            yield agreed
            return
        self._side.meet(theirs)
        self._ask(ours, words.Ready)
        size = min(ours.size, theirs.size)
        out = self._several(_OUT, size)
        back = self._several(_IN, size)
        yield same(out, back, size)
        if out.wrong or back.wrong:
            return
        known = [rate for rate in (ours.line_rate, theirs.line_rate) if rate]
        yield bandwidth(out, back, min(known) if len(known) == 2 else None, f"{family} to {theirs.family}")
        yield self._latency()

    def _several(self, slot: int, size: int) -> Rate:
        rates_seen, wrong, first = [], 0, 0
        for number in range(ROUNDS):
            self._epoch += 1
            seed = (slot << 16) + number
            bad, place, seconds = (self._write if slot == _OUT else self._receive)(self._epoch, seed, size)
            rates_seen.append(size / max(seconds, 1e-9))
            if bad and not wrong:
                first = place
            wrong += bad
        return Rate(max(rates_seen), wrong, first)

    def _write(self, epoch: int, seed: int, size: int) -> tuple[int, int, float]:
        self._ask(words.Expect(_OUT, epoch, size), words.Ready)
        writes, seconds = self._side.push(_OUT, epoch, seed, size, PIECE)
        found = self._ask(words.Compare(_OUT, epoch, seed, size, writes), words.Compared)
        return found.wrong, found.first, seconds

    def _receive(self, epoch: int, seed: int, size: int) -> tuple[int, int, float]:
        self._side.expect(_IN, epoch, size)
        pushed = self._ask(words.Push(_IN, epoch, seed, size, PIECE), words.Pushed)
        return *self._side.compare(_IN, epoch, seed, size, pushed.writes), pushed.seconds

    def _latency(self) -> Finding:
        self._epoch += 1
        self._side.listen(_ECHO, self._epoch)
        self._ask(words.Echo(_ECHO, self._epoch, ECHOES), words.Ready)
        micros = 1e6 * self._side.call(_ECHO, self._epoch, ECHOES)
        # No figure is published for a write with an immediate over EFA, so there is nothing to hold it against.
        what = f"a write of {WORD_BYTES} bytes is seen after {micros:.0f} us (median of {ECHOES}, Python's share in it)"
        return fine(Id.TRANSFER_LATENCY, what, microseconds=round(micros, 1), rounds=ECHOES)

    def _ask(self, word: words.Word, kind: type[_Reply]) -> _Reply:
        self._line.write(encode(word))
        return self._read(kind)

    def _read(self, kind: type[_Reply]) -> _Reply:
        word = words.decode(self._line.read(2 * WAIT_SECONDS))
        if isinstance(word, words.Trouble):
            raise TransportError(f"the other doctor says: {word.detail}")
        if not isinstance(word, kind):
            raise TransportError(f"the other doctor said {type(word).__name__} where {kind.__name__} was due")
        return word


def same(out: Rate, back: Rate, size: int) -> Finding:
    """Whether what was written is what arrived."""
    for rate, way in ((out, "to the other side"), (back, "from the other side")):
        if rate.wrong:
            what = f"bytes written {way} are not those that arrived: {rate.wrong} words of 8 differ"
            fix = "don't use this for KV; see FI_EFA_ENABLE_SHM_TRANSFER, and whether both sides' drivers are the same"
            return error(Id.TRANSFER_BYTES, what, fix, wrong=rate.wrong, first_byte=rate.first, size=size)
    what = f"{size >> 20} MiB written {ROUNDS} times each way, and all bytes are the same"
    return fine(Id.TRANSFER_BYTES, what, size=size, rounds=ROUNDS)


def bandwidth(out: Rate, back: Rate, line_rate: int | None, way: str) -> Finding:
    """How fast, against what the instances' cards should give."""
    slower = min(out.bytes_per_second, back.bytes_per_second)
    shown = f"{out.bytes_per_second / 1e9:.3g} GB/s out, {back.bytes_per_second / 1e9:.3g} GB/s in"
    about = {
        "out_bytes_per_second": round(out.bytes_per_second),
        "in_bytes_per_second": round(back.bytes_per_second),
        "line_rate_bytes_per_second": line_rate,
    }
    if line_rate is None:
        return fine(Id.TRANSFER_BANDWIDTH, f"{shown}; nothing to hold it against on this machine", **about)
    if slower < rates.FLOOR * line_rate:
        what = f"{shown}, of {line_rate / 1e9:.3g} GB/s that the cards have ({way})"
        fix = "see whether other traffic is on them, which cards are used (fabric.rails), and EFA's driver"
        return warning(Id.TRANSFER_BANDWIDTH, what, fix, **about)
    return fine(Id.TRANSFER_BANDWIDTH, f"{shown}, of {line_rate / 1e9:.3g} GB/s ({way})", **about)
