"""What a prompt's KV depends on, as a hash of its first n tokens.

KV is a function of content, so equal content may be paired safely and unlike content never is. The hash is a chain
over fixed pages of 16 tokens, whatever block size an engine uses, seeded with everything else that KV depends on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_TOKENS = 16
DIGEST_BYTES = 16
_TOKEN_BYTES = 4


def seed(model: str, *more: str) -> bytes:
    """Start of the chain: the model's fingerprint, then LoRA, cache salt, multimodal identifiers, in that order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (model, *more):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def _link(previous: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(previous + tokens, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Content:
    """A prompt: its seed, its token ids (4 bytes each, little endian) and the chained digests of its full pages."""

    seed: bytes
    tokens: bytes
    pages: bytes

    @classmethod
    def of(cls, seed: bytes, token_ids: Sequence[int]) -> Content:
        """Hash all full pages of ``token_ids`` once."""
        packed = array("I", token_ids)
        tokens = packed.tobytes()
        pages = bytearray()
        link = seed
        page_bytes = PAGE_TOKENS * _TOKEN_BYTES
        for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
            link = _link(link, tokens[start : start + page_bytes])
            pages += link
        return cls(seed, tokens, bytes(pages))

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // _TOKEN_BYTES

    def at(self, count: int) -> bytes:
        """Digest of the first ``count`` tokens. Raises :class:`ValueError` outside ``[0, length]``."""
        if not 0 <= count <= self.length:
            raise ValueError(f"a prompt of {self.length} tokens has no content at {count}")
        full, rest = divmod(count, PAGE_TOKENS)
        link = self.pages[(full - 1) * DIGEST_BYTES : full * DIGEST_BYTES] if full else self.seed
        if rest:
            start = full * PAGE_TOKENS * _TOKEN_BYTES
            link = _link(link, self.tokens[start : start + rest * _TOKEN_BYTES])
        return link
