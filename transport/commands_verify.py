"""`log verify` and `log sign`: whether a log's files are what was written, and who says so.

Owns: which keys are asked for, and the exit code of what was found.
Must not know: how damage is found, or what a signature is made of.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lifecycle.wording import counted
from transport.commands_forensics import HASH_BYTES, opened
from transport.commands_shared import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNREADABLE,
    Json,
    UsageError,
    key_bytes,
    note,
    say,
    say_json,
)
from transport.progress import Reading

if TYPE_CHECKING:
    from transport.forensics_read import SegmentCapture
    from transport.head_signature import Signed

Keys = Annotated[tuple[Path, ...], Parameter(name="--key", negative="")]
"""Public keys (PEM) of those whose signatures count."""


def verify(log: Path, /, *, head: str | None = None, key: Keys = (), json: Json = False) -> int:
    """Check every sum, hash, gap and signature of a log's files; exits 0 intact, 1 not, 5 incomplete.

    Parameters
    ----------
    log
        A folder of segments, or one segment; of JSON Lines and Parquet only order and gaps can be
        checked.
    head
        The hash with which the chain must end, as an earlier check or a bundle printed it.
    key
        An Ed25519 public key (PEM); one of those given must have signed the log. May be given
        several times.
    json
        Print one JSON document.
    """
    from transport import verify_text
    from transport.forensics_read import SegmentCapture

    expected = _hash_of(head)
    with opened(log) as capture, Reading(capture, shown=not json) as reading:
        capture.expected_head = expected
        found = None
        if isinstance(capture, SegmentCapture) and log.is_dir():
            found = _signatures(log, capture, [key_bytes(path) for path in key])
        elif key:
            raise UsageError(f"--key: {log} is no folder of segments, beside which signatures lie")
        else:
            for _ in capture:
                pass
        reading.stop()
        if json:
            say_json(verify_text.verify_object(capture, found))
        else:
            for line in verify_text.verify_lines(capture, found):
                say(line)
        if capture.problems:
            return EXIT_FAILED
        return EXIT_OK if capture.whole else EXIT_UNREADABLE


def _hash_of(head: str | None) -> bytes | None:
    if head is None:
        return None
    try:
        expected = bytes.fromhex(head)
    except ValueError as error:
        raise UsageError(f"--head {head!r}: is not hexadecimal") from error
    if len(expected) != HASH_BYTES:
        raise UsageError(f"--head: {counted(len(expected), 'byte')} are no hash of {HASH_BYTES}")
    return expected


def _signatures(log: Path, capture: SegmentCapture, keys: list[bytes]) -> list[Signed] | None:
    """Read the log to its end, and check every signature beside it."""
    from transport import head_signature as signatures
    from transport.signature import NoSignature

    claims = [signatures.read_claim(path) for path in signatures.signature_paths(log)]
    survey = capture.survey
    survey.wanted = frozenset(claim.position for claim in claims)
    for _ in capture:
        pass
    first, last = survey.span
    try:
        found = signatures.checked(claims, survey.heads, first=first, last=last, keys=keys)
    except NoSignature as error:
        if keys:
            raise UsageError(f"--key: {error}") from error
        note(f"signatures beside the log were not checked: {error}")
        return None
    for one in found:
        if one.problem:
            survey.refuse_signature(one.file, one.position, one.problem)
    if keys and not any(one.named and one.compared and not one.problem for one in found):
        survey.refuse_signature("", last, "no signature of this log is by a key that was given")
    return found


def sign(log: Path, /, *, key: Path, output: Path | None = None, json: Json = False) -> int:
    """Sign the hash with which a log's chain ends now; the log must be intact.

    Exits 0 when the signature was written, 1 or 5 as `log verify` does when the log is not intact.

    Parameters
    ----------
    log
        A folder of segments.
    key
        An Ed25519 private key (PEM).
    output
        The signature; a file named after the last position in the log's folder if absent, where
        `log verify` looks for it.
    json
        Print one JSON document.
    """
    from transport import head_signature as signatures
    from transport.forensics_read import SegmentCapture
    from transport.signature import NoSignature

    with opened(log) as capture:
        if not isinstance(capture, SegmentCapture) or not log.is_dir():
            raise UsageError(f"{log}: only a folder of segments has a chain that can be signed")
        with Reading(capture, shown=not json):
            for _ in capture:
                pass
        if capture.damaged:
            note(
                f"custody: {log}: is not intact, `custody log verify` says where; nothing is signed"
            )
            return EXIT_FAILED if capture.problems else EXIT_UNREADABLE
        position, head = capture.survey.span[1], capture.survey.head
    if not position:
        raise UsageError(f"{log}: holds no entry that could be signed")
    try:
        content = signatures.signed(key_bytes(key), position=position, head=head)
    except NoSignature as error:
        raise UsageError(f"--key {key}: {error}") from error
    path = output if output is not None else log / signatures.signature_name(position)
    path.write_bytes(content)
    if json:
        say_json({"signature": str(path), "position": position, "head": head.hex()})
    else:
        say(f"signed up to position {position}, hash {head.hex()}, in {path}")
    return EXIT_OK
