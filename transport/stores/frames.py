"""The bytes of a segment file: a file header, then frames.

Owns: the layout of both headers, their checks, the hash chain, and where a broken end may be torn.
Must not know: files, locks, indexes.  `docs/log-format.md` describes the bytes for others.

Both headers carry a check sum of their own.  With a check sum over the payload alone, a flipped
bit in a length would make good history look like a write that was cut short.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from typing import Protocol

import attrs

FILE_MAGIC = b"CUSTODYL"
FRAME_MAGIC = b"CLF1"
VERSION = 1
CHAIN_START = bytes(32)
"""The hash that the first frame of a log names as its predecessor's."""

_FILE = struct.Struct("<8sIIQ32sI")
_FRAME = struct.Struct("<4sIQII32sI")
_SUM = struct.Struct("<I")
FILE_HEADER_BYTES = _FILE.size + _SUM.size
FRAME_HEADER_BYTES = _FRAME.size + _SUM.size
PAYLOAD_BYTES_MAX = 64 << 20
"""A frame with a larger payload is refused by the writer, and is damage to the reader."""
SECTOR_BYTES = 512


class Content(Protocol):
    """A segment's plain bytes, of which not all need be in memory; `bytes` are one."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, part: slice, /) -> bytes:
        """These of them."""

    def find(self, wanted: bytes, start: int, /) -> int:
        """Where the wanted bytes begin, at this place or behind it; -1 if nowhere."""


class Damage(Exception):
    """The bytes at this offset of a segment were never written so; the caller names the segment."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


@attrs.frozen
class FileHeader:
    """The first bytes of a segment: where it stands in the log, and in the chain."""

    first_position: int
    previous: bytes


@attrs.frozen
class Frame:
    """One batch: `payload` holds `count` entries, the first at `first_position`."""

    offset: int
    first_position: int
    count: int
    previous: bytes
    payload: bytes
    digest: bytes

    @property
    def stop(self) -> int:
        """The offset after the frame."""
        return self.offset + FRAME_HEADER_BYTES + len(self.payload)


@attrs.frozen
class Torn:
    """From this offset on, the file holds what an interrupted append can leave, and no more."""

    offset: int


def pack_file_header(*, first_position: int, previous: bytes) -> bytes:
    """64 bytes."""
    head = _FILE.pack(FILE_MAGIC, VERSION, FILE_HEADER_BYTES, first_position, previous, 0)
    return head + _SUM.pack(zlib.crc32(head))


def unpack_file_header(data: bytes) -> FileHeader:
    """Raises `Damage`."""
    if len(data) < FILE_HEADER_BYTES:
        raise Damage(0, f"{len(data)} bytes are no file header of {FILE_HEADER_BYTES}")
    head = data[: _FILE.size]
    magic, version, size, first_position, previous, _reserved = _FILE.unpack(head)
    if magic != FILE_MAGIC:
        raise Damage(0, f"starts with {magic!r} instead of {FILE_MAGIC!r}")
    if _SUM.unpack_from(data, _FILE.size)[0] != zlib.crc32(head):
        raise Damage(0, "the file header's check sum does not match")
    if (version, size) != (VERSION, FILE_HEADER_BYTES):
        raise Damage(0, f"version {version} of the segment format is not {VERSION}")
    return FileHeader(first_position, previous)


def pack_frame(*, first_position: int, count: int, previous: bytes, payload: bytes) -> bytes:
    """The whole frame."""
    head = _FRAME.pack(
        FRAME_MAGIC,
        len(payload),
        first_position,
        count,
        zlib.crc32(payload),
        previous,
        0,
    )
    return head + _SUM.pack(zlib.crc32(head)) + payload


def chain(frame: bytes) -> bytes:
    """The hash that the next frame names: of this frame, header and payload."""
    return hashlib.sha256(frame).digest()


def _header_at(data: Content, offset: int) -> tuple[int, int, int, int, bytes] | None:
    """Payload bytes, first position, count, payload check sum and previous hash, if genuine."""
    header = data[offset : offset + FRAME_HEADER_BYTES]
    if len(header) < FRAME_HEADER_BYTES or not header.startswith(FRAME_MAGIC):
        return None
    if _SUM.unpack_from(header, _FRAME.size)[0] != zlib.crc32(header[: _FRAME.size]):
        return None
    _magic, size, first_position, count, checksum, previous, _reserved = _FRAME.unpack_from(header)
    return size, first_position, count, checksum, previous


def read_frame(data: bytes, *, offset: int) -> Frame:
    """The one frame that these bytes are; `offset` is where they stand.  Raises `Damage`."""
    found = _header_at(data, 0)
    if found is None:
        raise Damage(offset, "no frame header whose check sum matches")
    size, first_position, count, checksum, previous = found
    payload = data[FRAME_HEADER_BYTES:]
    if len(payload) != size or zlib.crc32(payload) != checksum:
        raise Damage(offset, "the payload's check sum does not match")
    return Frame(offset, first_position, count, previous, payload, chain(data))


def walk(data: Content, *, last: bool, start: int = FILE_HEADER_BYTES) -> Iterator[Frame | Torn]:
    """The frames of one segment's bytes from an offset on, in order; at most one `Torn`, at the end.

    `last` says whether this is the log's last segment, the only one that may be torn.
    Raises `Damage` at the first byte range that is neither a frame nor a torn end.
    """
    offset, size_all = start, len(data)
    while offset < size_all:
        found = _header_at(data, offset)
        if found is None:
            if last and _is_torn(data, offset):
                yield Torn(offset)
                return
            raise Damage(offset, "no frame header whose check sum matches")
        size, first_position, count, checksum, previous = found
        begin = offset + FRAME_HEADER_BYTES
        frame = data[offset : begin + size]
        payload = frame[FRAME_HEADER_BYTES:]
        if len(payload) < size:
            if last:
                yield Torn(offset)
                return
            raise Damage(offset, f"a payload of {size} bytes is cut after {len(payload)}")
        if zlib.crc32(payload) != checksum:
            if last and _ends_unwritten(data, start=begin, stop=begin + size):
                yield Torn(offset)
                return
            raise Damage(offset, "the payload's check sum does not match")
        yield Frame(offset, first_position, count, previous, payload, chain(frame))
        offset = begin + size


def _is_torn(data: Content, offset: int) -> bool:
    """Whether bytes without a genuine header can be the beginning of one and nothing more.

    A file system may have made the file longer before it wrote the data: then zeros follow.
    """
    written = data[offset : len(data)].rstrip(b"\0")
    if len(written) >= FRAME_HEADER_BYTES:
        return False
    beginning = written[: len(FRAME_MAGIC)]
    return FRAME_MAGIC.startswith(beginning)


def _ends_unwritten(data: Content, *, start: int, stop: int) -> bool:
    """Whether all is zeros from the payload's last sector on, as if it had never been written.

    The file may have been made longer for further frames, of which nothing was written either.
    A payload of the right length with a wrong byte elsewhere was not torn; it was changed.
    """
    sector = max(start, (stop - 1) // SECTOR_BYTES * SECTOR_BYTES)
    return not data[sector : len(data)].strip(b"\0")
