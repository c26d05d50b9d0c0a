"""What the scheduler asks of the event log's store, and how a store answers.

Owns: the `EventStore` interface, its values and its errors.
Must not know: files, encodings, or what an event means.

A store is synchronous.  One task appends; other threads may call `flush` and `seal`
meanwhile, and any thread may read.  Positions count all entries from 1 without gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import attrs

from lifecycle.events import Entry
from lifecycle.ids import RequestId
from lifecycle.snapshot import Snapshot


class StoreError(Exception):
    """The store did not do what it was asked."""


class WrongSequence(StoreError):
    """Somebody else has extended this request, or the caller's copy of it is old.

    `expected` is what the caller took for the next sequence number, `found` what it is.
    Nothing was appended.
    """

    def __init__(self, request: RequestId, *, expected: int, found: int) -> None:
        super().__init__(f"the next sequence of {request} is {found}, not {expected}")
        self.request = request
        self.expected = expected
        self.found = found


class MisfiledEntry(StoreError):
    """An entry names another request or sequence than the append that carries it: a bug of ours.

    Nothing was appended.
    """

    def __init__(self, entry: Entry, *, request: RequestId, sequence: int) -> None:
        super().__init__(
            f"an entry of {entry.request} with sequence {entry.sequence} "
            f"cannot stand as {sequence} of {request}"
        )
        self.entry = entry
        self.request = request
        self.sequence = sequence


class UnstorableEntry(StoreError):
    """A value of an entry does not fit the store's schema or limits: a bug of ours.

    Nothing was appended.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the entries cannot be stored: {reason}")
        self.reason = reason


class StoreUnavailable(StoreError):
    """The store cannot be written now; nothing of this call was appended or made durable.

    `lasting`: it takes nothing more until it is reopened, because nobody can tell what it holds.
    """

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(f"the log cannot be written: {reason}")
        self.reason = reason
        self.lasting = lasting


class StoreDamaged(StoreError):
    """The store holds something that was never written so; nothing was guessed or changed."""

    def __init__(self, segment: str, offset: int, reason: str) -> None:
        super().__init__(f"{segment}, byte {offset}: {reason}")
        self.segment = segment
        self.offset = offset
        self.reason = reason


class StoreTooNew(StoreError):
    """The store holds events of a later version, which this one must not write behind."""

    def __init__(self, segment: str, offset: int, reason: str) -> None:
        super().__init__(f"{segment}, byte {offset}: written by a later version: {reason}")
        self.segment = segment
        self.offset = offset
        self.reason = reason


class StoreLocked(StoreError):
    """Another process, or another store of this one, has the log open for writing."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is held by another scheduler")
        self.path = path


class PositionOutOfRange(StoreError):
    """A position before the log's first, or more than one after its last."""

    def __init__(self, position: int, *, first: int, last: int) -> None:
        super().__init__(f"position {position} is outside {first} to {last + 1}")
        self.position = position
        self.first = first
        self.last = last


@attrs.frozen
class Stored:
    """An entry and where it stands in the log."""

    position: int
    entry: Entry


@attrs.frozen
class Append:
    """Entries for one request, whose first must get the sequence `expected_sequence`."""

    request: RequestId
    expected_sequence: int
    entries: tuple[Entry, ...]


class EventStore(Protocol):
    """The log: append, read, tail; nothing is ever changed or removed."""

    @property
    def first_position(self) -> int:
        """The position at which the log begins: 1, until its beginning is dropped."""
        ...

    @property
    def snapshot(self) -> Snapshot | None:
        """What stands for all before the first position; None when nothing was dropped."""
        ...

    @property
    def last_position(self) -> int:
        """The position of the last entry appended; 0 when there is none."""
        ...

    @property
    def durable_position(self) -> int:
        """The last position that a crash of process and machine leaves in place."""
        ...

    @property
    def epoch(self) -> int:
        """The highest epoch ever taken from this store; 0 when none was."""
        ...

    def take_epoch(self) -> int:
        """The next epoch, durable before this returns, so that nobody ever gets it again.

        Raises `StoreUnavailable`.
        """
        ...

    def append(self, request: RequestId, expected_sequence: int, entries: Sequence[Entry]) -> int:
        """Append all or nothing, not yet durable; returns the position of the first.

        Without entries it returns the position that the next entry will have.
        The same entries again, with the sequence that they were appended with, are not appended
        twice: the answer is the position of the first, whether or not it is durable by now.
        Raises `WrongSequence`, `MisfiledEntry`, `UnstorableEntry`, `StoreUnavailable`.
        """
        ...

    def append_batch(self, batch: Sequence[Append]) -> int:
        """Append for several requests, all or nothing, in this order; as `append` otherwise."""
        ...

    def read(self, request: RequestId) -> tuple[Stored, ...]:
        """Every entry of the request in order; empty when the log knows none."""
        ...

    def last_of(self, request: RequestId) -> int:
        """The position of the request's last entry, 0 when the log knows none."""
        ...

    def tail(self, position: int) -> Iterator[Stored]:
        """Entries from this position to the last of the moment of the call; it does not wait.

        One after the last is empty.  Raises `PositionOutOfRange` at the call, and later where the
        next one was dropped or cut off meanwhile: nobody takes a part for all.
        """
        ...

    def flush(self) -> int:
        """Make everything appended before the call durable; returns the durable position.

        Raises `StoreUnavailable`; then nothing counts as durable that did not before.
        """
        ...

    def reopen(self) -> None:
        """Go on behind the last durable entry, after a lasting `StoreUnavailable`.

        Entries after it are gone, and whoever appended them appends them again; a store that
        takes appends keeps all of them.  Raises `StoreUnavailable` or `StoreDamaged`.
        """
        ...

    def room_bytes(self) -> int | None:
        """Free bytes where the log lies, None when that is no limit.  Raises `StoreUnavailable`."""
        ...

    def retain(
        self, *, bytes_max: int | None, before_ns: int | None, keep: Collection[RequestId]
    ) -> int:
        """Drop the log's oldest full parts, those beyond so many bytes or all older than a time.

        A snapshot stands for them before they go.  `keep` names the requests that may still be
        extended; no other one will be that has no entry behind what is dropped.
        Returns how many positions were dropped; called in a worker thread as `seal` is.
        Raises `StoreUnavailable` or `StoreDamaged`.
        """
        ...

    def seal(self) -> int:
        """Put what will not change any more into its smallest form; returns how many parts.

        It may take long, and is called in a worker thread, beside appends, reads and flushes.
        Nothing that was readable is ever unreadable meanwhile or after a failure, and the store
        stays writable.  Raises `StoreUnavailable` or `StoreDamaged`.
        """
        ...

    def close(self) -> None:
        """Flush as far as possible and let go of the store; again is nothing."""
        ...
