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
from transport.stores import frames, segment_files
from transport.stores.sequences import FrameIndex

_KEPT_FRAMES = 512


class FrameReader:
    """Entries by position; the caller sees to it that one thread at a time calls."""

    def __init__(self) -> None:
        self.index = FrameIndex()
        self.segments: list[Path] = []
        self._kept: OrderedDict[int, tuple[Entry, ...]] = OrderedDict()

    def note(self, first: int, *, offset: int, size: int) -> None:
        """A frame has been found or written behind all others, in the last segment."""
        self.index.note(first, number=len(self.segments) - 1, offset=offset, size=size)

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
        if len(self._kept) > _KEPT_FRAMES:
            self._kept.popitem(last=False)

    def _load(self, index: int) -> tuple[Entry, ...]:
        number, offset, size = self.index.place(index)
        segment = self.segments[number]
        try:
            with segment.open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise StoreUnavailable(str(error)) from error
        try:
            frame = frames.read_frame(data, offset=offset)
            parsed = segment_files.parse_batch(segment, frame)
            return tuple(codec.decode_entry(entry) for entry in parsed)
        except frames.Damage as damage:
            raise StoreDamaged(segment.name, damage.offset, damage.reason) from damage
        except codec.MalformedRecord as error:
            raise StoreDamaged(segment.name, offset, str(error)) from error
        except codec.UnknownEvent as error:
            raise StoreTooNew(segment.name, offset, str(error)) from error
