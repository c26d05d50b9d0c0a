"""A log read for an inquiry: as a stream, and as far as anything can be read.

Owns: going on behind damage, and the account of what is missing.
Must not know: what is looked for in the entries.

A missing part is a result here, and no reason to say nothing of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import attrs

from engine.store import Stored, StoreDamaged
from lifecycle.events import Entry
from lifecycle.forensics_values import Missing
from lifecycle.snapshot import Snapshot
from lifecycle.wording import counted
from transport import codec, jsonlines
from transport.codec_values import MalformedRecord
from transport.forensics_chain import REMOVED, Batch, Problem, Survey, Wrong
from transport.jsonlines import UnknownRecord, UnreadableLog
from transport.stores import segment_files
from transport.stores.snapshot_file import segments_and_snapshot

_REASONS_MAX = 1_000


def _ignore(_record: UnknownRecord) -> None:
    """Nobody else wants to know."""


class Capture:
    """One log: iterate it once, then ask what was missing.

    `entries_read`, `missing`, `unknown` and `notes` grow while it is iterated; `whole` is known
    at the end.
    """

    def __init__(self, *, foreign: bool, source: str) -> None:
        """Nothing has been read yet."""
        self.foreign = foreign
        self.source = source
        self.missing: list[Missing] = []
        self.unknown: list[UnknownRecord] = []
        self.notes: list[str] = []
        self.entries_read = 0
        self.missing_ns = 0
        self.unplaced = 0
        """Records that say nothing and are in no gap."""
        self.claims_whole = True
        self.problems: list[Problem] = []
        self.head: bytes | None = None
        self.expected_head: bytes | None = None
        self.snapshot: Snapshot | None = None
        self.passing_over: Callable[[UnknownRecord], object] = _ignore
        """Hears of each record that says nothing, when it is its turn; `unknown` holds only some."""
        self._next = 1
        self._last_ns = 0

    @property
    def next_position(self) -> int:
        """Behind the last position that was accounted for."""
        return self._next

    @property
    def whole(self) -> bool:
        """Whether nothing is missing, by everything that the log says."""
        return self.claims_whole and not self.missing and not self.unknown

    @property
    def intact(self) -> bool:
        """Whether nothing is missing but a beginning that was dropped on purpose."""
        return self.whole or (self.dropped and not self.damaged)

    @property
    def dropped(self) -> bool:
        """Whether a beginning was dropped on purpose, and a snapshot stands for it."""
        return self.snapshot is not None

    @property
    def damaged(self) -> bool:
        """Whether more is wrong than a beginning that was dropped on purpose, behind a snapshot."""
        lacking = len(self.gaps()) > self.dropped
        return bool(self.problems or self.unknown or lacking)

    def gaps(self) -> list[Missing]:
        """Missing positions, and those of records that say nothing, once everything was read."""
        gaps = self.missing + [Missing(p, p, o.reason) for o in self.unknown if (p := o.position)]
        # In our own log the positions around a record say where it was; a foreign one may be of
        # any time, as may what was not even kept.
        if self.unplaced and (self.foreign or len(self.unknown) == _REASONS_MAX):
            gaps.append(Missing(1, None, f"{self.unplaced} records whose place is not known"))
        return gaps

    def opening(self) -> Sequence[tuple[int, Entry]]:
        """What a snapshot kept of a beginning that was dropped; no part of the iteration."""
        return () if self.snapshot is None else self.snapshot.entries

    def __iter__(self) -> Iterator[tuple[int, Entry]]:
        """Positions and entries, in the order in which they stand."""
        for position, entry, _ in self.joined():
            yield position, entry

    def joined(self) -> Iterator[tuple[int, Entry, bool]]:
        """The same, and whether something that no snapshot stands for is missing before the entry."""
        gaps = 0 if self.snapshot is None else len(self.missing)
        for first, entries in self._runs():
            self._place(first, entries[0].time_ns)
            if len(entries) > 1:
                self._next = max(self._next, first + len(entries))
                self._last_ns = max(self._last_ns, *[entry.time_ns for entry in entries])
            known, gaps = gaps, len(self.missing) + len(self.unknown)
            gap = gaps > known
            for position, entry in enumerate(entries, start=first):
                self.entries_read += 1
                yield position, entry, gap
                gap = False

    def _place(self, position: int, time_ns: int) -> None:
        """An entry is here: what lies between it and the one before it is missing."""
        if not self.foreign:
            if position > self._next:
                self._miss(self._next, position - 1, "not in the log", time_ns)
                if len(self.unknown) < _REASONS_MAX:
                    self.unplaced = 0
            if position >= self._next:
                self._next = position + 1
        self._last_ns = max(self._last_ns, time_ns)

    def conclude(self) -> None:
        """Whoever stops before the end asks what can be said of the part that was read."""

    def _runs(self) -> Iterator[tuple[int, Sequence[Entry]]]:
        """Entries of one position after the other, and the first of them; runs of our own log only."""
        for position, entry in self._read():
            yield position, (entry,)

    def _read(self) -> Iterator[tuple[int, Entry]]:
        raise NotImplementedError

    def _miss(self, first: int, last: int, reason: str, until_ns: int) -> None:
        self.missing.append(Missing(first, last, reason))
        if self._last_ns:
            self.missing_ns += max(0, until_ns - self._last_ns)

    def _unreadable(self, record: UnknownRecord) -> None:
        """A record that is there and says nothing; its position is accounted for by `unknown`."""
        self.passing_over(record)
        if len(self.unknown) < _REASONS_MAX:
            self.unknown.append(record)
            self.unplaced += not record.position
        else:
            self.unplaced += 1
        if record.position == self._next:
            self._next += 1


class SegmentCapture(Capture):
    """Segment files."""

    def __init__(self, survey: Survey, *, alone: bool, begins: bool) -> None:
        """`alone`: these are all segments there are; `begins`: the first is a log's first."""
        super().__init__(foreign=False, source=jsonlines.SOURCE)
        self.survey = survey
        self.concluded = False
        self.claims_whole = alone and begins
        self.begins = begins
        if not begins and survey.paths:
            self._next = _first_position(survey.paths[0])
            if self._next > 1:
                self.missing.append(Missing(1, self._next - 1, "before the first segment"))

    def begin_behind(self, snapshot: Snapshot) -> None:
        """What is missing at the beginning was dropped, and this stands for it."""
        kept = f"dropped; {len(snapshot.entries)} of its entries are in a snapshot"
        self.missing = [Missing(1, snapshot.position, kept)]
        self.snapshot = snapshot

    def begin_after(self, position: int, *, time_ns: int, snapshot: Snapshot | None) -> None:
        """What comes before is no gap: it is known from elsewhere, all but what was dropped."""
        self._next = position + 1
        self._last_ns = time_ns
        self.missing = []
        self.claims_whole = True
        if snapshot is not None:
            self.begin_behind(snapshot)

    def _runs(self) -> Iterator[tuple[int, Sequence[Entry]]]:
        for batch in self.survey.batches():
            try:
                # A batch at once: where decoding and judging take turns with every entry, each finds
                # the processor's caches full of the other, which was a twelfth of a replay.
                entries = [codec.decode_entry(message) for message in batch.entries]
            except codec.CodecError:
                yield from self._one_by_one(batch)
            else:
                if entries:
                    yield batch.frame.first_position, entries
        self.conclude()

    def _one_by_one(self, batch: Batch) -> Iterator[tuple[int, Sequence[Entry]]]:
        """A batch in which something says nothing, which is heard of when it is its turn."""
        for position, message in enumerate(batch.entries, start=batch.frame.first_position):
            try:
                yield position, (codec.decode_entry(message),)
            except codec.CodecError as error:
                self._unreadable(jsonlines.kept_message(position, message, error))

    def conclude(self) -> None:
        """Compare the batches that were read with one another; again is nothing."""
        if self.concluded:
            return
        self.concluded = True
        self.survey.judge_chain(whole=self.begins, head=self.expected_head)
        self.head = self.survey.head
        self.problems = self.survey.problems
        for problem in self.problems:
            self.notes.append(
                f"{problem.segment}, byte {problem.offset}: {problem.wrong.value}: {problem.message}"
            )
        if self.problems:
            self.claims_whole = False


class LinesCapture(Capture):
    """JSON Lines."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        """Reads the header.  Raises `UnreadableLog` when there is none."""
        self._lines = enumerate(stream, start=1)
        first = next(((n, text) for n, text in self._lines if text.strip()), None)
        if first is None:
            raise UnreadableLog(1, "the file is empty")
        header = jsonlines.Header.of(first[0], jsonlines.object_of(*first))
        super().__init__(foreign=header.foreign, source=header.source)
        self.claims_whole = header.complete
        self._declared = header.entries
        self._first = 0
        self._seen: Counter[str] = Counter()

    def _read(self) -> Iterator[tuple[int, Entry]]:
        count, time_ns = 0, 0
        for line, text in self._lines:
            if not text.strip():
                continue
            count += 1
            said: dict[str, Any] = {}
            record = said
            try:
                record = said = jsonlines.object_of(line, text)
                if self.foreign:
                    record = jsonlines.supplied(said, count, self._seen)
                one = jsonlines.stored_of(record, strict=not self.foreign)
            except (UnreadableLog, MalformedRecord, jsonlines.UnknownName) as error:
                reason = error.reason if isinstance(error, UnreadableLog) else str(error)
                unknown = jsonlines.kept(line, record, reason)
                # What is kept is what they said, not what was supplied to read it.
                self._unreadable(attrs.evolve(unknown, record=said))
                continue
            self._seen[one.entry.request] += 1
            self._first = self._first or one.position
            self._order(line, one, time_ns)
            time_ns = one.entry.time_ns
            yield one.position, one.entry
        if self._declared is not None and count < self._declared:
            self._miss_end(self._declared, count)
        elif self._declared is not None and count > self._declared:
            self.claims_whole = False
            self.notes.append(
                f"{counted(count, 'entry')} behind a header that counts {self._declared}"
            )

    def _miss_end(self, declared: int, count: int) -> None:
        """Lines that the header counts and no gap between positions stands for are gone at the end."""
        last = self._next - 1
        if self.foreign or not self._first:
            last, lost = count, declared - count
        else:
            lost = min(declared - count, declared - (last - self._first + 1))
        if lost > 0:
            self.missing.append(Missing(last + 1, last + lost, "the header counts them"))

    def _order(self, line: int, one: Stored, time_ns: int) -> None:
        """Lines have no chain; their positions and times are all there is to compare."""
        found = None
        if not self.foreign and one.position < self._next:
            found = Wrong.OUT_OF_ORDER, f"stands behind position {self._next - 1}"
        elif one.entry.time_ns < time_ns:
            found = Wrong.CLOCK, f"is {time_ns - one.entry.time_ns} ns before the line before it"
        if found is not None:
            wrong, reason = found
            place = f"line {line}"
            self.problems.append(Problem(wrong, place, 0, one.position, one.position, reason))
            self.notes.append(f"{place}: {wrong.value}: position {one.position} {reason}")


def _first_position(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 1


def open_capture(path: Path, stack: ExitStack) -> Capture:
    """A folder of segments, one segment, Parquet, or JSON Lines; `stack` closes what is opened.

    Raises `UnreadableLog` when it is no log at all.
    """
    try:
        if path.is_dir():
            paths, kept = segments_and_snapshot(path)
            capture = SegmentCapture(Survey(paths), alone=True, begins=_begins(paths[0]))
            if kept is not None:
                capture.begin_behind(kept.snapshot)
            return capture
        if segment_files.is_segment(path):
            siblings = segment_files.segment_paths(path.parent)
            alone = siblings in ([], [path])
            return SegmentCapture(Survey([path]), alone=alone, begins=_begins(path))
        if segment_files.is_parquet(path):
            # DuckDB is loaded by those who have such a file.
            from transport.parquet_read import open_parquet

            return open_parquet(path, stack)
        return _lines_of(path, stack)
    except FileNotFoundError as error:
        raise UnreadableLog(0, REMOVED if path.exists() else str(error)) from error
    except OSError as error:
        raise UnreadableLog(0, str(error)) from error


def _lines_of(path: Path, stack: ExitStack) -> Capture:
    try:
        return open_lines(stack.enter_context(path.open("rb")))
    except UnreadableLog as error:
        raise UnreadableLog(0, f"{path}: {error}") from error


def open_lines(stream: IO[bytes]) -> Capture:
    """JSON Lines from a stream.  Raises `UnreadableLog`."""
    return LinesCapture(stream)


def _begins(path: Path) -> bool:
    try:
        return segment_files.begins_the_log(path)
    except StoreDamaged:
        # Its own header is damaged; its name is what is left.
        return _first_position(path) == 1


class LiveCapture(Capture):
    """The log of a running scheduler, as far as it has come."""

    def __init__(self, entries: Iterable[Stored]) -> None:
        """What a client reads from the first position on."""
        super().__init__(foreign=False, source=jsonlines.SOURCE)
        self._entries = entries

    @property
    def dropped(self) -> bool:
        """A running scheduler lacks nothing else; the snapshot is in its folder."""
        return any(gap.first == 1 for gap in self.missing)

    def _read(self) -> Iterator[tuple[int, Entry]]:
        for one in self._entries:
            yield one.position, one.entry
