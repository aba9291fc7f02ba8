"""Transfers between two doctors, here of one process over the loopback transport."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.doctor import trial, words
from neuron_pushkv.doctor.accelerators import Device
from neuron_pushkv.doctor.findings import Finding, Id, Level
from neuron_pushkv.doctor.line import call, ours
from neuron_pushkv.doctor.peer import Place, visit
from neuron_pushkv.doctor.serving import Server
from neuron_pushkv.doctor.side import Side, pattern
from neuron_pushkv.doctor.trial import Rate, Trial
from neuron_pushkv.errors import HandshakeRefused, WireError
from neuron_pushkv.peers.handler import DOCTOR, WORKER
from neuron_pushkv.transport.base import Batch, Peer, ReadyWord, Ticket, Transport
from neuron_pushkv.transport.loopback import LoopbackNetwork, LoopbackTransport
from neuron_pushkv.wire import encode

from .machines import instance, machine
from .test_node import said

KEY = "a key of these tests"
SETTINGS = ConnectorSettings(provider="tcp", fleet_key=KEY, connect_seconds=5.0)
SIZE = 4 << 20


def device() -> Device:
    host = HostAccelerator()
    return Device(host, host.allocate(SIZE), [])


@contextmanager
def serving(folder: Path, transport: Transport) -> Iterator[tuple[Place, list[str]]]:
    memory, told = device(), []
    server = Server(SETTINGS, machine(folder), transport, memory, 0)

    def run() -> None:
        with suppress(OSError):  # Its listener is shut by the test.
            server.run(told.append)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Place(*server.listening), told
    finally:
        server._listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()
        server.close()
        transport.close()
        memory.close()


@contextmanager
def side_of(transport: Transport) -> Iterator[Side]:
    memory = device()
    side = Side(transport, memory)
    yield side
    side.close()
    transport.close()
    memory.close()


def tried(folder: Path, place: Place, transport: Transport) -> dict[Id, Finding]:
    with side_of(transport) as side:
        line, _ = call(place.host, place.port, DOCTOR, ours(KEY.encode()), 5.0)
        with line:
            return {finding.id: finding for finding in Trial(line, transport, side, machine(folder)).findings()}


class Wrong(LoopbackTransport):
    """Leaves out the last word of each batch, and says that all is well."""

    def write(self, peer: Peer, batch: Batch, immediate: int, ready: ReadyWord | None = None) -> Ticket:
        for product in batch:
            if len(product.runs) > 1:
                product.runs[-1, 2] -= 8
        return super().write(peer, batch, immediate, ready)


class Refusing(LoopbackTransport):
    """Has no memory for peers to write to."""

    def attach(self, peer: Peer, description: bytes) -> int:
        return super().attach(peer, b"nonsense")


class TestInOneProcess:
    def test_bytes_are_compared_both_ways_and_rates_measured(self, tmp_path: Path) -> None:
        network = LoopbackNetwork()
        with serving(tmp_path / "a", LoopbackTransport(network)) as (place, told):
            found = tried(tmp_path / "b", place, LoopbackTransport(network))
            again = tried(tmp_path / "b", place, LoopbackTransport(network))
            assert all("has tried out transfers" in line for line in told)
        assert list(found) == list(again) == [Id.TRANSFER_BYTES, Id.TRANSFER_BANDWIDTH, Id.TRANSFER_LATENCY]
        assert {finding.level for finding in (*found.values(), *again.values())} == {Level.OK}
        assert found[Id.TRANSFER_BYTES].evidence == {"size": SIZE, "rounds": trial.ROUNDS}
        assert found[Id.TRANSFER_BANDWIDTH].evidence["line_rate_bytes_per_second"] is None
        assert found[Id.TRANSFER_LATENCY].evidence["microseconds"] > 0

    @pytest.mark.parametrize(
        ("here", "there", "way"), [(Wrong, LoopbackTransport, "to"), (LoopbackTransport, Wrong, "from")]
    )
    def test_bytes_that_are_lost_without_a_word_are_found(
        self, tmp_path: Path, here: type[LoopbackTransport], there: type[LoopbackTransport], way: str
    ) -> None:
        network = LoopbackNetwork()
        with serving(tmp_path / "a", there(network)) as (place, _):
            found = tried(tmp_path / "b", place, here(network))
        assert list(found) == [Id.TRANSFER_BYTES]
        said(found[Id.TRANSFER_BYTES], Level.ERROR, f"bytes written {way} the other side are not those that arrived")
        assert found[Id.TRANSFER_BYTES].evidence["wrong"] == trial.ROUNDS
        assert found[Id.TRANSFER_BYTES].evidence["first_byte"] == SIZE - 8

    def test_another_provider_ends_it_before_anything_is_written(self, tmp_path: Path) -> None:
        network = LoopbackNetwork()
        unlike = LoopbackTransport(network)
        unlike.provider = "shm"
        with serving(tmp_path / "a", unlike) as (place, _):
            found = tried(tmp_path / "b", place, LoopbackTransport(network))
        assert list(found) == [Id.PEER_PROVIDER]
        said(found[Id.PEER_PROVIDER], Level.ERROR, "loopback", "shm")

    def test_what_goes_wrong_over_there_is_told_here(self, tmp_path: Path) -> None:
        network = LoopbackNetwork()
        with serving(tmp_path / "a", Refusing(network)) as (place, _):
            found = tried(tmp_path / "b", place, LoopbackTransport(network))
        said(found[Id.TRANSFER_BYTES], Level.ERROR, "the other doctor says: ")

    def test_a_doctor_is_visited_like_an_engine_but_has_no_ranks(self, tmp_path: Path) -> None:
        transport = LoopbackTransport(LoopbackNetwork())
        with serving(tmp_path, transport) as (place, _):
            seen = visit(place, SETTINGS, transport, None)
        assert seen.status is not None
        assert seen.status.ranks == 0
        assert [finding.id for finding in seen.findings] == [
            Id.PEER_REACHABLE,
            Id.PEER_HANDSHAKE,
            Id.PEER_VERSIONS,
            Id.PEER_PROVIDER,
        ]
        assert {finding.level for finding in seen.findings} == {Level.OK}

    def test_strangers_are_refused_and_disturb_nobody(self, tmp_path: Path) -> None:
        network = LoopbackNetwork()
        with serving(tmp_path / "a", LoopbackTransport(network)) as (place, told):
            with pytest.raises(HandshakeRefused, match="no 'worker' talks to"):
                call(place.host, place.port, WORKER, ours(KEY.encode()), 5.0)
            with pytest.raises(HandshakeRefused, match="fleet key"):
                call(place.host, place.port, DOCTOR, ours(b"another"), 5.0)
            line, _ = call(place.host, place.port, DOCTOR, ours(KEY.encode()), 5.0)
            with line:
                line.read(5.0)
                line.write(encode(words.Push(1, 1, 1, SIZE * 2, 4096)))
                assert isinstance(words.decode(line.read(5.0)), words.Trouble)
            assert Id.TRANSFER_LATENCY in tried(tmp_path / "b", place, LoopbackTransport(network))
            assert sum("refused" in line for line in told) >= 1

    @pytest.mark.parametrize(
        "word",
        [
            words.Push(1, 1, 1, 0, 4096),
            words.Push(1, 1, 1, 4096, 4096),
            words.Expect(1, 1, 0),
            words.Compare(1, 1, 1, 0, 0),
            words.Echo(1, 1, 1),
        ],
        ids=lambda word: f"{type(word).__name__}-{getattr(word, 'size', '')}",
    )
    def test_whoever_asks_before_it_was_met_is_told_so_and_disturbs_nobody(
        self, tmp_path: Path, word: words.Word
    ) -> None:
        network = LoopbackNetwork()
        with serving(tmp_path / "a", LoopbackTransport(network)) as (place, _):
            line, _ = call(place.host, place.port, DOCTOR, ours(KEY.encode()), 5.0)
            with line:
                line.read(5.0)
                line.write(encode(word))
                answer = words.decode(line.read(5.0))
                assert isinstance(answer, words.Trouble)
                assert "has not been met" in answer.detail
            assert Id.TRANSFER_LATENCY in tried(tmp_path / "b", place, LoopbackTransport(network))

    def test_nothing_can_not_be_tried_out(self, tmp_path: Path) -> None:
        network = LoopbackNetwork()
        with serving(tmp_path, LoopbackTransport(network)) as (place, _), side_of(LoopbackTransport(network)) as side:
            line, _ = call(place.host, place.port, DOCTOR, ours(KEY.encode()), 5.0)
            with line:
                line.read(5.0)
                line.write(encode(side.about(None, None)))
                assert words.decode(line.read(5.0)) == words.Ready()
                line.write(encode(words.Push(1, 1, 1, 0, 4096)))
                answer = words.decode(line.read(5.0))
                assert isinstance(answer, words.Trouble)
                assert "0 bytes can't be tried out" in answer.detail

    @pytest.mark.parametrize("body", [b"", b"\xc1", b"nonsense"])
    def test_nonsense_is_no_word(self, body: bytes) -> None:
        with pytest.raises(WireError, match="not a word of a doctor"):
            words.decode(body)


class TestBandwidth:
    @pytest.mark.parametrize(
        ("out", "back", "line_rate", "level"),
        [
            (20e9, 20e9, 25 * 10**9, Level.OK),
            (20e9, 12e9, 25 * 10**9, Level.WARNING),
            (1e9, 20e9, 25 * 10**9, Level.WARNING),
            (1e9, 1e9, None, Level.OK),
        ],
    )
    def test_half_of_what_the_cards_have_is_the_floor(
        self, out: float, back: float, line_rate: int | None, level: Level
    ) -> None:
        said(trial.bandwidth(Rate(out, 0, 0), Rate(back, 0, 0), line_rate, "trn2 to trn2"), level)

    def test_the_slower_sides_cards_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        network = LoopbackNetwork()
        monkeypatch.setattr(trial, "cards", lambda transport: ["a", "b"])
        monkeypatch.setattr("neuron_pushkv.doctor.serving.cards", lambda transport: ["a"])
        instance(tmp_path / "a", "trn2.48xlarge")
        instance(tmp_path / "b", "p5en.48xlarge")
        with serving(tmp_path / "a", LoopbackTransport(network)) as (place, _):
            found = tried(tmp_path / "b", place, LoopbackTransport(network))
        assert found[Id.TRANSFER_BANDWIDTH].evidence["line_rate_bytes_per_second"] == 25 * 10**9


def test_every_word_of_a_pattern_tells_its_place_and_which_pattern_it_is() -> None:
    words_of = pattern(1, 1 << 16)
    assert len(np.unique(words_of)) == len(words_of)
    assert not np.any(words_of == pattern(2, 1 << 16))
    assert not np.any(words_of == 0)
