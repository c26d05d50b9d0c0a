"""Keyed digests of what may never stand in a log: prompts, tokens, tenants.

Owns: how sizes and digests stand in for content.
Must not know: where the key comes from.

BLAKE2b (RFC 7693) in its keyed form: without the key a short prompt cannot be guessed from its
digest, and the request's id is part of what is digested, so equal prompts do not look alike.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from lifecycle.ids import RequestId

DIGEST_BYTES = 16

Keyed = Callable[[RequestId, Sequence[int]], bytes]
"""Digest a request's tokens under a key that the caller holds."""


def keyed_digest(key: bytes) -> Keyed:
    """A digest of token ids under this key (at most 64 bytes)."""

    def digest(request: RequestId, tokens: Sequence[int]) -> bytes:
        packed = request.encode() + struct.pack(f"<{len(tokens)}q", *tokens)
        return hashlib.blake2b(packed, key=key, digest_size=DIGEST_BYTES).digest()

    return digest


def commitment(salt: bytes, value: str) -> str:
    """A salted commitment to a name, in hexadecimal."""
    return hashlib.blake2b(value.encode(), key=salt, digest_size=DIGEST_BYTES).hexdigest()
