"""Checks of what is at the other end: reached, ours, the same fleet's, and able to take our KV."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from dataclasses import dataclass

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.directory import query_status
from neuron_pushkv.doctor import agreement, line
from neuron_pushkv.doctor.findings import Finding, Id, Level, error, failed, fine
from neuron_pushkv.errors import HandshakeRefused, PushKVError, Reason
from neuron_pushkv.peers.handler import DOCTOR, LOOKUP
from neuron_pushkv.peers.handshake import Ours
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.wire import Bye, EngineStatus, Identity, encode

SNIFF_SECONDS = 1.0
SNIFF_BYTES = 4096
ZMQ_GREETING = re.compile(rb"\xff.{8}[\x7f\x01]", re.DOTALL)
"""The first 10 bytes that a ZeroMQ socket says to whoever connects (ZMTP 2 and 3)."""


@dataclass(frozen=True)
class Place:
    """Where a directory is, or a doctor that serves."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def reachable(place: Place, seconds: float) -> Finding:
    """Whether a connection comes about. Who doesn't answer at all is behind something that drops packets."""
    about = {"place": str(place)}
    began = time.monotonic()
    try:
        socket.create_connection((place.host, place.port), seconds).close()
    except socket.gaierror as failure:
        what = f"the name {place.host} is not known ({failure.strerror})"
        return error(Id.PEER_REACHABLE, what, "correct it, or use an address", why="name", **about)
    except ConnectionRefusedError:
        what = f"{place} refuses connections: the machine is there, and nothing listens at that port"
        fix = "start the engine there, or `pushkv doctor --serve`; or correct the port"
        return error(Id.PEER_REACHABLE, what, fix, why="refused", **about)
    except TimeoutError:
        what = f"{place} does not answer within {seconds:g} s, as when a security group or a firewall drops packets"
        fix = "let the machines' security group pass all traffic of its own members, for EFA in and out"
        return error(Id.PEER_REACHABLE, what, fix, why="timeout", **about)
    except OSError as failure:
        what = f"{place} can't be reached ({failure.strerror})"
        return error(Id.PEER_REACHABLE, what, "correct the address, or the way there", why="network", **about)
    millis = 1e3 * (time.monotonic() - began)
    return fine(Id.PEER_REACHABLE, f"{place} answers within {millis:.1f} ms", milliseconds=round(millis, 1), **about)


def status(place: Place, key: bytes | None, seconds: float) -> EngineStatus | Finding:
    """Ask as a router does. What is no directory is named as well as can be."""
    try:
        return asyncio.run(query_status(place.host, place.port, key, seconds))
    except HandshakeRefused as refusal:
        about = {"place": str(place), "reason": refusal.reason}
        if refusal.reason is Reason.WRONG_KEY:
            return failed(Id.PEER_HANDSHAKE, refusal, "give both sides the same fleet_key_file", **about)
        if refusal.reason is Reason.VERSION_MISMATCH:
            return failed(Id.PEER_VERSIONS, refusal, "run the same release on both sides", **about)
        if refusal.reason in (Reason.BAD_FRAME, Reason.TIMEOUT, Reason.UNREACHABLE):
            other, vllm = sniff(place)
            what = f"at {place} there is {other}"
            fix = (
                "name the port of an engine's PushKVConnector (14600 unless set); an engine with a connector that "
                "pulls, like vLLM's NixlConnector, can't be combined with one that pushes"
            )
            return error(Id.PEER_PROTOCOL, what, fix, found=other, vllm=vllm, detail=str(refusal), **about)
        return failed(Id.PEER_HANDSHAKE, refusal, "look at the other side's log", **about)


def sniff(place: Place) -> tuple[str, str]:
    """What speaks there, by what it answers to a question of HTTP's, and which vLLM that is if it says so."""
    said = b""
    try:
        with socket.create_connection((place.host, place.port), SNIFF_SECONDS) as connection:
            connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            deadline = time.monotonic() + SNIFF_SECONDS
            while len(said) < SNIFF_BYTES and (left := deadline - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(SNIFF_BYTES)
                said += part
                if not part or ZMQ_GREETING.match(said):
                    break
    except OSError:  # What it has said until then is all there is to know.
        pass
    if ZMQ_GREETING.match(said):
        return "a ZeroMQ socket, as vLLM's pull connectors (NixlConnector, MooncakeConnector) have", ""
    if said.startswith(b"HTTP/"):
        vllm = _vllm_version(said)
        return (f"the HTTP port of vLLM {vllm}" if vllm else "an HTTP server"), vllm
    return ("something that speaks another protocol" if said else "something that listens and says nothing"), ""


def _vllm_version(answer: bytes) -> str:
    try:
        told = json.loads(answer.partition(b"\r\n\r\n")[2])
    except ValueError:
        return ""
    version = told.get("version") if isinstance(told, dict) else None
    return version if isinstance(version, str) and len(version) < 64 and version.isprintable() else ""


def ranks(place: Place, us: Ours, seconds: float) -> tuple[list[Identity], Finding]:
    """Ask the directory where its ranks are, as another engine's worker does, and each what its KV cache is like."""
    found: list[Identity] = []
    asked = f"the directory at {place}"
    try:
        for rank, host, port in _ask(place.host, place.port, LOOKUP, us, seconds).ranks:
            asked = f"rank pp {rank.pp} tp {rank.tp} at {host}:{port}"
            found.append(_ask(host, port, DOCTOR, us, seconds))
    except (OSError, EOFError, PushKVError) as failure:
        what = f"{asked} can't be asked: {str(failure) or 'no answer in time'}"
        fix = "let the security group pass all ports of its members, since ranks listen on free ones"
        return found, error(Id.PEER_RANKS, what, fix, answered=len(found))
    return found, fine(Id.PEER_RANKS, f"all {len(found)} ranks answer", answered=len(found))


def _ask(host: str, port: int, role: str, us: Ours, seconds: float) -> Identity:
    connection, identity = line.call(host, port, role, us, seconds)
    with connection:
        connection.write(encode(Bye(Reason.SHUTDOWN)))
    return identity


@dataclass
class Visit:
    """What was found out about one peer; ``status`` is ``None`` if it doesn't talk to us."""

    findings: list[Finding]
    status: EngineStatus | None = None


def visit(place: Place, settings: ConnectorSettings, transport: Transport | None, local: Identity | None) -> Visit:
    """All checks of one peer, in order. ``local``: a rank of an engine that runs here, for comparing KV caches."""
    key, seconds = settings.key(), settings.connect_seconds
    us = line.ours(key)
    seen = Visit([reachable(place, seconds)])
    if seen.findings[0].level is not Level.OK:
        return seen
    began = time.monotonic()
    found = status(place, key, seconds)
    if isinstance(found, Finding):
        seen.findings.append(found)
        return seen
    seen.status = found
    name, millis = f"engine {found.engine_id}", 1e3 * (time.monotonic() - began)
    what = f"{name} holds the same fleet key; it took {millis:.1f} ms to find out"
    seen.findings.append(fine(Id.PEER_HANDSHAKE, what, engine_id=found.engine_id, milliseconds=round(millis, 1)))
    seen.findings.append(agreement.releases("this side", line.status(us, transport), name, found))
    if transport is not None and found.provider:
        seen.findings.append(agreement.providers("this side", transport.provider, name, found.provider))
    if found.ranks:
        identities, asked = ranks(place, us, seconds)
        seen.findings += [agreement.workers(name, found), asked]
        seen.findings += [agreement.caches(local, identity) for identity in identities[:1]]
    return seen
