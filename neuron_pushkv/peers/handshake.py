"""Both sides of the handshake, without a socket: bodies of frames in, whole frames out. See ``wire`` for the steps."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from neuron_pushkv.errors import HandshakeRefused, Reason, WireError
from neuron_pushkv.wire import (
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Challenge,
    Expected,
    Hello,
    Identity,
    Proof,
    Rank,
    Refused,
    Welcome,
    decode,
    encode,
    proof,
    proof_matches,
)

MAX_DETAIL = 500
"""Characters of a stranger's explanation that get into our logs."""
_OPENER = "opener"
_ACCEPTOR = "acceptor"
_WRONG_KEY = "the two sides don't hold the same fleet key; give both the same fleet_key_file or PUSHKV_FLEET_KEY"


class PeerRefused(HandshakeRefused):
    """It was the other side that refused, so it needn't be told."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, "".join(c if c.isprintable() else " " for c in detail[:MAX_DETAIL]))


@dataclass(frozen=True)
class Ours:
    """Who this process is, and the fleet key: empty where there is none, which serves on loopback only."""

    engine_id: str
    incarnation: int
    rank: Rank
    key: bytes


class Opener:
    """The side that connects. Call ``hello``, ``challenge``, ``proof``, ``welcome`` in this order.

    What takes a body raises :class:`WireError` for a wrong message and :class:`HandshakeRefused` for a wrong peer.
    """

    def __init__(self, ours: Ours, role: str) -> None:
        self._ours = ours
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.hello_sent = Hello(
            PROTOCOL_MAJOR, PROTOCOL_MINOR, role, ours.engine_id, ours.incarnation, ours.rank, nonce
        )
        self._hello_frame = encode(self.hello_sent)
        self._challenge: Challenge | None = None

    def hello(self) -> bytes:
        """The frame that begins it."""
        return self._hello_frame

    def challenge(self, body: bytes) -> Challenge:
        """Take the acceptor's answer, which proves that it holds the key."""
        message = _expect(Challenge, body)
        expected = proof(self._ours.key, _ACCEPTOR, self._hello_frame[HEADER_BYTES:], message)
        if not proof_matches(expected, message.proof):
            raise HandshakeRefused(Reason.WRONG_KEY, _WRONG_KEY)
        self._challenge = message
        return message

    def proof(self, identity: Identity) -> bytes:
        """The frame that proves the same of us, with our identity."""
        assert self._challenge is not None
        ours = proof(self._ours.key, _OPENER, self._hello_frame[HEADER_BYTES:], self._challenge)
        return encode(Proof(ours, identity))

    def welcome(self, body: bytes) -> Identity:
        """Take the acceptor's identity; the connection is up."""
        assert self._challenge is not None
        theirs = _expect(Welcome, body).identity
        _same_names(self._challenge, theirs)
        return theirs


class Acceptor:
    """The side that was connected to. Call ``hello``, ``proof``, ``welcome`` in this order; errors as in Opener."""

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        self._hello: Hello | None = None
        self._expected = b""

    def hello(self, body: bytes) -> tuple[Hello, bytes]:
        """Take the first message; returns it and the frame with our challenge and proof."""
        message = _expect(Hello, body)
        if message.major != PROTOCOL_MAJOR:
            raise HandshakeRefused(
                Reason.VERSION_MISMATCH,
                f"protocol version {message.major} was offered, {PROTOCOL_MAJOR} is spoken here; "
                "run the same release of neuron-pushkv on both sides",
            )
        ours = self._ours
        nonce = secrets.token_bytes(NONCE_BYTES)
        unproved = Challenge(ours.engine_id, ours.incarnation, ours.rank, nonce, bytes(PROOF_BYTES))
        proved = proof(ours.key, _ACCEPTOR, body, unproved)
        self._hello = message
        self._expected = proof(ours.key, _OPENER, body, unproved)
        return message, encode(Challenge(ours.engine_id, ours.incarnation, ours.rank, nonce, proved))

    def proof(self, body: bytes) -> Identity:
        """Take the opener's proof; returns its identity."""
        assert self._hello is not None
        message = _expect(Proof, body)
        if not proof_matches(self._expected, message.proof):
            raise HandshakeRefused(Reason.WRONG_KEY, _WRONG_KEY)
        _same_names(self._hello, message.identity)
        return message.identity

    def welcome(self, identity: Identity) -> bytes:
        """The frame with our identity, after which the connection is up."""
        assert self._hello is not None
        return encode(Welcome(identity, min(PROTOCOL_MINOR, self._hello.minor)))


def _expect(kind: type[Expected], body: bytes) -> Expected:
    message = decode(body)
    if isinstance(message, Refused):
        raise PeerRefused(message.reason, message.detail)
    if not isinstance(message, kind):
        raise WireError(Reason.BAD_FRAME, f"{type(message).__name__} came where {kind.__name__} was due")
    return message


def _same_names(proved: Hello | Challenge, identity: Identity) -> None:
    named = (identity.engine_id, identity.incarnation, identity.rank)
    if named != (proved.engine_id, proved.incarnation, proved.rank):
        raise WireError(
            Reason.BAD_FRAME, f"the peer proved to be engine {proved.engine_id} but names itself {identity.engine_id}"
        )
