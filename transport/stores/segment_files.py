"""A folder of segment files, plain and sealed, read as one log.

Owns: file names, the order and unity of segments, sealing one, the repair of a torn end.
Must not know: appends, locks, and what entries mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import attrs

from engine.store import StoreDamaged, StoreTooNew
from transport import codec
from transport.pb import lifecycle_pb2 as pb
from transport.stores import sealed
from transport.stores.disk import Disk
from transport.stores.frames import (
    CHAIN_START,
    FILE_HEADER_BYTES,
    FILE_MAGIC,
    FRAME_HEADER_BYTES,
    Damage,
    FileHeader,
    Frame,
    Torn,
    unpack_file_header,
    walk,
)

SUFFIX = ".segment"
SEALED_SUFFIX = ".sealed"
PARQUET_MAGIC = b"PAR1"
EPOCH_FILE = "epoch"


@attrs.frozen
class Found:
    """A frame, or the log's torn end, and the segment that holds it.

    Offsets are those of the plain segment, also where the segment is sealed.
    """

    segment: Path
    item: Frame | Torn


# --- Names ------------------------------------------------------------------------------------


def segment_name(first_position: int) -> str:
    return f"{first_position:020d}{SUFFIX}"


def sealed_name(first_position: int) -> str:
    return f"{first_position:020d}{SEALED_SUFFIX}"


def is_sealed(segment: Path) -> bool:
    return segment.suffix == SEALED_SUFFIX


def is_parquet(path: Path) -> bool:
    """Whether the file begins as a Parquet file does, which is no segment and no text either."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError:
        return False


def is_segment(path: Path) -> bool:
    """Whether the file begins as segments do, whatever it is called.  Raises OSError."""
    with path.open("rb") as file:
        beginning = file.read(sealed.BEGINNING_BYTES)
    return beginning.startswith(FILE_MAGIC) or sealed.is_sealed(beginning)


def segment_paths(folder: Path) -> list[Path]:
    """The folder's segments in the order of their positions, each once.

    Where sealing was interrupted both forms are there; then the plain one counts.
    """
    found: dict[str, Path] = {}
    for path in folder.iterdir():
        if path.suffix == SUFFIX or (is_sealed(path) and path.stem not in found):
            found[path.stem] = path
    return [found[stem] for stem in sorted(found)]


def first_position(segment: Path) -> int:
    """Where the segment begins, by its name; 0 for a name of another kind."""
    return int(segment.stem) if segment.stem.isdecimal() else 0


def behind(paths: Sequence[Path], position: int) -> list[Path]:
    """The segments that hold anything behind that position, or would."""
    ends = [*(first_position(path) for path in paths[1:]), position + 2]
    return [path for path, end in zip(paths, ends, strict=True) if end > position + 1]


# --- Reading ----------------------------------------------------------------------------------


def walk_segments(
    paths: Sequence[Path], *, whole: bool, after: tuple[int, bytes] = (0, CHAIN_START)
) -> Iterator[Found]:
    """Every frame of these segments in order, each checked against the one before.

    `whole` says that they are a log from its beginning, or from behind the position and hash of
    `after`; otherwise the first segment's word is taken for where it stands.
    Raises `StoreDamaged`.
    """
    position, previous = after[0] + 1, after[1]
    for number, listed in enumerate(paths):
        path, content, seal = _read_segment(listed)
        try:
            header = unpack_file_header(content)
            if whole or number:
                _expect(header, position=position, previous=previous)
            if whole and path.name not in (segment_name(position), sealed_name(position)):
                raise Damage(0, f"should be called {segment_name(position)}")
            position, previous = header.first_position, header.previous
            for item in walk(content, last=seal is None and number == len(paths) - 1):
                if isinstance(item, Frame):
                    _expect(item, position=position, previous=previous)
                    position, previous = position + item.count, item.digest
                yield Found(path, item)
            if seal is not None:
                _expect_seal(seal, header, position=position, previous=previous)
        except Damage as damage:
            reason = damage.reason if seal is None else f"unpacked, {damage.reason}"
            raise StoreDamaged(path.name, damage.offset, reason) from damage


def _read_segment(path: Path) -> tuple[Path, bytes, sealed.SealedHeader | None]:
    """Where the segment is now, its plain bytes, and its seal.  Raises `StoreDamaged`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        # It may have been sealed since it was listed.
        path = path.with_suffix(SEALED_SUFFIX)
        data = path.read_bytes()
    if not is_sealed(path):
        return path, data, None
    try:
        seal, content = sealed.unpack(data)
    except Damage as damage:
        raise StoreDamaged(path.name, damage.offset, damage.reason) from damage
    return path, content, seal


def _expect(found: Frame | FileHeader, *, position: int, previous: bytes) -> None:
    """Raises `Damage` when what was found does not follow what came before."""
    offset = found.offset if isinstance(found, Frame) else 0
    if found.first_position != position:
        raise Damage(offset, f"begins at position {found.first_position} instead of {position}")
    if found.previous != previous:
        raise Damage(offset, "names another predecessor than the batch before it")


def _expect_seal(
    seal: sealed.SealedHeader, header: FileHeader, *, position: int, previous: bytes
) -> None:
    """Raises `Damage` when the seal says other things than what it closes."""
    named = (seal.first_position, seal.last_position)
    held = (header.first_position, position - 1)
    if named != held:
        raise Damage(0, f"holds positions {held[0]} to {held[1]}, its seal says {named}")
    if seal.last_frame_digest != previous:
        raise Damage(0, "ends with another batch than its seal says")


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


def refuse_sealed_end(segment: Path, last: int) -> None:
    """Raise `StoreDamaged` for a last segment that is sealed."""
    if is_sealed(segment):
        # Only full segments are sealed, when their successors exist.
        reason = f"the segment that goes on at position {last + 1} is missing"
        raise StoreDamaged(segment.name, segment.stat().st_size, reason)


def _open_now(listed: Path) -> IO[bytes]:
    """The segment's file, which may have been sealed since it was listed."""
    try:
        return listed.open("rb")
    except FileNotFoundError:
        return listed.with_suffix(SEALED_SUFFIX).open("rb")


def begins_the_log(segment: Path) -> bool:
    """Whether the segment's header says that it is a log's first.  Raises `StoreDamaged`."""
    try:
        with _open_now(segment) as file:
            beginning = file.read(max(FILE_HEADER_BYTES, sealed.BEGINNING_BYTES))
            if sealed.is_sealed(beginning):
                file.seek(0)
                seal = sealed.unpack_header(file.read(sealed.header_bytes(beginning)))
                return seal.first_position == 1
        return unpack_file_header(beginning).first_position == 1
    except Damage as damage:
        raise StoreDamaged(segment.name, damage.offset, damage.reason) from damage


# --- Changing ---------------------------------------------------------------------------------


def seal_segment(segment: Path, disk: Disk) -> Path:
    """Write the sealed form of a full plain segment beside it, durably; returns where.

    The segment is checked on the way, and so is what becomes of it, because the caller will
    remove the original.  Raises `StoreDamaged` or OSError.
    """
    content = segment.read_bytes()
    try:
        header = unpack_file_header(content)
        position, previous = header.first_position, header.previous
        for item in walk(content, last=False):
            assert isinstance(item, Frame), "only a last segment is torn"
            _expect(item, position=position, previous=previous)
            position, previous = position + item.count, item.digest
        packed = sealed.pack(
            content,
            first_position=header.first_position,
            last_position=position - 1,
            last_frame_digest=previous,
        )
        _, again = sealed.unpack(packed)
    except Damage as damage:
        raise StoreDamaged(segment.name, damage.offset, damage.reason) from damage
    assert again == content, "a segment's sealed form does not give it back"
    target = segment.with_suffix(SEALED_SUFFIX)
    disk.write_atomically(target, packed)
    return target


def last_digest(segment: Path, *, end: int) -> bytes:
    """The hash of the frame that ends there, of all before it checked.

    Raises `StoreDamaged` or OSError.
    """
    with segment.open("rb") as file:
        content = file.read(end)
    try:
        header = unpack_file_header(content)
        position, previous = header.first_position, header.previous
        for item in walk(content, last=False):
            assert isinstance(item, Frame), "only a last segment is torn"
            _expect(item, position=position, previous=previous)
            position, previous = position + item.count, item.digest
    except Damage as damage:
        raise StoreDamaged(segment.name, damage.offset, damage.reason) from damage
    return previous


def keep_torn_end(segment: Path, offset: int, disk: Disk) -> Path:
    """Cut the torn end off and keep it beside the segment; returns where.  Raises OSError."""
    data = segment.read_bytes()[offset:]
    number = 0
    while (kept := segment.with_name(f"{segment.name}.{offset}.{number}.torn")).exists():
        number += 1
    disk.write_atomically(kept, data)
    with segment.open("r+b") as file:
        os.ftruncate(file.fileno(), offset)
        disk.sync(file.fileno())
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


def write_epoch(folder: Path, epoch: int, disk: Disk) -> None:
    """Durable on return.  Raises OSError."""
    disk.write_atomically(folder / EPOCH_FILE, f"{epoch}\n".encode())
