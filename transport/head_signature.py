"""Signatures of a log's chain: who says that the log up to a position was this one.

Owns: the file beside the segments, what is signed, and what a check found.
Must not know: how a chain is read; what a signature is made of.

The hash of a batch stands for everything before it, so one signature of one hash is enough.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from transport.signature import UnusableKey, fingerprint, public_key, sign, signature_problem

FORMAT = "custody.head"
VERSION = 1
SUFFIX = ".signed"
_BYTES_MAX = 1 << 16


@attrs.frozen
class Signed:
    """What one signature file says, and what is wrong with it; empty when it holds.

    `named` says whether it is by a key that whoever asked has named, and `compared` whether the log
    holds the batch that it is of.
    """

    file: str
    position: int
    head: str
    fingerprint: str
    named: bool
    compared: bool
    problem: str = ""


def statement(position: int, head: bytes) -> bytes:
    """The bytes that are signed."""
    return f"{FORMAT} {VERSION}\nposition {position}\nhead {head.hex()}\n".encode()


def signature_name(position: int) -> str:
    """The name of the file with a signature of the log up to there."""
    return f"{position:020d}{SUFFIX}"


def signature_paths(folder: Path) -> list[Path]:
    """The folder's signatures, in the order of their positions."""
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)


def signed(key: bytes, *, position: int, head: bytes) -> bytes:
    """The file's content; `key` is an Ed25519 private key in PEM.  Raises `NoSignature`."""
    signature, public = sign(key, statement(position, head))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "position": position,
        "head": head.hex(),
        "public_key": public.decode(),
        "signature": base64.b64encode(signature).decode(),
    }
    return json.dumps(content, indent=1).encode() + b"\n"


@attrs.frozen
class Claim:
    """A signature file as it was read; `unreadable` says why it is none."""

    file: str
    position: int = 0
    head: bytes = b""
    public: bytes = b""
    signature: bytes = b""
    unreadable: str = ""


def read_claim(path: Path) -> Claim:
    """What the file claims, nothing checked."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_BYTES_MAX))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            return Claim(path.name, unreadable=f"is {content['format']} {content['version']}")
        position = content["position"]
        if type(position) is not int or position < 1:
            return Claim(path.name, unreadable=f"position {position!r} is none")
        return Claim(
            path.name,
            position,
            bytes.fromhex(content["head"]),
            content["public_key"].encode(),
            base64.b64decode(content["signature"], validate=True),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        return Claim(path.name, unreadable=f"is no signature: {error}")


def checked(
    claims: Iterable[Claim],
    heads: Mapping[int, bytes],
    *,
    last: int,
    first: int,
    keys: Iterable[bytes] = (),
) -> list[Signed]:
    """Compare each claim with the hashes of the batches that end where the claims say.

    The log reaches from the position `first` to `last`; `keys` are public keys in PEM that whoever
    asks trusts.  Raises `NoSignature` where no signature can be checked here, and `UnusableKey` for
    a key of `keys` that is none.
    """
    trusted = [_raw(key) for key in keys]
    found = []
    for claim in claims:
        if claim.unreadable:
            found.append(Signed(claim.file, 0, "", "", False, False, claim.unreadable))
            continue
        problem, named = _signature(claim, trusted)
        known = heads.get(claim.position)
        if not problem and known != claim.head:
            problem = _difference(claim, known, first=first, last=last)
        found.append(
            Signed(
                claim.file,
                claim.position,
                claim.head.hex(),
                fingerprint(claim.public),
                named,
                known is not None,
                problem,
            )
        )
    return found


def _signature(claim: Claim, trusted: list[bytes]) -> tuple[str, bool]:
    try:
        key = public_key(claim.public)
        named = _raw(claim.public) in trusted
    except UnusableKey as error:
        return str(error), False
    if signature_problem(key, claim.signature, statement(claim.position, claim.head)):
        return "the signature is not that of this position and hash", named
    return "", named


def _raw(pem: bytes) -> bytes:
    return public_key(pem).public_bytes_raw()


def _difference(claim: Claim, known: bytes | None, *, first: int, last: int) -> str:
    if known is not None:
        return (
            f"the log up to position {claim.position} ends with {known.hex()}, "
            f"signed was {claim.head.hex()}: it is not the log that was signed"
        )
    if claim.position > last:
        return f"the log ends with position {last}, signed was position {claim.position}"
    if claim.position < first:
        # Nothing is wrong with it; what was signed was dropped or lies elsewhere.
        return ""
    return f"no batch ends at position {claim.position}, which was signed"
