"""A segment's plain bytes, of which only what is looked at is in memory.

Owns: reading a plain file by the window, and a sealed one by the block.
Must not know: frames.

A file is read and never mapped: a scheduler that starts may cut a torn end off it meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from transport.stores import sealed
from transport.stores.frames import Damage

WINDOW_BYTES = 1 << 18


class FileBytes:
    """An open file; as many bytes as it had when it was given."""

    def __init__(self, file: IO[bytes]) -> None:
        """Read nothing yet; whoever opened the file closes it."""
        self._descriptor = file.fileno()
        self._size = os.fstat(self._descriptor).st_size
        self._low = 0
        self._window = b""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        """Raises OSError."""
        start, stop, _ = part.indices(self._size)
        if start >= stop:
            return b""
        low = self._low
        if start < low or stop > low + len(self._window):
            low = self._low = start
            self._window = self._read(start, max(stop - start, WINDOW_BYTES))
        return self._window[start - low : stop - low]

    def _read(self, start: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)

    def find(self, wanted: bytes, start: int, /) -> int:
        """Where the wanted bytes begin, at this place or behind it; -1 if nowhere."""
        step = WINDOW_BYTES + len(wanted)
        while start < self._size:
            found = self[start : start + step].find(wanted)
            if found >= 0:
                return start + found
            start += step - len(wanted) + 1
        return -1


class SealedBytes:
    """A sealed segment; a block that cannot be unpacked is told once, and holds zeros."""

    def __init__(self, segment: Path, *, damaged: Callable[[Damage], None]) -> None:
        """Reads the header.  Raises `Damage` or OSError."""
        self._segment = segment
        self._damaged = damaged
        with segment.open("rb") as file:
            size = sealed.header_bytes(file.read(sealed.BEGINNING_BYTES))
            file.seek(0)
            self._header = sealed.unpack_header(file.read(size))
        self._number = -1
        self._content = b""

    def __len__(self) -> int:
        return self._header.content_bytes

    def __getitem__(self, part: slice, /) -> bytes:
        """Raises OSError."""
        start, stop, _ = part.indices(len(self))
        size = self._header.block_bytes
        parts = []
        while start < stop:
            number = start // size
            end = min(stop, (number + 1) * size)
            parts.append(self._block(number)[start - number * size : end - number * size])
            start = end
        return b"".join(parts)

    def find(self, wanted: bytes, start: int, /) -> int:
        """Where the wanted bytes begin, at this place or behind it; -1 if nowhere."""
        found = self[start : len(self)].find(wanted)
        return found + start if found >= 0 else -1

    def _block(self, number: int) -> bytes:
        if number != self._number:
            block = self._header.blocks[number]
            with self._segment.open("rb") as file:
                file.seek(block.offset)
                packed = file.read(block.size)
            try:
                self._content = sealed.unpack_block(self._header, number, packed)
            except Damage as damage:
                self._damaged(damage)
                self._content = bytes(self._header.content_of(number))
            self._number = number
        return self._content
