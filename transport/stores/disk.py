"""The calls by which a log changes files, each of which a full or failing disk may refuse.

Owns: writing whole or not at all, making content and names durable.
Must not know: what is written.  Fault injection overrides the calls at the top.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

UNFINISHED_SUFFIX = ".new"


class Disk:
    """The operating system's file calls; every method raises OSError."""

    def write_at(self, handle: int, data: bytes | memoryview, *, offset: int) -> int:
        """Write some of the bytes, at least one; returns how many."""
        return os.pwrite(handle, data, offset)

    def sync(self, handle: int) -> None:
        """Make the file's content durable."""
        os.fdatasync(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its name, in place of the file that had it."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove the file; none there is nothing."""
        path.unlink(missing_ok=True)

    def room_bytes(self, folder: Path) -> int:
        """Bytes that are free for this process where the folder lies."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def write_all(self, handle: int, data: bytes, *, offset: int) -> None:
        """Write all the bytes; after an error some of them may stand."""
        written = 0
        while written < len(data):
            rest = memoryview(data)[written:]
            written += self.write_at(handle, rest, offset=offset + written)

    def sync_folder(self, folder: Path) -> None:
        """Make the folder's names durable."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sync(handle)
        finally:
            os.close(handle)

    def write_atomically(self, path: Path, data: bytes) -> None:
        """The file holds the old content or the new, never a part; durable on return."""
        unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        try:
            with unfinished.open("wb") as file:
                self.write_all(file.fileno(), data, offset=0)
                self.sync(file.fileno())
            self.rename(unfinished, path)
        except OSError:
            # On a full disk the part that was written takes room that the log needs.
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        self.sync_folder(path.parent)
