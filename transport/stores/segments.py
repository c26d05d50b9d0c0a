"""The log in append-only segment files, held by one process at a time.

Owns: appending, flushing, when to rotate and to seal, the epoch, the index rebuilt at start.
Must not know: what an entry means, how a file is written.

An append writes one frame at once, so that a killed process loses nothing that was appended;
`flush` makes it survive the machine as well.  A failed write is taken back by truncation.
After a failed flush nobody can tell what the disk holds behind the last durable entry, and what
is read back may be memory alone, so the store refuses all further writes until `reopen` has cut
that off; the caller appends it again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from engine.store import (
    Append,
    EventStore,
    PositionOutOfRange,
    Stored,
    StoreDamaged,
    StoreUnavailable,
    UnstorableEntry,
    WrongSequence,
)
from lifecycle.events import Entry
from lifecycle.ids import RequestId
from lifecycle.snapshot import Snapshot, UnfoldableSnapshot
from transport import codec
from transport.stores import frames, segment_files, snapshot_file
from transport.stores.disk import UNFINISHED_SUFFIX, Disk
from transport.stores.folder_lock import take_lock
from transport.stores.frame_reader import FrameReader
from transport.stores.retention import count_to_drop, fold
from transport.stores.segment_writer import SegmentWriter
from transport.stores.sequences import Sequences
from transport.stores.snapshot_file import Kept

SEGMENT_BYTES = 64 << 20
"""A segment that has grown to this takes no further frame."""


class SegmentStore:
    """An `EventStore` in a folder of its own.

    Opening raises `StoreLocked`, `StoreDamaged`, `StoreTooNew` or `StoreUnavailable`.
    `torn` names the file that keeps a broken end found at start, if there was one.
    `disk` stands for the operating system and is replaced by fault injection only.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk | None = None,
    ) -> None:
        self.folder = folder
        self.torn: Path | None = None
        self._segment_bytes = segment_bytes
        self._disk = disk or Disk()
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        self._sealing = threading.Lock()
        self._closing = False
        self._sequences = Sequences()
        self._frames = FrameReader()
        self._beginning: Kept | None = None
        self._kept: dict[int, Entry] = {}
        self._last = self._durable = self._epoch = 0
        self._writer = SegmentWriter(folder, self._disk)
        self._lock_handle = take_lock(folder)
        try:
            self._open()
        except OSError as error:
            self._let_go()
            raise StoreUnavailable(str(error)) from error
        except BaseException:
            self._let_go()
            raise

    # --- Opening and closing ------------------------------------------------------------------

    def _open(self) -> None:
        self._epoch = segment_files.read_epoch(self.folder)
        for path in self.folder.glob(f"*{UNFINISHED_SUFFIX}"):
            self._disk.remove(path)
        self._begin(snapshot_file.newest_snapshot(self.folder))
        after = (self._last, self._writer.previous)
        paths = segment_files.segment_paths(self.folder)
        for found in segment_files.walk_segments(paths, whole=True, after=after):
            self._take_in(found)
        # A segment that was just begun holds no frame, so the files are asked once more.
        self._frames.segments = segment_files.segment_paths(self.folder)
        if self._frames.segments:
            segment_files.refuse_sealed_end(self._frames.segments[-1], self._last)
            self._writer.resume(self._frames.segments[-1])
        else:
            self._frames.segments.append(self._writer.begin(self._last + 1))
        # What a killed process wrote may still be on its way to the disk.
        self._writer.sync()
        self._disk.sync_folder(self.folder)
        self._durable = self._last

    def _begin(self, beginning: Kept | None) -> None:
        """Take in what stands for a dropped beginning, and finish dropping it."""
        if beginning is None:
            return
        self._hold(beginning)
        self._last = beginning.snapshot.position
        self._epoch = max(self._epoch, beginning.epoch)
        self._writer.previous = beginning.previous
        for position, entry in beginning.snapshot.entries:
            if entry.sequence != self._sequences.next_sequence(entry.request):
                name = snapshot_file.snapshot_name(self._last)
                reason = f"sequence {entry.sequence} of {entry.request} does not follow"
                raise StoreDamaged(name, 0, reason)
            self._sequences.note(entry.request, position)
        snapshot_file.remove_before(self.folder, self._last, self._disk)

    def _hold(self, beginning: Kept) -> None:
        self._beginning = beginning
        self._kept = dict(beginning.snapshot.entries)

    def _take_in(self, found: segment_files.Found) -> None:
        segment, item = found.segment, found.item
        if isinstance(item, frames.Torn):
            self.torn = segment_files.keep_torn_end(segment, item.offset, self._disk)
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
        self._writer.previous = item.digest

    def close(self) -> None:
        # A segment that is being sealed is finished first: the next holder must not meet it.
        self._closing = True
        with self._sealing, self._flushing, self._lock:
            if self._lock_handle < 0:
                return
            if self._writer.refusal is None:
                # A failure shows in the durable position; there is no next write to refuse.
                with contextlib.suppress(OSError):
                    self._writer.sync()
                    self._durable = self._last
            self._writer.refusal = self._writer.refusal or "it is closed"
            self._let_go()

    def _let_go(self) -> None:
        self._writer.close()
        os.close(self._lock_handle)
        self._lock_handle = -1

    # --- Writing ------------------------------------------------------------------------------

    def append(self, request: RequestId, expected_sequence: int, entries: Sequence[Entry]) -> int:
        return self.append_batch([Append(request, expected_sequence, tuple(entries))])

    def append_batch(self, batch: Sequence[Append]) -> int:
        with self._lock:
            self._writer.refuse()
            try:
                entries = self._sequences.check(batch)
            except WrongSequence:
                found = self._sequences.repeated(batch, lambda p: self._stored(p).entry)
                if found is None:
                    raise
                return found
            first = self._last + 1
            if not entries:
                return first
            frame = self._pack(entries, first)
            try:
                full = self._writer.end >= max(self._segment_bytes, frames.FILE_HEADER_BYTES + 1)
                # The system tells a lost write once, to whoever syncs first: beside a flush that
                # is told, a rotation would call durable what is not.  The next append comes soon.
                if full and not self._flushing.locked():
                    self._rotate()
                offset = self._writer.end
                self._writer.write(frame)
            except OSError as error:
                lasting = self._writer.refusal is not None
                raise StoreUnavailable(str(error), lasting=lasting) from error
            self._frames.note(first, offset=offset, size=len(frame))
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
        previous = self._writer.previous
        return frames.pack_frame(
            first_position=first, count=len(entries), previous=previous, payload=payload
        )

    def _rotate(self) -> None:
        """Only the last segment may be torn, so the old one is durable before the new exists."""
        self._writer.sync()
        self._durable = self._last
        self._frames.segments.append(self._writer.begin(self._last + 1))

    def flush(self) -> int:
        with self._flushing:
            with self._lock:
                self._writer.refuse()
                target = self._last
                if target == self._durable:
                    return target
            try:
                self._writer.sync()
            except OSError as error:
                raise StoreUnavailable(str(error), lasting=True) from error
            with self._lock:
                self._durable = max(self._durable, target)
                return self._durable

    def reopen(self) -> None:
        with self._flushing, self._lock:
            if self._writer.refusal is None:
                return
            if self._closing:
                self._writer.refuse()
            segment = self._frames.segments[-1]
            end = self._frames.forget_after(self._durable)
            self._sequences.forget_after(self._durable)
            self._last = self._durable
            try:
                previous = segment_files.last_digest(segment, end=end)
                self._writer.go_back(segment, end=end, previous=previous)
            except OSError as error:
                raise StoreUnavailable(str(error), lasting=True) from error

    def room_bytes(self) -> int | None:
        try:
            return self._disk.room_bytes(self.folder)
        except OSError as error:
            raise StoreUnavailable(str(error)) from error

    def seal(self) -> int:
        with self._sealing:
            count = 0
            while (found := self._next_to_seal()) is not None:
                number, plain = found
                try:
                    path = segment_files.seal_segment(plain, self._disk)
                    with self._lock:
                        self._frames.segments[number] = path
                    # Nobody reads it any more, and its successor is durable under its name.
                    self._disk.remove(plain)
                except OSError as error:
                    raise StoreUnavailable(str(error)) from error
                count += 1
            return count

    def retain(
        self, *, bytes_max: int | None, before_ns: int | None, keep: Collection[RequestId]
    ) -> int:
        with self._sealing:
            with self._lock:
                self._writer.refuse()
                segments, first = list(self._frames.segments), self.first_position
            if self._closing:
                return 0
            try:
                count = count_to_drop(
                    [path.stat().st_size for path in segments],
                    lambda number: self._begins_ns(segments[number]),
                    bytes_max=bytes_max,
                    before_ns=before_ns,
                )
                if count:
                    border = segment_files.first_position(segments[count]) - 1
                    self._drop(count, border, keep)
            except OSError as error:
                raise StoreUnavailable(str(error)) from error
            return self.first_position - first

    def _begins_ns(self, segment: Path) -> int | None:
        with self._lock:
            position = segment_files.first_position(segment)
            return self._stored(position).entry.time_ns if position <= self._last else None

    def _drop(self, count: int, border: int, keep: Collection[RequestId]) -> None:
        """Let a snapshot stand for so many segments, which end at the border, and remove them."""

        def is_last(request: RequestId, position: int) -> bool:
            return request not in keep and self.last_of(request) <= position

        entries = self._stored_between(self.first_position, border)
        try:
            snapshot = fold(self.snapshot, entries, border=border, is_last=is_last)
            with self._lock:
                previous = frames.unpack_file_header(self._frames.beginning(count)).previous
        except (UnfoldableSnapshot, frames.Damage) as error:
            raise StoreDamaged(self._frames.segments[0].name, 0, str(error)) from error
        beginning = Kept(snapshot, previous, self._epoch)
        snapshot_file.write_snapshot(self.folder, beginning, self._disk)
        with self._lock:
            self._frames.forget_until(border, count)
            self._sequences.forget_until(border, keep={e.request for _, e in snapshot.entries})
            self._hold(beginning)
        snapshot_file.remove_before(self.folder, border, self._disk)

    def _next_to_seal(self) -> tuple[int, Path] | None:
        """Number and path of the first full segment that is not sealed."""
        with self._lock:
            self._writer.refuse()
            if self._closing:
                return None
            full = enumerate(self._frames.segments[:-1])
            return next((item for item in full if not segment_files.is_sealed(item[1])), None)

    def take_epoch(self) -> int:
        with self._lock:
            self._writer.refuse()
            try:
                segment_files.write_epoch(self.folder, self._epoch + 1, self._disk)
            except OSError as error:
                raise StoreUnavailable(str(error)) from error
            self._epoch += 1
            return self._epoch

    # --- Reading ------------------------------------------------------------------------------

    @property
    def first_position(self) -> int:
        return 1 if self._beginning is None else self._beginning.snapshot.position + 1

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self._beginning is None else self._beginning.snapshot

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
            return tuple(self._stored(p) for p in self._sequences.positions(request))

    def last_of(self, request: RequestId) -> int:
        return self._sequences.last(request)

    def tail(self, position: int) -> Iterator[Stored]:
        first, last = self.first_position, self._last
        if not first <= position <= last + 1:
            raise PositionOutOfRange(position, first=first, last=last)
        return self._stored_between(position, last)

    def _stored(self, position: int) -> Stored:
        kept = self._kept.get(position)
        return self._frames.stored(position) if kept is None else Stored(position, kept)

    def _stored_between(self, position: int, last: int) -> Iterator[Stored]:
        while position <= last:
            with self._lock:
                begins, ends = self.first_position, self._last
                if not begins <= position <= ends:
                    # It was dropped meanwhile, or cut off and will be appended again.
                    raise PositionOutOfRange(position, first=begins, last=ends)
                first, entries = self._frames.frame_at(position)
            for offset in range(position - first, len(entries)):
                yield Stored(first + offset, entries[offset])
            position = first + len(entries)


_: type[EventStore] = SegmentStore
