"""The end of a log: the last segment, open for writing.

Owns: the file handle, where the next frame goes, and what the last one's hash was.
Must not know: entries, locks, durable positions.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.store import StoreUnavailable
from transport.stores import frames, segment_files
from transport.stores.disk import Disk


class SegmentWriter:
    """Writes frames one behind another.

    `refusal` says why nothing can be written any more, once that is so.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.refusal: str | None = None
        self.previous = frames.CHAIN_START
        self.end = 0
        self._folder = folder
        self._disk = disk
        self._handle = -1

    def refuse(self) -> None:
        """Raise `StoreUnavailable` if nothing can be written any more."""
        if self.refusal is not None:
            raise StoreUnavailable(self.refusal, lasting=True)

    def resume(self, segment: Path) -> None:
        """Go on at the end of this segment."""
        self._take(os.open(segment, os.O_WRONLY | os.O_CLOEXEC), segment.stat().st_size)

    def go_back(self, segment: Path, *, end: int, previous: bytes) -> None:
        """Cut the segment at the end of its last durable frame, and write there from now on.

        What is written again is no longer what the disk may have lost.  Raises OSError.
        """
        handle = os.open(segment, os.O_WRONLY | os.O_CLOEXEC)
        self._take(handle, end)
        os.ftruncate(handle, end)
        self._disk.sync(handle)
        self.previous, self.refusal = previous, None

    def begin(self, first_position: int) -> Path:
        """Begin the segment that holds this position, and write there from now on.

        After an OSError the writer is where it was.
        """
        path = self._folder / segment_files.segment_name(first_position)
        header = frames.pack_file_header(first_position=first_position, previous=self.previous)
        self._disk.write_atomically(path, header)
        self._take(os.open(path, os.O_WRONLY | os.O_CLOEXEC), len(header))
        return path

    def write(self, frame: bytes) -> None:
        """Write the frame at the end, or nothing.  Raises OSError."""
        try:
            self._disk.write_all(self._handle, frame, offset=self.end)
        except OSError:
            try:
                os.ftruncate(self._handle, self.end)
            except OSError as second:
                # A part of a frame may stand at the end; only opening anew can judge it.
                self.refusal = f"a failed append could not be taken back: {second}"
            raise
        self.end += len(frame)
        self.previous = frames.chain(frame)

    def sync(self) -> None:
        """Make durable what was written to the last segment.

        Raises OSError; then nobody can tell what the disk holds, and all writing ends.
        """
        try:
            self._disk.sync(self._handle)
        except OSError as error:
            self.refusal = f"a flush failed: {error}"
            raise

    def close(self) -> None:
        self._take(-1, self.end)

    def _take(self, handle: int, end: int) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self.end = handle, end
