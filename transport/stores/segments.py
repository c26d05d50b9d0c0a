"""The log in append-only segment files, held by one process at a time.

Owns: appending, flushing, rotation, the lock, the epoch, the index rebuilt at start.
Must not know: what an entry means.

An append writes one frame at once, so that a killed process loses nothing that was appended;
`flush` makes it survive the machine as well.  A failed write is taken back by truncation.
After a failed flush nobody can tell what the disk holds, so the store refuses all further
writes until it is opened anew and has read for itself.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.store import (
    Append,
    EventStore,
    PositionOutOfRange,
    Stored,
    StoreDamaged,
    StoreLocked,
    StoreUnavailable,
    UnstorableEntry,
)
from lifecycle.events import Entry
from lifecycle.ids import RequestId
from transport import codec
from transport.stores import frames, segment_files
from transport.stores.frame_reader import FrameReader
from transport.stores.sequences import Sequences

SEGMENT_BYTES = 64 << 20
"""A segment that has grown to this takes no further frame."""


class SegmentStore:
    """An `EventStore` in a folder of its own.

    Opening raises `StoreLocked`, `StoreDamaged`, `StoreTooNew` or `StoreUnavailable`.
    `torn` names the file that keeps a broken end found at start, if there was one.
    `sync` stands for the operating system's promise and is replaced by fault injection only.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        sync: Callable[[int], None] = os.fdatasync,
    ) -> None:
        self.folder = folder
        self.torn: Path | None = None
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        self._sequences = Sequences()
        self._frames = FrameReader()
        self._last = self._durable = self._epoch = 0
        self._previous = frames.CHAIN_START
        self._end = 0
        self._refusal: str | None = None
        self._writer = -1
        self._lock_handle = self._take_lock()
        try:
            self._open()
        except OSError as error:
            self._let_go()
            raise StoreUnavailable(str(error)) from error
        except BaseException:
            self._let_go()
            raise

    # --- Opening and closing ------------------------------------------------------------------

    def _take_lock(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / segment_files.LOCK_FILE
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnavailable(str(error)) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise StoreLocked(str(self.folder)) from error
        return handle

    def _open(self) -> None:
        self._epoch = segment_files.read_epoch(self.folder)
        for path in self.folder.glob(f"*{segment_files.UNFINISHED_SUFFIX}"):
            path.unlink()
        for found in segment_files.walk_segments(
            segment_files.segment_paths(self.folder), whole=True
        ):
            self._take_in(found)
        # A segment that was just begun holds no frame, so the files are asked once more.
        self._frames.segments = segment_files.segment_paths(self.folder)
        if self._frames.segments:
            self._end = self._frames.segments[-1].stat().st_size
            self._writer = os.open(self._frames.segments[-1], os.O_WRONLY | os.O_CLOEXEC)
        else:
            self._begin_segment()
        # What a killed process wrote may still be on its way to the disk.
        self._sync(self._writer)
        segment_files.sync_folder(self.folder)
        self._durable = self._last

    def _take_in(self, found: segment_files.Found) -> None:
        segment, item = found.segment, found.item
        if isinstance(item, frames.Torn):
            self.torn = segment_files.keep_torn_end(segment, item.offset)
            return
        if not self._frames.segments or self._frames.segments[-1] != segment:
            self._frames.segments.append(segment)
        for entry in segment_files.parse_batch(segment, item):
            segment_files.refuse_unknown(segment, item, entry)
            self._last += 1
            request = RequestId(entry.request)
            if entry.sequence != self._sequences.next_sequence(request):
                reason = f"sequence {entry.sequence} of {request} does not follow"
                raise StoreDamaged(segment.name, item.offset, reason)
            self._sequences.note(request, self._last)
            # Were the epoch's file lost, the log would still know which ids were minted.
            self._epoch = max(self._epoch, entry.proposer.by_scheduler.epoch)
        self._frames.note(item.first_position, offset=item.offset, size=item.stop - item.offset)
        self._previous = item.digest

    def close(self) -> None:
        with self._flushing, self._lock:
            if self._lock_handle < 0:
                return
            if self._refusal is None:
                try:
                    self._sync(self._writer)
                    self._durable = self._last
                except OSError as error:
                    self._refusal = str(error)
            self._refusal = self._refusal or "it is closed"
            self._let_go()

    def _let_go(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
        os.close(self._lock_handle)
        self._lock_handle = -1

    # --- Writing ------------------------------------------------------------------------------

    def append(self, request: RequestId, expected_sequence: int, entries: Sequence[Entry]) -> int:
        return self.append_batch([Append(request, expected_sequence, tuple(entries))])

    def append_batch(self, batch: Sequence[Append]) -> int:
        with self._lock:
            self._refuse_writes()
            entries = self._sequences.check(batch)
            first = self._last + 1
            if not entries:
                return first
            frame = self._pack(entries, first)
            try:
                if self._end >= max(self._segment_bytes, frames.FILE_HEADER_BYTES + 1):
                    self._rotate()
                self._write(frame)
            except OSError as error:
                raise StoreUnavailable(str(error)) from error
            self._frames.note(first, offset=self._end, size=len(frame))
            self._end += len(frame)
            self._previous = frames.chain(frame)
            for position, entry in enumerate(entries, start=first):
                self._sequences.note(entry.request, position)
            self._last += len(entries)
            self._frames.keep_latest(entries)
            return first

    def _pack(self, entries: tuple[Entry, ...], first: int) -> bytes:
        try:
            payload = codec.batch_to_bytes(entries)
        except codec.UnencodableRecord as error:
            raise UnstorableEntry(str(error)) from error
        if len(payload) > frames.PAYLOAD_BYTES_MAX:
            reason = f"{len(payload)} bytes exceed a batch's {frames.PAYLOAD_BYTES_MAX}"
            raise UnstorableEntry(reason)
        return frames.pack_frame(
            first_position=first, count=len(entries), previous=self._previous, payload=payload
        )

    def _write(self, frame: bytes) -> None:
        """Write the frame at the end, or nothing.  Raises OSError."""
        handle, written = self._writer, 0
        try:
            while written < len(frame):
                written += os.pwrite(handle, frame[written:], self._end + written)
        except OSError:
            try:
                os.ftruncate(handle, self._end)
            except OSError as second:
                # A part of a frame may stand at the end; only opening anew can judge it.
                self._refusal = f"a failed append could not be taken back: {second}"
            raise

    def _rotate(self) -> None:
        """Only the last segment may be torn, so the old one is durable before the new exists."""
        try:
            self._sync(self._writer)
        except OSError as error:
            self._refusal = f"a flush failed: {error}"
            raise
        self._durable = self._last
        self._begin_segment()

    def _begin_segment(self) -> None:
        path = self.folder / segment_files.segment_name(self._last + 1)
        header = frames.pack_file_header(first_position=self._last + 1, previous=self._previous)
        segment_files.write_atomically(path, header)
        writer = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        if self._writer >= 0:
            os.close(self._writer)
        self._writer = writer
        self._frames.segments.append(path)
        self._end = len(header)

    def flush(self) -> int:
        with self._flushing:
            with self._lock:
                self._refuse_writes()
                target = self._last
                if target == self._durable:
                    return target
                # A copy, because a rotation meanwhile closes the original.
                handle = os.dup(self._writer)
            try:
                self._sync(handle)
            except OSError as error:
                with self._lock:
                    self._refusal = f"a flush failed: {error}"
                raise StoreUnavailable(str(error)) from error
            finally:
                os.close(handle)
            with self._lock:
                self._durable = max(self._durable, target)
                return self._durable

    def take_epoch(self) -> int:
        with self._lock:
            self._refuse_writes()
            try:
                segment_files.write_epoch(self.folder, self._epoch + 1)
            except OSError as error:
                raise StoreUnavailable(str(error)) from error
            self._epoch += 1
            return self._epoch

    def _refuse_writes(self) -> None:
        if self._refusal is not None:
            raise StoreUnavailable(self._refusal)

    # --- Reading ------------------------------------------------------------------------------

    @property
    def first_position(self) -> int:
        return 1

    @property
    def last_position(self) -> int:
        return self._last

    @property
    def durable_position(self) -> int:
        return self._durable

    @property
    def epoch(self) -> int:
        return self._epoch

    def read(self, request: RequestId) -> tuple[Stored, ...]:
        with self._lock:
            return tuple(self._frames.stored(p) for p in self._sequences.positions(request))

    def tail(self, position: int) -> Iterator[Stored]:
        last = self._last
        if not 1 <= position <= last + 1:
            raise PositionOutOfRange(position, first=1, last=last)
        return self._stored_between(position, last)

    def _stored_between(self, position: int, last: int) -> Iterator[Stored]:
        while position <= last:
            with self._lock:
                first, entries = self._frames.frame_at(position)
            for offset in range(position - first, len(entries)):
                yield Stored(first + offset, entries[offset])
            position = first + len(entries)


_: type[EventStore] = SegmentStore
