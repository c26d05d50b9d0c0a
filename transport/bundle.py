"""Evidence in one archive: the log, what it proves and what it leaves open, and how to check that.

Owns: the archive's files and manifest, and the check of all of it.
Must not know: how a verdict is found, or what a signature is made of.

Everything but the manifest is named in the manifest with its SHA-256, and the signature is over the
manifest.  The file of clear values may be taken out: nothing else depends on it.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from google.protobuf import descriptor_pb2

from engine.store import Stored
from lifecycle.events import Attached
from lifecycle.ids import FLEET
from lifecycle.wording import counted
from transport import jsonlines, replay_text, timeline
from transport.explain import NotInLog, near
from transport.forensics_read import Capture, LinesCapture
from transport.forensics_text import exposures_object
from transport.json_values import to_json
from transport.redaction import Redaction, broken_commitments
from transport.signature import UnusableKey, fingerprint, public_key, sign, signature_problem
from transport.spool import Spool

FORMAT = "custody.bundle"
VERSION = 1
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
PUBLIC_KEY = "manifest.pub"
LOG = "log.jsonl"
VERDICTS = "verdicts.json"
IDENTITIES = "identities.json"
# All files are held in memory at once, and a small archive can unpack to a thousand times its size.
BYTES_MAX = 1 << 30
FILES_MAX = 64
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


class TooLarge(Exception):
    """The archive would be larger than what a check unpacks."""


@attrs.frozen
class Checked:
    """What a check of an archive found: each problem names its file."""

    problems: tuple[str, ...]
    files: int
    signature: bool
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
    told: Callable[[str], object] = lambda _: None,
) -> bytes:
    """The archive of a log, or of the wanted requests or positions of it with the whole fleet.

    `key` is an Ed25519 private key in PEM; `told` hears what is done once the log was read.
    Raises `NoSignature`, `TooLarge` or `NotInLog`.
    """
    redaction = Redaction()
    entries = Spool()
    named = set(wanted)
    cut = False
    known: set[str] = set()
    for position, entry in capture:
        if named:
            known.add(entry.request)
        fleet = entry.request == FLEET
        inside = position >= first and (last is None or position <= last)
        if not fleet and (not inside or (named and entry.request not in named)):
            cut = True
            continue
        entries.append((position, entry if clear else redaction.entry(entry)))
    for name in wanted:
        if name not in known:
            raise NotInLog(near(name, known - {FLEET}), request=name)
    whole = capture.whole and not cut
    told("judging what goes into the archive")
    files = _files(entries, capture, whole=whole)
    if not clear:
        files[IDENTITIES] = redaction.side_file()
    told("packing")
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
    unpacked_bytes = sum(map(len, files.values()))
    if unpacked_bytes > BYTES_MAX:
        raise TooLarge(f"{unpacked_bytes} bytes are more than the {BYTES_MAX} that are checked")
    if key is not None:
        files[SIGNATURE], files[PUBLIC_KEY] = sign(key, manifest_bytes)
    return _packed(files)


def _files(entries: Spool, capture: Capture, *, whole: bool) -> dict[str, bytes]:
    log = _lines(entries, capture, whole=whole)
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


def _lines(entries: Spool, capture: Capture, *, whole: bool) -> bytes:
    """The entries as JSON Lines.  Raises `TooLarge` before so much is in memory."""
    positions = [position for position, _ in entries]
    header = jsonlines.header_line(
        complete=whole,
        entries=len(entries),
        first_position=positions[0] if positions else 0,
        last_position=positions[-1] if positions else 0,
        source=capture.source,
        foreign=capture.foreign,
    )

    def lines() -> Iterator[bytes]:
        yield header.encode()
        for position, entry in entries:
            yield jsonlines.entry_line(Stored(position, entry)).encode()

    length = 0
    for line in lines():
        length += len(line)
        if length > BYTES_MAX:
            raise TooLarge(
                f"{counted(len(entries), 'entry')} are more than {BYTES_MAX} bytes, which is what "
                "is checked: choose with --request, --from and --to"
            )
    return b"".join(lines())


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


# --- Checking ---------------------------------------------------------------------------------


def check(path: Path, *, key: bytes | None = None) -> Checked:
    """Check sums, signature and commitments, and find the verdicts anew.

    `key` is the public key that the signature must be of; without it the one in the archive is
    taken, which proves no more than that nobody changed the manifest by accident.
    Raises `NoBundle`, `NoSignature` or OSError.
    """
    files, unreadable = _unpacked(path)
    manifest = _manifest(files)
    problems = [f"{name}: cannot be unpacked" for name in unreadable]
    listed = manifest["files"]
    for name, about in listed.items():
        data = files.get(name)
        if data is None:
            if name in (LOG, VERDICTS) or name not in manifest.get("separable", ()):
                problems.append(f"{name}: is missing")
        elif name not in unreadable and hashlib.sha256(data).hexdigest() != about.get("sha256"):
            problems.append(f"{name}: is not the file that the manifest names")
    extra = set(files) - set(listed) - {MANIFEST, SIGNATURE, PUBLIC_KEY}
    problems += [f"{name}: is not in the manifest" for name in sorted(extra)]
    signed_by, checked = _signed(files, key, problems)
    _identities(files, problems)
    verdict: dict[str, Any] = {}
    damaged = {line.split(":")[0] for line in problems}
    if not damaged & {LOG, VERDICTS}:
        verdict = _verdict(files, problems)
    return Checked(
        problems=tuple(problems),
        files=len(files),
        signature=SIGNATURE in files,
        signed_by=signed_by,
        signature_checked=checked,
        identities=IDENTITIES in files,
        verdict=verdict,
    )


def _unpacked(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The files, and the names of those that cannot be unpacked and so count as empty."""
    try:
        if (size := path.stat().st_size) > BYTES_MAX:
            raise NoBundle(f"{path} has {size} bytes, more than {BYTES_MAX}")
        # In memory a damaged offset is a ValueError, and not one of the disk's errors.
        packed = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise NoBundle(str(error)) from error
    try:
        with zipfile.ZipFile(packed) as archive:
            members = archive.infolist()
            if len(members) > FILES_MAX:
                raise NoBundle(f"{path} holds {len(members)} files, more than {FILES_MAX}")
            unpacked_bytes = sum(one.file_size for one in members)
            if unpacked_bytes > BYTES_MAX:
                raise NoBundle(f"{path} holds {unpacked_bytes} bytes, more than {BYTES_MAX}")
            if len({one.filename for one in members}) != len(members):
                raise NoBundle(f"{path} holds two files of one name")
            found = {one.filename: _member(archive, one) for one in members}
    except _UNREADABLE as error:
        raise NoBundle(f"{path} is no archive: {error}") from error
    return {name: data or b"" for name, data in found.items()}, [
        name for name, data in found.items() if data is None
    ]


# What unpacking raises: RuntimeError for what is encrypted or of a later version, the others for
# what is damaged.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, OverflowError, RuntimeError, ValueError),
)


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes | None:
    """The file's bytes, if it can be unpacked."""
    # The other methods unpack without a bound, whatever size the archive claims.
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return None
    try:
        with archive.open(member) as stream:
            return stream.read(member.file_size)
    except _UNREADABLE:
        return None


def _manifest(files: dict[str, bytes]) -> dict[str, Any]:
    try:
        manifest = json.loads(files.get(MANIFEST, b""))
    except (ValueError, RecursionError) as error:
        raise NoBundle(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise NoBundle(f'{MANIFEST} is no manifest: "format" is not "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise NoBundle(f"version {manifest.get('version')!r} of bundles is not {VERSION}")
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not all(isinstance(one, dict) for one in listed.values()):
        raise NoBundle(f"{MANIFEST} names no files")
    if not {LOG, VERDICTS} <= set(listed):
        raise NoBundle(f"{MANIFEST} does not name {LOG} and {VERDICTS}")
    if not isinstance(manifest.get("separable", []), list):
        raise NoBundle(f'{MANIFEST}: "separable" is no list')
    return manifest


def _signed(files: dict[str, bytes], key: bytes | None, problems: list[str]) -> tuple[str, bool]:
    # A given key that cannot be used is never replaced by the archive's own.
    given = None if key is None else public_key(key)
    signature, public = files.get(SIGNATURE), key if key is not None else files.get(PUBLIC_KEY)
    if signature is None or public is None:
        if key is not None or SIGNATURE in files:
            problems.append(f"{SIGNATURE}: there is no signature that could be checked")
        return "", False
    try:
        problem = signature_problem(given or public_key(public), signature, files[MANIFEST])
    except UnusableKey as error:
        problem = str(error)
    if problem:
        problems.append(f"{MANIFEST}: {problem}")
        return "", False
    return fingerprint(public), key is not None


def _identities(files: dict[str, bytes], problems: list[str]) -> None:
    data = files.get(IDENTITIES)
    if data is None:
        return
    try:
        broken = broken_commitments(json.loads(data))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        problems.append(f"{IDENTITIES}: cannot be read: {error}")
        return
    problems += [f"{IDENTITIES}: {one} does not stand for its value" for one in broken]


def _verdict(files: dict[str, bytes], problems: list[str]) -> dict[str, Any]:
    """The verdicts found anew; they must be those in the archive."""
    try:
        kept = json.loads(files[VERDICTS])
        found, _ = _judged(files[LOG], title="bundle")
    except (ValueError, RecursionError, jsonlines.UnreadableLog) as error:
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
