"""Evidence in one archive: the log, what it proves and what it leaves open, and how to check that.

Owns: the archive's files and manifest, its signature, and the check of all of it.
Must not know: how a verdict is found.

Everything but the manifest is named in the manifest with its SHA-256, and the signature is over the
manifest.  The file of clear values may be taken out: nothing else depends on it.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from google.protobuf import descriptor_pb2

from engine.store import Stored
from lifecycle.events import Attached, Entry
from lifecycle.ids import FLEET
from transport import jsonlines, replay_text, timeline
from transport.forensics_read import Capture, LinesCapture
from transport.forensics_text import exposures_object
from transport.json_values import to_json
from transport.redaction import Redaction, broken_commitments

FORMAT = "custody.bundle"
VERSION = 1
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
PUBLIC_KEY = "manifest.pub"
LOG = "log.jsonl"
VERDICTS = "verdicts.json"
IDENTITIES = "identities.json"
FILE_BYTES_MAX = 1 << 32
# The archive's own times say nothing; all files bear the earliest that the format knows.
_EPOCH = (1980, 1, 1, 0, 0, 0)
README = """This archive holds a part of an event log, what was found in it, and how to check both.

log.jsonl        the entries, JSON Lines version 1; identities are salted commitments
verdicts.json    replay and exposures of exactly these entries, and what they do not cover
fleet.json       engines, pools, contexts
timeline.html    the same drawn; it needs no network
lifecycle.binpb  the schema as a protobuf descriptor set
identities.json  what the commitments stand for; it may be taken out before the archive is given on
manifest.json    the SHA-256 of every file, and the hashes with which the log's chain ends
manifest.sig     an Ed25519 signature of manifest.json, if there is one

custody bundle verify ARCHIVE checks sums, signature and commitments, and finds the verdicts anew.
"""


class NoBundle(Exception):
    """The file is no bundle."""


class NoSignature(Exception):
    """Signing or checking a signature is not possible here."""


@attrs.frozen
class Checked:
    """What a check of an archive found: each problem names its file."""

    problems: tuple[str, ...]
    files: int
    signed_by: str
    signature_checked: bool
    identities: bool
    verdict: dict[str, Any]


# --- Making -----------------------------------------------------------------------------------


def make(
    capture: Capture,
    *,
    clear: bool,
    version: str,
    wanted: Sequence[str] = (),
    first: int = 1,
    last: int | None = None,
    key: bytes | None = None,
) -> bytes:
    """The archive of a log, or of the wanted requests or positions of it with the whole fleet.

    `key` is an Ed25519 private key in PEM.  Raises `NoSignature`.
    """
    redaction = Redaction()
    entries: list[tuple[int, Entry]] = []
    named = set(wanted)
    cut = False
    for position, entry in capture:
        fleet = entry.request == FLEET
        inside = position >= first and (last is None or position <= last)
        if not fleet and (not inside or (named and entry.request not in named)):
            cut = True
            continue
        entries.append((position, entry if clear else redaction.entry(entry)))
    whole = capture.whole and not cut
    files = _files(entries, capture, whole=whole)
    if not clear:
        files[IDENTITIES] = redaction.side_file()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tool": f"custody {version}",
        "source": capture.source,
        "foreign": capture.foreign,
        "redacted": not clear,
        "complete": whole,
        "slice": {"requests": sorted(named), "first_position": first, "last_position": last},
        "chain": {
            "head": capture.head.hex() if capture.head is not None else None,
            "problems": len(capture.problems),
        },
        "separable": [] if clear else [IDENTITIES],
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in sorted(files.items())
        },
    }
    manifest_bytes = json.dumps(manifest, indent=1).encode()
    files[MANIFEST] = manifest_bytes
    if key is not None:
        files[SIGNATURE], files[PUBLIC_KEY] = _sign(key, manifest_bytes)
    return _packed(files)


def _files(
    entries: Sequence[tuple[int, Entry]], capture: Capture, *, whole: bool
) -> dict[str, bytes]:
    stored = [Stored(position, entry) for position, entry in entries]
    lines = io.StringIO()
    jsonlines.write_jsonlines(
        lines, stored, complete=whole, source=capture.source, foreign=capture.foreign
    )
    log = lines.getvalue().encode()
    verdicts, document = _judged(log, title="bundle")
    attached = [e.event for _, e in entries if isinstance(e.event, Attached)]
    return {
        LOG: log,
        VERDICTS: json.dumps(verdicts, indent=1).encode(),
        "fleet.json": json.dumps([to_json(one) for one in attached], indent=1).encode(),
        "timeline.html": timeline.page(document).encode(),
        "lifecycle.binpb": _descriptors(),
        "README.txt": README.encode(),
    }


def _judged(log: bytes, *, title: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Verdicts of these entries, and their timeline."""
    from transport import timeline_story

    capture = LinesCapture(io.BytesIO(log))
    drawn = timeline_story.read(capture, title=title)
    report = drawn.report
    verdicts = {
        "exposures": exposures_object(capture, drawn.found),
        "replay": replay_text.replay_object(capture, report, report.findings),
    }
    # How many guards there are belongs to the version of the tool.
    verdicts["replay"].pop("evaluations")
    verdicts["replay"].pop("rules")
    return json.loads(json.dumps(verdicts)), drawn.document


def _descriptors() -> bytes:
    from transport.pb import lifecycle_pb2

    files = descriptor_pb2.FileDescriptorSet()
    lifecycle_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    return files.SerializeToString()


def _packed(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), files[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()


# --- Signing ----------------------------------------------------------------------------------


def _sign(key: bytes, data: bytes) -> tuple[bytes, bytes]:
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


def _signature_problem(public: bytes, signature: bytes, data: bytes) -> str:
    """What is wrong with a signature; empty when it holds.  Raises `NoSignature`."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise NoSignature("checking a signature needs the package cryptography") from error
    try:
        loaded = load_pem_public_key(public)
    except ValueError as error:
        return f"the public key cannot be read: {error}"
    if not isinstance(loaded, Ed25519PublicKey):
        return "the public key is no Ed25519 key"
    try:
        loaded.verify(signature, data)
    except InvalidSignature:
        return "the signature is not that of this manifest"
    return ""


# --- Checking ---------------------------------------------------------------------------------


def check(path: Path, *, key: bytes | None = None) -> Checked:
    """Check sums, signature and commitments, and find the verdicts anew.

    `key` is the public key that the signature must be of; without it the one in the archive is
    taken, which proves no more than that nobody changed the manifest by accident.
    Raises `NoBundle`, `NoSignature` or OSError.
    """
    files = _unpacked(path)
    manifest = _manifest(files)
    problems: list[str] = []
    listed = manifest["files"]
    for name, about in listed.items():
        data = files.get(name)
        if data is None:
            if name not in manifest.get("separable", ()):
                problems.append(f"{name}: is missing")
        elif hashlib.sha256(data).hexdigest() != about.get("sha256"):
            problems.append(f"{name}: is not the file that the manifest names")
    extra = set(files) - set(listed) - {MANIFEST, SIGNATURE, PUBLIC_KEY}
    problems += [f"{name}: is not in the manifest" for name in sorted(extra)]
    signed_by, checked = _signed(files, key, problems)
    _identities(files, problems)
    verdict: dict[str, Any] = {}
    damaged = {line.split(":")[0] for line in problems}
    if not damaged & {LOG, VERDICTS}:
        verdict = _verdict(files, problems)
    return Checked(tuple(problems), len(files), signed_by, checked, IDENTITIES in files, verdict)


def _unpacked(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            if any(one.file_size > FILE_BYTES_MAX for one in archive.infolist()):
                raise NoBundle(f"{path} holds a file of more than {FILE_BYTES_MAX} bytes")
            names = [one.filename for one in archive.infolist()]
            if len(set(names)) != len(names):
                raise NoBundle(f"{path} holds two files of one name")
            return {name: _member(archive, name) for name in names}
    except zipfile.BadZipFile as error:
        raise NoBundle(f"{path} is no archive: {error}") from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The file's bytes; what cannot be unpacked is empty, and so is not what was listed."""
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
        return b""


def _manifest(files: dict[str, bytes]) -> dict[str, Any]:
    try:
        manifest = json.loads(files.get(MANIFEST, b""))
    except ValueError as error:
        raise NoBundle(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NoBundle(f'{MANIFEST} is no manifest: "format" is not "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise NoBundle(f"version {manifest.get('version')!r} of bundles is not {VERSION}")
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
        raise NoBundle(f"{MANIFEST} names no files")
    return manifest


def _signed(files: dict[str, bytes], key: bytes | None, problems: list[str]) -> tuple[str, bool]:
    signature, public = files.get(SIGNATURE), key or files.get(PUBLIC_KEY)
    if signature is None or public is None:
        if key is not None or SIGNATURE in files:
            problems.append(f"{SIGNATURE}: there is no signature that could be checked")
        return "", False
    problem = _signature_problem(public, signature, files[MANIFEST])
    if problem:
        problems.append(f"{MANIFEST}: {problem}")
        return "", False
    return hashlib.sha256(public).hexdigest()[:16], key is not None


def _identities(files: dict[str, bytes], problems: list[str]) -> None:
    data = files.get(IDENTITIES)
    if data is None:
        return
    try:
        broken = broken_commitments(json.loads(data))
    except (ValueError, AttributeError, TypeError) as error:
        problems.append(f"{IDENTITIES}: cannot be read: {error}")
        return
    problems += [f"{IDENTITIES}: {one} does not stand for its value" for one in broken]


def _verdict(files: dict[str, bytes], problems: list[str]) -> dict[str, Any]:
    """The verdicts found anew; they must be those in the archive."""
    try:
        kept = json.loads(files[VERDICTS])
        found, _ = _judged(files[LOG], title="bundle")
    except (KeyError, ValueError, jsonlines.UnreadableLog) as error:
        problems.append(f"{LOG}: cannot be judged: {error}")
        return {}
    for name, value in found.items():
        if not isinstance(kept, dict) or kept.get(name) != value:
            problems.append(f"{VERDICTS}: {name} is not what the log says")
    exposed = found["exposures"]
    return {
        "affected": exposed["affected"],
        "exposed_requests": exposed["exposed_requests"],
        "violations": len(found["replay"]["violations"]),
        "complete": exposed["complete"],
    }
