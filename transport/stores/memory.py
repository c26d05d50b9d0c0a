"""The log in memory: for tests, worlds, and whoever wants nothing kept.

Owns: entries of one process's life.
Must not know: files and encodings.

"Durable" here means: survives `survivor`, which stands for a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence

from engine.store import (
    Append,
    EventStore,
    PositionOutOfRange,
    Stored,
    StoreUnavailable,
    WrongSequence,
)
from lifecycle.events import Entry
from lifecycle.ids import RequestId
from lifecycle.snapshot import Snapshot
from transport.stores.sequences import Sequences


class MemoryStore:
    """An `EventStore` that forgets everything with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._sequences = Sequences()
        self._durable = 0
        self._epoch = 0
        self._closed = False

    @property
    def first_position(self) -> int:
        return 1

    @property
    def snapshot(self) -> Snapshot | None:
        return None

    @property
    def last_position(self) -> int:
        return len(self._entries)

    @property
    def durable_position(self) -> int:
        return self._durable

    @property
    def epoch(self) -> int:
        return self._epoch

    def take_epoch(self) -> int:
        with self._lock:
            self._refuse_closed()
            self._epoch += 1
            return self._epoch

    def append(self, request: RequestId, expected_sequence: int, entries: Sequence[Entry]) -> int:
        return self.append_batch([Append(request, expected_sequence, tuple(entries))])

    def append_batch(self, batch: Sequence[Append]) -> int:
        with self._lock:
            self._refuse_closed()
            try:
                entries = self._sequences.check(batch)
            except WrongSequence:
                found = self._sequences.repeated(batch, lambda p: self._entries[p - 1])
                if found is None:
                    raise
                return found
            first = len(self._entries) + 1
            for position, entry in enumerate(entries, start=first):
                self._sequences.note(entry.request, position)
            self._entries += entries
            return first

    def read(self, request: RequestId) -> tuple[Stored, ...]:
        with self._lock:
            positions = self._sequences.positions(request)
            return tuple(Stored(p, self._entries[p - 1]) for p in positions)

    def last_of(self, request: RequestId) -> int:
        return self._sequences.last(request)

    def tail(self, position: int) -> Iterator[Stored]:
        last = len(self._entries)
        if not 1 <= position <= last + 1:
            raise PositionOutOfRange(position, first=1, last=last)
        # Entries below `last` never change, so the iterator needs no lock.
        return (Stored(p, self._entries[p - 1]) for p in range(position, last + 1))

    def flush(self) -> int:
        with self._lock:
            self._refuse_closed()
            self._durable = len(self._entries)
            return self._durable

    def reopen(self) -> None:
        with self._lock:
            self._refuse_closed()

    def room_bytes(self) -> int | None:
        return None

    def retain(
        self,
        *,
        bytes_max: int | None,
        before_ns: int | None,
        keep: Collection[RequestId],
    ) -> int:
        with self._lock:
            self._refuse_closed()
            return 0

    def seal(self) -> int:
        with self._lock:
            self._refuse_closed()
            return 0

    def close(self) -> None:
        with self._lock:
            self._durable = len(self._entries)
            self._closed = True

    def survivor(self) -> MemoryStore:
        """What a crash at this moment would leave: durable entries and every epoch taken."""
        with self._lock:
            found = MemoryStore()
            found._entries = self._entries[: self._durable]
            for position, entry in enumerate(found._entries, start=1):
                found._sequences.note(entry.request, position)
            found._durable = self._durable
            found._epoch = self._epoch
            return found

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable("it is closed")


_: type[EventStore] = MemoryStore
