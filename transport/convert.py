"""A log's entries as segment files.

Owns: batches of entries as frames, one segment after another.
Must not know: who reads them; the store opens what is written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lifecycle.events import Entry
from transport import codec
from transport.pb import lifecycle_pb2 as pb
from transport.stores import frames, segment_files

Recorded = Entry | pb.Entry
"""An entry, or the record of one that a later version wrote, which is passed on as it is."""

BATCH_ENTRIES = 512
SEGMENT_BYTES = 64 << 20


class IncompleteLog(ValueError):
    """Something of it is missing, and segments could not say so."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; a log of which something is missing stays as it is")
        self.reason = reason


class GapInLog(IncompleteLog):
    """Positions do not follow one another from 1, so no segments can hold them."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(f"position {found} where {expected} is next")
        self.found = found
        self.expected = expected


class Segments:
    """Writes entries in their order, and closes each segment when it is full."""

    def __init__(self, folder: Path) -> None:
        """Into this folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.head = frames.CHAIN_START
        self.position = 1
        self._first = 1
        self._batch: list[pb.Entry] = []
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, position: int, entry: Recorded) -> None:
        """The next entry.  Raises `GapInLog`."""
        expected = self.position + len(self._batch)
        if position != expected:
            raise GapInLog(position, expected)
        self._batch.append(entry if isinstance(entry, pb.Entry) else codec.encode_entry(entry))
        if len(self._batch) == BATCH_ENTRIES:
            self._frame()

    def close(self) -> None:
        """Write what is left."""
        if self._batch:
            self._frame()
        self._segment()

    def _frame(self) -> None:
        if not self._parts:
            header = frames.pack_file_header(first_position=self.position, previous=self.head)
            self._first = self.position
            self._parts.append(header)
        frame = frames.pack_frame(
            first_position=self.position,
            count=len(self._batch),
            previous=self.head,
            payload=pb.EntryBatch(entries=self._batch).SerializeToString(deterministic=True),
        )
        self.head = frames.chain(frame)
        self.position += len(self._batch)
        self._batch.clear()
        self._parts.append(frame)
        self._size += len(frame)
        if self._size >= SEGMENT_BYTES:
            self._segment()

    def _segment(self) -> None:
        if self._parts:
            path = self.folder / segment_files.segment_name(self._first)
            path.write_bytes(b"".join(self._parts))
            self._parts.clear()
            self._size = 0


def import_entries(entries: Iterable[tuple[int, Recorded]], folder: Path) -> tuple[int, bytes]:
    """How many were written, and the hash with which the chain ends.  Raises `GapInLog`."""
    segments = Segments(folder)
    for position, entry in entries:
        segments.add(position, entry)
    segments.close()
    return segments.position - 1, segments.head
