"""A folder of segment files, read as one log; and the few careful ways of writing to it.

Owns: file names, the order and unity of segments, atomic files, the repair of a torn end.
Must not know: appends, locks, and what entries mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from engine.store import StoreDamaged, StoreTooNew
from transport import codec
from transport.pb import lifecycle_pb2 as pb
from transport.stores.frames import (
    CHAIN_START,
    FILE_HEADER_BYTES,
    FRAME_HEADER_BYTES,
    Damage,
    FileHeader,
    Frame,
    Torn,
    unpack_file_header,
    walk,
)

SUFFIX = ".segment"
UNFINISHED_SUFFIX = ".new"
EPOCH_FILE = "epoch"
LOCK_FILE = "lock"


@attrs.frozen
class Found:
    """A frame, or the log's torn end, and the segment that holds it."""

    segment: Path
    item: Frame | Torn


def segment_name(first_position: int) -> str:
    return f"{first_position:020d}{SUFFIX}"


def segment_paths(folder: Path) -> list[Path]:
    """The folder's segments in the order of their positions."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))


def walk_segments(paths: Sequence[Path], *, whole: bool) -> Iterator[Found]:
    """Every frame of these segments in order, each checked against the one before.

    `whole` says that they are a log from its beginning; otherwise the first segment's word is
    taken for where it stands.  Raises `StoreDamaged`.
    """
    position, previous = 1, CHAIN_START
    for number, path in enumerate(paths):
        data = path.read_bytes()
        try:
            header = unpack_file_header(data)
            if whole or number:
                _expect(header, position=position, previous=previous)
            if whole and path.name != segment_name(position):
                raise Damage(0, f"should be called {segment_name(position)}")
            position, previous = header.first_position, header.previous
            for item in walk(data, last=number == len(paths) - 1):
                if isinstance(item, Frame):
                    _expect(item, position=position, previous=previous)
                    position, previous = position + item.count, item.digest
                yield Found(path, item)
        except Damage as damage:
            raise StoreDamaged(path.name, damage.offset, damage.reason) from damage


def _expect(found: Frame | FileHeader, *, position: int, previous: bytes) -> None:
    """Raises `Damage` when what was found does not follow what came before."""
    offset = found.offset if isinstance(found, Frame) else 0
    if found.first_position != position:
        raise Damage(offset, f"begins at position {found.first_position} instead of {position}")
    if found.previous != previous:
        raise Damage(offset, "names another predecessor than the batch before it")


def parse_batch(segment: Path, frame: Frame) -> tuple[pb.Entry, ...]:
    """The frame's entries, not yet decoded.  Raises `StoreDamaged`."""
    offset = frame.offset + FRAME_HEADER_BYTES
    try:
        entries = codec.batch_from_bytes(frame.payload)
    except codec.MalformedRecord as error:
        raise StoreDamaged(segment.name, offset, str(error)) from error
    if len(entries) != frame.count:
        reason = f"holds {len(entries)} entries instead of {frame.count}"
        raise StoreDamaged(segment.name, offset, reason)
    return entries


def refuse_unknown(segment: Path, frame: Frame, entry: pb.Entry) -> None:
    """Raise `StoreTooNew` for an entry whose event this version does not know."""
    if entry.event.WhichOneof("event") is None:
        reason = f"an event of {entry.request} is unknown"
        raise StoreTooNew(segment.name, frame.offset + FRAME_HEADER_BYTES, reason)


def sync_folder(folder: Path) -> None:
    """Make the folder's names durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """The file holds the old content or the new, never a part; durable on return."""
    unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
    write_durably(unfinished, data)
    unfinished.rename(path)
    sync_folder(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file of its own and make its content durable, but not yet its name."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def keep_torn_end(segment: Path, offset: int) -> Path:
    """Cut the torn end off and keep it beside the segment; returns where."""
    data = segment.read_bytes()[offset:]
    number = 0
    while (kept := segment.with_name(f"{segment.name}.{offset}.{number}.torn")).exists():
        number += 1
    write_durably(kept, data)
    sync_folder(segment.parent)
    with segment.open("r+b") as file:
        file.truncate(offset)
        os.fsync(file.fileno())
    return kept


def read_epoch(folder: Path) -> int:
    """The epoch last taken; 0 when none was.  Raises `StoreDamaged`."""
    path = folder / EPOCH_FILE
    if not path.exists():
        return 0
    text = path.read_bytes()
    if not text.endswith(b"\n") or not text[:-1].isdigit():
        raise StoreDamaged(EPOCH_FILE, 0, f"{text[:40]!r} is no epoch")
    return int(text)


def write_epoch(folder: Path, epoch: int) -> None:
    write_atomically(folder / EPOCH_FILE, f"{epoch}\n".encode())


def begins_the_log(segment: Path) -> bool:
    """Whether the segment's header says that it is a log's first.  Raises `StoreDamaged`."""
    try:
        with segment.open("rb") as file:
            header = unpack_file_header(file.read(FILE_HEADER_BYTES))
    except Damage as damage:
        raise StoreDamaged(segment.name, damage.offset, damage.reason) from damage
    return header.first_position == 1
