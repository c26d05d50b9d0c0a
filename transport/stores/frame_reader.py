"""Frames read back from segment files, the latest of them kept at hand.

Owns: finding, checking and decoding the frame that holds a position.
Must not know: appends, locks, the end of the log.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from engine.store import Stored, StoreDamaged, StoreTooNew, StoreUnavailable
from lifecycle.events import Entry
from transport import codec
from transport.stores import frames, sealed, segment_files
from transport.stores.sequences import FrameIndex

KEPT_ENTRIES = 8192
"""A batch may hold one entry or hundreds, so it is they that are counted."""
_KEPT_BLOCKS = 8


class SealedReader:
    """Plain bytes out of sealed segments, by the block, the latest blocks kept at hand."""

    def __init__(self) -> None:
        self._headers: dict[Path, sealed.SealedHeader] = {}
        self._blocks: OrderedDict[tuple[Path, int], bytes] = OrderedDict()

    def read(self, segment: Path, *, offset: int, size: int) -> bytes:
        """These bytes of the plain segment.  Raises `Damage` or OSError."""
        header = self._header(segment)
        numbers = sealed.blocks_of(header, offset=offset, size=size)
        content = b"".join(self._block(segment, header, number) for number in numbers)
        start = offset - numbers[0] * header.block_bytes
        return content[start : start + size]

    def _header(self, segment: Path) -> sealed.SealedHeader:
        found = self._headers.get(segment)
        if found is None:
            with segment.open("rb") as file:
                size = sealed.header_bytes(file.read(sealed.BEGINNING_BYTES))
                file.seek(0)
                found = self._headers[segment] = sealed.unpack_header(file.read(size))
        return found

    def _block(self, segment: Path, header: sealed.SealedHeader, number: int) -> bytes:
        key = segment, number
        content = self._blocks.get(key)
        if content is not None:
            self._blocks.move_to_end(key)
            return content
        block = header.blocks[number]
        with segment.open("rb") as file:
            file.seek(block.offset)
            packed = file.read(block.size)
        content = self._blocks[key] = sealed.unpack_block(header, number, packed)
        if len(self._blocks) > _KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        return content


class FrameReader:
    """Entries by position; the caller sees to it that one thread at a time calls."""

    def __init__(self) -> None:
        self.index = FrameIndex()
        self.segments: list[Path] = []
        self._kept: OrderedDict[int, tuple[Entry, ...]] = OrderedDict()
        self.in_memory = 0
        """Entries that are kept at hand."""
        self._sealed = SealedReader()
        self._dropped = 0

    def forget_until(self, position: int, segments: int) -> None:
        """Forget so many oldest segments, which end there."""
        self.index.forget_until(position)
        self._kept.clear()
        self.in_memory = 0
        del self.segments[:segments]
        self._dropped += segments

    def beginning(self, number: int) -> bytes:
        """The header of that segment's plain form.  Raises `Damage` or OSError."""
        return self._read(self.segments[number], 0, frames.FILE_HEADER_BYTES)

    def note(self, first: int, *, offset: int, size: int) -> None:
        """A frame has been found or written behind all others, in the last segment."""
        number = self._dropped + len(self.segments) - 1
        self.index.note(first, number=number, offset=offset, size=size)

    def forget_after(self, position: int) -> int:
        """Take back every frame that begins later; where the last segment's frames end then."""
        self.index.forget_after(position)
        for index in [i for i in self._kept if i >= len(self.index)]:
            self.in_memory -= len(self._kept.pop(index))
        if len(self.index):
            number, offset, size = self.index.place(len(self.index) - 1)
            if number == self._dropped + len(self.segments) - 1:
                return offset + size
        return frames.FILE_HEADER_BYTES

    def keep_latest(self, entries: tuple[Entry, ...]) -> None:
        """The entries of the frame noted last, so that whoever follows the log reads no file."""
        self._keep(len(self.index) - 1, entries)

    def frame_at(self, position: int) -> tuple[int, tuple[Entry, ...]]:
        """First position and entries of the frame that holds this existing position.

        Raises `StoreDamaged`, `StoreTooNew` or `StoreUnavailable`.
        """
        index = self.index.find(position)
        entries = self._kept.get(index)
        if entries is None:
            entries = self._load(index)
            self._keep(index, entries)
        else:
            self._kept.move_to_end(index)
        return self.index.first(index), entries

    def stored(self, position: int) -> Stored:
        first, entries = self.frame_at(position)
        return Stored(position, entries[position - first])

    def _keep(self, index: int, entries: tuple[Entry, ...]) -> None:
        self._kept[index] = entries
        self.in_memory += len(entries)
        while self.in_memory > KEPT_ENTRIES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self.in_memory -= len(oldest)

    def _load(self, index: int) -> tuple[Entry, ...]:
        number, offset, size = self.index.place(index)
        segment = self.segments[number - self._dropped]
        try:
            frame = frames.read_frame(self._read(segment, offset, size), offset=offset)
            if frame.first_position != self.index.first(index):
                raise frames.Damage(offset, "holds another batch than when the log was opened")
            parsed = segment_files.parse_batch(segment, frame)
            return tuple(codec.decode_entry(entry) for entry in parsed)
        except OSError as error:
            raise StoreUnavailable(str(error)) from error
        except frames.Damage as damage:
            raise StoreDamaged(segment.name, damage.offset, damage.reason) from damage
        except codec.MalformedRecord as error:
            raise StoreDamaged(segment.name, offset, str(error)) from error
        except codec.UnknownEvent as error:
            raise StoreTooNew(segment.name, offset, str(error)) from error

    def _read(self, segment: Path, offset: int, size: int) -> bytes:
        if segment_files.is_sealed(segment):
            return self._sealed.read(segment, offset=offset, size=size)
        with segment.open("rb") as file:
            file.seek(offset)
            return file.read(size)
