"""A log's entries, kept in their order to be read several times.

Owns: which of them are in memory, and the temporary file for the others.
Must not know: what they are read for.

A log comes as a stream, perhaps from standard input, and may be longer than the memory.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from typing import IO, Protocol
from weakref import finalize

from lifecycle.forensics_values import Positioned
from transport.aside import NotPutAside, packed

HELD_MAX = 65_536
"""Entries that stay in memory, about a kilobyte each."""
BATCH = 256


class Entries(Protocol):
    """Entries in their order, as often as wanted: a spool, or a list of a short log."""

    def __len__(self) -> int:
        """How many."""

    def __iter__(self) -> Iterator[Positioned]:
        """All of them."""


class Spool:
    """Append entries, iterate as often as wanted; the file has no name and ends with the process."""

    def __init__(self, *, held: int | None = None) -> None:
        """The first `held` entries stay in memory, `HELD_MAX` if nothing is said."""
        self._most = HELD_MAX if held is None else held
        self._first: list[Positioned] = []
        self._last: list[Positioned] = []
        self._file: IO[bytes] | None = None
        self._places: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def in_memory(self) -> int:
        """How many of them are not in the file."""
        return len(self._first) + len(self._last)

    def append(self, one: Positioned) -> None:
        """Keep the next entry.  Raises `NotPutAside`."""
        self._count += 1
        if len(self._first) < self._most:
            self._first.append(one)
            return
        self._last.append(one)
        if len(self._last) >= BATCH:
            try:
                self._spill()
            except OSError as error:
                raise NotPutAside(error.strerror) from error

    def __iter__(self) -> Iterator[Positioned]:
        """All of them, in their order; several may iterate at once."""
        yield from self._first
        for place in self._places:
            yield from self._batch(place)
        yield from self._last

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this
            finalize(self, self._file.close)
        self._places.append(self._file.seek(0, 2))
        self._file.write(packed(self._last))
        self._file.flush()
        self._last = []

    def _batch(self, place: int) -> list[Positioned]:
        assert self._file is not None, "there are places in it"
        self._file.seek(place)
        # The file is this process's own, and nobody else can open it.
        batch: list[Positioned] = pickle.load(self._file)  # noqa: S301 - written above
        return batch
