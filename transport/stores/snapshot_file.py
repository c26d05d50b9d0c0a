"""A snapshot as a file beside the segments: what a dropped beginning of the log came to.

Owns: the file's name, its lines, and its check sum.
Must not know: when a beginning is dropped, and what its entries mean.

JSON Lines: a header, an entry a line as in an exported log, and the SHA-256 of all before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from engine.store import Stored, StoreDamaged
from lifecycle.ids import EngineId, Party
from lifecycle.snapshot import Snapshot
from transport import jsonlines
from transport.codec_values import MalformedRecord
from transport.stores import segment_files
from transport.stores.disk import Disk

SUFFIX = ".snapshot"
FORMAT = "custody.snapshot"
VERSION = 1


@attrs.frozen
class Kept:
    """A snapshot, the hash of the last batch before the border, and the epoch at least taken."""

    snapshot: Snapshot
    previous: bytes
    epoch: int


def snapshot_name(position: int) -> str:
    """The name of the snapshot up to that position."""
    return f"{position:020d}{SUFFIX}"


def snapshot_paths(folder: Path) -> list[Path]:
    """The folder's snapshots, the newest last."""
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)


def newest_snapshot(folder: Path) -> Kept | None:
    """What the folder's log begins behind, or None.  Raises StoreDamaged or OSError."""
    paths = snapshot_paths(folder)
    return read_snapshot(paths[-1]) if paths else None


def write_snapshot(folder: Path, kept: Kept, disk: Disk) -> Path:
    """Durable on return; returns where.  Raises OSError."""
    path = folder / snapshot_name(kept.snapshot.position)
    content = "".join(_lines(kept)).encode()
    digest = json.dumps({"sha256": hashlib.sha256(content).hexdigest()})
    disk.write_atomically(path, content + digest.encode() + b"\n")
    return path


def _lines(kept: Kept) -> Iterator[str]:
    snapshot = kept.snapshot
    header = {
        "format": FORMAT,
        "version": VERSION,
        "position": snapshot.position,
        "time_ns": snapshot.time_ns,
        "epoch": kept.epoch,
        "previous": kept.previous.hex(),
        "entries": len(snapshot.entries),
        "serials": [[p.engine, p.incarnation, p.rank, serial] for p, serial in snapshot.serials],
    }
    yield json.dumps(header, separators=(",", ":")) + "\n"
    for position, entry in snapshot.entries:
        yield jsonlines.entry_line(Stored(position, entry))


def read_snapshot(path: Path) -> Kept:
    """Raises StoreDamaged or OSError."""
    content = path.read_bytes()
    body, _, last = content.rstrip(b"\n").rpartition(b"\n")
    body += b"\n"
    try:
        if json.loads(last) != {"sha256": hashlib.sha256(body).hexdigest()}:
            raise StoreDamaged(path.name, len(body), "the check sum does not match")
        header, *lines = [json.loads(line) for line in body.splitlines()]
        return _kept(path, header, lines)
    except (ValueError, KeyError, TypeError, MalformedRecord, jsonlines.UnknownName) as error:
        raise StoreDamaged(path.name, 0, f"is no snapshot: {error}") from error


def _kept(path: Path, header: dict[str, Any], lines: list[dict[str, Any]]) -> Kept:
    if (header["format"], header["version"]) != (FORMAT, VERSION):
        raise StoreDamaged(path.name, 0, f"is {header['format']} {header['version']}")
    if path.name != snapshot_name(header["position"]):
        raise StoreDamaged(path.name, 0, f"should be called {snapshot_name(header['position'])}")
    stored = [jsonlines.stored_of(line, strict=True) for line in lines]
    snapshot = Snapshot(
        position=header["position"],
        time_ns=header["time_ns"],
        entries=tuple((one.position, one.entry) for one in stored),
        serials=tuple(
            (Party(EngineId(engine), incarnation, rank), serial)
            for engine, incarnation, rank, serial in header["serials"]
        ),
    )
    return Kept(snapshot, bytes.fromhex(header["previous"]), header["epoch"])


def remove_before(folder: Path, border: int, disk: Disk) -> None:
    """Remove the segments that end there, oldest first, and older snapshots.  Raises OSError."""
    paths = segment_files.segment_paths(folder)
    for path in paths[: len(paths) - len(segment_files.behind(paths, border))]:
        disk.remove(path.with_suffix(segment_files.SUFFIX))
        disk.remove(path.with_suffix(segment_files.SEALED_SUFFIX))
    for path in snapshot_paths(folder)[:-1]:
        disk.remove(path)


def segments_and_snapshot(folder: Path) -> tuple[list[Path], Kept | None]:
    """The segments of a log, and what stands for those that were dropped.

    Raises `UnreadableLog` or OSError.
    """
    paths = segment_files.segment_paths(folder)
    if not paths:
        raise jsonlines.UnreadableLog(0, f"{folder} holds no segment")
    try:
        kept = newest_snapshot(folder)
    except StoreDamaged as error:
        raise jsonlines.UnreadableLog(0, str(error)) from error
    return (paths if kept is None else segment_files.behind(paths, kept.snapshot.position)), kept
