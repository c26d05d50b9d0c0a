"""Ed25519 signatures with keys in PEM; the package that knows them is optional.

Owns: which keys are usable, and what is said of the others.
Must not know: what is signed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


class NoSignature(Exception):
    """Signing or checking a signature is not possible here."""


class UnusableKey(NoSignature):
    """These bytes are no public key that a signature could be of."""


def sign(key: bytes, data: bytes) -> tuple[bytes, bytes]:
    """The signature with a private key in PEM, and the public key in PEM.  Raises `NoSignature`."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            PublicFormat,
            load_pem_private_key,
        )
    except ImportError as error:
        raise NoSignature("signing needs the package cryptography (extra `sign`)") from error
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise NoSignature(f"the signing key cannot be read: {error}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise NoSignature("the signing key is no Ed25519 key")
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private.sign(data), public


def fingerprint(pem: bytes) -> str:
    """By what a public key is known: the first 16 hexadecimal digits of its PEM's SHA-256."""
    return hashlib.sha256(pem).hexdigest()[:16]


def public_key(pem: bytes) -> Ed25519PublicKey:
    """The public key of this PEM.  Raises `NoSignature` or `UnusableKey`."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise NoSignature("checking a signature needs the package cryptography") from error
    try:
        loaded = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UnusableKey(f"the public key cannot be read: {error}") from error
    if not isinstance(loaded, ed25519.Ed25519PublicKey):
        raise UnusableKey("the public key is no Ed25519 key")
    return loaded


def signature_problem(public: Ed25519PublicKey, signature: bytes, data: bytes) -> str:
    """What is wrong with a signature; empty when it holds."""
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature, data)
    except InvalidSignature:
        return "the signature is not that of this manifest"
    return ""
