"""``pushkv doctor --serve``: the other end of a trial transfer, at the port where the engine's directory will be."""

from __future__ import annotations

import socket
from collections.abc import Callable

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.doctor import rates, words
from neuron_pushkv.doctor.accelerators import Device
from neuron_pushkv.doctor.line import Line, answer, ours, refused, status
from neuron_pushkv.doctor.machine import Machine
from neuron_pushkv.doctor.network import cards
from neuron_pushkv.doctor.side import WAIT_SECONDS, Side
from neuron_pushkv.errors import ConfigError, HandshakeRefused, PushKVError, WireError
from neuron_pushkv.peers.handler import DOCTOR, LOOKUP, ROUTER
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.wire import Status, encode
from neuron_pushkv.wire import decode as decode_message


class Server:
    """One peer after the other. ``listening`` is the address; port 0 takes a free one. Raises :class:`ConfigError`."""

    def __init__(
        self, settings: ConnectorSettings, machine: Machine, transport: Transport, device: Device, port: int
    ) -> None:
        self._settings = settings
        self._machine = machine
        self._transport = transport
        self._us = ours(settings.key())
        try:
            family = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((settings.host, port), family=family)
        except OSError as failure:
            raise ConfigError(
                f"the doctor can't listen on {settings.host}:{port} ({failure.strerror}); end what uses it, or set "
                "another port"
            ) from failure
        self.listening: tuple[str, int] = settings.host, self._listener.getsockname()[1]
        self._side = Side(transport, device)

    def run(self, told: Callable[[str], None]) -> None:
        """Until an exception ends it; ``told`` gets a line for each peer that came."""
        while True:
            connection, address = self._listener.accept()
            with Line(connection) as line:
                try:
                    told(f"{address[0]}: {self._serve(line)}")
                except (HandshakeRefused, WireError) as refusal:
                    told(f"{address[0]}: refused: {refusal}")
                except (PushKVError, OSError) as failure:
                    told(f"{address[0]}: {failure}")
                except EOFError:  # Somebody who only looked whether there is a listener, or has all it wanted.
                    pass
                finally:
                    self._side.part()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        self._side.close()

    def _serve(self, line: Line) -> str:
        def check(role: str) -> None:
            if role not in (ROUTER, LOOKUP, DOCTOR):
                raise refused(role)

        hello = answer(line, self._us, check, self._settings.connect_seconds)
        if hello.role == DOCTOR:
            self._try_out(line)
            return f"{hello.engine_id} has tried out transfers"
        if hello.role == ROUTER and isinstance(decode_message(line.read(self._settings.connect_seconds)), Status):
            line.write(encode(status(self._us, self._transport)))
        return f"{hello.engine_id} has asked who is here"

    def _try_out(self, line: Line) -> None:
        family = self._machine.family()
        about = self._side.about(family, rates.line_rate(family, len(cards(self._transport))))
        line.write(encode(about))
        while True:
            try:
                body = line.read(2 * WAIT_SECONDS)
            except EOFError:
                return
            try:
                reply = self._reply(words.decode(body), line)
            except PushKVError as failure:
                reply = words.Trouble(str(failure))
            if reply is not None:
                line.write(encode(reply))

    def _reply(self, word: words.Word, line: Line) -> words.Word | None:
        side = self._side
        match word:
            case words.About():
                side.meet(word)
                return words.Ready()
            case words.Push(slot, epoch, seed, size, piece):
                return words.Pushed(*side.push(slot, epoch, seed, size, piece))
            case words.Expect(slot, epoch, size):
                side.expect(slot, epoch, size)
                return words.Ready()
            case words.Compare(slot, epoch, seed, size, writes):
                return words.Compared(*side.compare(slot, epoch, seed, size, writes))
            case words.Echo(slot, epoch, rounds):
                side.listen(slot, epoch)
                line.write(encode(words.Ready()))
                side.echo(slot, epoch, rounds)
                return None
            case _:
                return words.Trouble(f"{type(word).__name__} is no question")
