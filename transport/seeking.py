"""Beginning a replay in the middle of a log, behind a snapshot that the log itself confirms.

Owns: the comparison of an index with its log, and what is read again for a late entry.
Must not know: the index's tables, and how what was found is worded.

The hash of a batch stands for the whole log before it.  An index counts only where the log still
holds the index's last batch and the snapshot's batch, byte for byte; everything behind the
snapshot is read, compared and judged as in any replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from lifecycle.events import Entry
from lifecycle.history import History
from lifecycle.ids import RequestId
from lifecycle.replay import Replayer
from lifecycle.snapshot import refold
from lifecycle.state import RequestState
from lifecycle.wording import counted
from transport import codec
from transport.aside import DiskAside
from transport.forensics_chain import Place, Survey
from transport.forensics_read import Capture, SegmentCapture, open_capture
from transport.seek_index import SeekIndex, UnusableIndex, index_path
from transport.stores import segment_files
from transport.stores.contents import FileBytes, SealedBytes
from transport.stores.frames import FILE_HEADER_BYTES, Content, Damage, Frame, read_frame, walk
from transport.stores.snapshot_file import segments_and_snapshot

_FRAMES_KEPT = 64


@attrs.frozen
class Skipped:
    """What was not read in this call, and what stands for it."""

    index: str
    last: int
    head: str
    violations: int


@attrs.frozen
class Begun:
    """A replay that has begun: at the log's beginning, or behind a snapshot.

    `refused` says why an index that is there was not used.
    """

    capture: Capture
    replayer: Replayer
    skipped: Skipped | None = None
    refused: str = ""


@contextmanager
def begun(
    log: Path, *, behind: int | None, index: Path | None = None, whole: bool = False
) -> Iterator[Begun]:
    """A replay of this log that knows the state behind the position `behind`, or of all of it.

    Of an index that was named everything that is wrong is raised; one that merely lies beside the
    log is passed over with a reason.  Raises `UnreadableLog` or `UnusableIndex`.
    """
    with ExitStack() as stack:
        refused = ""
        path = index
        if path is None and log.is_dir() and index_path(log).exists():
            path = index_path(log)
        if path is not None and behind is not None and not whole:
            try:
                found = _sought(log, path, behind, stack)
                if found is not None:
                    yield found
                    return
            except UnusableIndex as error:
                if index is not None:
                    raise
                refused = str(error)
        capture = open_capture(log, stack)
        replayer = Replayer(foreign=capture.foreign, snapshot=capture.snapshot, aside=DiskAside())
        yield Begun(capture, replayer, refused=refused)


def _sought(log: Path, path: Path, behind: int, stack: ExitStack) -> Begun | None:
    """None where no snapshot is early enough."""
    opened = indexed(log, path, stack)
    kept = opened.index.before(behind)
    if kept is None:
        return None
    opened.log.confirm(kept.place)
    number = opened.log.number(kept.place.segment)
    survey = Survey(opened.log.paths[number:], after=kept.place)
    capture = SegmentCapture(survey, alone=True, begins=False)
    capture.begin_after(kept.place.last, time_ns=kept.place.time_ns, snapshot=opened.log.snapshot)
    aside = IndexAside(opened, kept.place.last)
    history = refold(kept.snapshot, evaluated=kept.evaluated)
    replayer = Replayer(history=history, aside=aside)
    replayer.over.update(dict(kept.over))
    replayer.position = kept.place.last
    head = kept.place.digest.hex()
    return Begun(capture, replayer, Skipped(str(path), kept.place.last, head, kept.violations))


# --- A log by position ------------------------------------------------------------------------


class PlacedLog:
    """The segments of a folder, and batches out of their middle.

    `opening` is what stands for a beginning that was dropped.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `UnreadableLog` or OSError."""
        self.paths, dropped = segments_and_snapshot(folder)
        self.snapshot = None if dropped is None else dropped.snapshot
        self.opening = {} if dropped is None else dict(dropped.snapshot.entries)
        self._stems = {path.stem: number for number, path in enumerate(self.paths)}
        self._frames: OrderedDict[int, tuple[Entry, ...]] = OrderedDict()

    def number(self, segment: str) -> int:
        """Which segment that is.  Raises `UnusableIndex`."""
        if segment not in self._stems:
            raise UnusableIndex(f"the log has no segment {segment}")
        return self._stems[segment]

    def confirm(self, place: Place) -> None:
        """Raises `UnusableIndex` unless that batch is there, byte for byte."""
        path = self.paths[self.number(place.segment)]
        with _content(path) as content:
            try:
                frame = read_frame(content[place.offset : place.stop], offset=place.offset)
            except Damage as damage:
                raise UnusableIndex(
                    f"{path.name}: byte {place.offset}: {damage.reason}; the index is of another log, "
                    "or the log was changed or cut since"
                ) from damage
        if frame.digest != place.digest or frame.first_position != place.first:
            raise UnusableIndex(
                f"{path.name}: the batch at byte {place.offset} has the hash {frame.digest.hex()}, "
                f"the index knows {place.digest.hex()}: it is of another log"
            )

    def entries(self, positions: Sequence[int], index: SeekIndex) -> Iterator[tuple[int, Entry]]:
        """The entries at these positions.  Raises `UnusableIndex` where there is none."""
        for position in positions:
            known = self.opening.get(position)
            if known is not None:
                yield position, known
                continue
            first, batch = self._batch(position, index)
            yield position, batch[position - first]

    def _batch(self, position: int, index: SeekIndex) -> tuple[int, tuple[Entry, ...]]:
        for first, batch in self._frames.items():
            if first <= position < first + len(batch):
                return first, batch
        place = index.place_before(position)
        number, start = 0, FILE_HEADER_BYTES
        if place is not None:
            number, start = self.number(place.segment), place.stop
        for path in self.paths[number:]:
            with _content(path) as content:
                try:
                    for item in walk(content, last=True, start=start):
                        if isinstance(item, Frame) and position < item.first_position + item.count:
                            return self._decoded(path, item)
                except (Damage, codec.CodecError) as damage:
                    raise UnusableIndex(f"{path.name}: position {position}: {damage}") from damage
            start = FILE_HEADER_BYTES
        raise UnusableIndex(f"the log has no position {position}")

    def _decoded(self, path: Path, frame: Frame) -> tuple[int, tuple[Entry, ...]]:
        messages = codec.batch_from_bytes(frame.payload)
        batch = tuple(codec.decode_entry(message) for message in messages)
        if len(batch) != frame.count:
            raise Damage(
                frame.offset, f"holds {counted(len(batch), 'entry')} instead of {frame.count}"
            )
        self._frames[frame.first_position] = batch
        if len(self._frames) > _FRAMES_KEPT:
            self._frames.popitem(last=False)
        return frame.first_position, batch


@contextmanager
def _content(path: Path) -> Iterator[Content]:
    if not segment_files.is_sealed(path):
        with path.open("rb") as file:
            yield FileBytes(file)
        return

    def refuse(damage: Damage) -> None:
        raise damage

    try:
        yield SealedBytes(path, damaged=refuse)
    except Damage as damage:
        raise UnusableIndex(f"{path.name}: byte {damage.offset}: {damage.reason}") from damage


# --- An index and its log ---------------------------------------------------------------------


@attrs.frozen
class Indexed:
    """An index, and the log that it is of."""

    index: SeekIndex
    log: PlacedLog

    def request(self, name: str, *, to: int | None = None) -> list[tuple[int, Entry]]:
        """A request's entries up to a position, also those that broke a rule.

        Raises `UnusableIndex`.
        """
        positions = [p for p in self.index.positions(name) if to is None or p <= to]
        found = list(self.log.entries(positions, self.index))
        for position, entry in found:
            if entry.request != name:
                raise UnusableIndex(f"position {position} is not of request {name}")
        return found


def indexed(log: Path, path: Path, stack: ExitStack) -> Indexed:
    """An index that is one of this log.  Raises `UnusableIndex`, `UnreadableLog` or OSError."""
    if not log.is_dir():
        raise UnusableIndex(f"{log}: only a folder of segments has an index")
    if not path.exists():
        raise UnusableIndex(f"{path}: there is no such index; `custody log index` makes one")
    index = SeekIndex(path)
    stack.callback(index.close)
    placed = PlacedLog(log)
    # The log may have grown since, but what the index saw must be there to its last batch.
    placed.confirm(index.last)
    return Indexed(index, placed)


def of_request(log: Path, name: str) -> tuple[list[tuple[int, Entry]], int]:
    """A request's entries by the log's index and by what came since; the index's last position.

    Raises `UnusableIndex`, also where what came since is damaged, `UnreadableLog` or OSError.
    """
    with ExitStack() as stack:
        opened = indexed(log, index_path(log), stack)
        last = opened.index.last
        found = opened.request(name)
        number = opened.log.number(last.segment)
        capture = SegmentCapture(
            Survey(opened.log.paths[number:], after=last), alone=True, begins=False
        )
        capture.begin_after(last.last, time_ns=last.time_ns, snapshot=None)
        found += [one for one in capture if one[1].request == name]
        if not capture.whole:
            raise UnusableIndex(f"behind position {last.last} the log is damaged or has gaps")
        return found, last.last


class IndexAside:
    """Requests that were over behind a snapshot: read again when a late entry names one."""

    def __init__(self, indexed: Indexed, position: int) -> None:
        """Of this log up to that position."""
        self._indexed = indexed
        self._position = position
        self._since: DiskAside[RequestState] = DiskAside()

    def put(self, one: RequestState) -> None:
        """Keep this in place of what the log says of it up to the snapshot."""
        self._since.put(one)

    def find(self, request: RequestId) -> RequestState | None:
        """What was put, or what the request's entries up to the snapshot come to."""
        state = self._since.find(request)
        if state is not None:
            return state
        refused = self._indexed.index.refused(request)
        history = History(crossguards=False)
        for position, entry in self._indexed.request(request, to=self._position):
            if position not in refused:
                history.take(entry)
        return history.requests.get(request)

    def names(self) -> Iterator[RequestId]:
        """Every request of the log, those of which the snapshot holds something among them."""
        known = set()
        for name in self._indexed.index.names():
            known.add(name)
            yield name
        yield from (name for name in self._since.names() if name not in known)

    def broke(self, request: RequestId) -> bool:
        """Whether an entry up to the snapshot was its request's first violation."""
        refused = self._indexed.index.refused(request)
        return any(first and position <= self._position for position, first in refused.items())
