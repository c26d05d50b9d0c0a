"""Logs as JSON Lines, version 1: one object an entry, readable without this project.

Owns: the header line, the entry lines, and reading any kind of log file.
Must not know: which event is legal when; a log that breaks every rule is still readable.
`docs/log-format.md` describes every field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

from engine.store import Stored, StoreDamaged
from lifecycle.events import ByEngine, ByScheduler, Entry, Event, Proposer, Rejected
from lifecycle.ids import RequestId
from lifecycle.snapshot import Snapshot
from transport import codec
from transport.codec_values import MalformedRecord
from transport.json_values import EVENTS_BY_NAME, from_json, to_json
from transport.pb import lifecycle_pb2 as pb
from transport.stores import frames, segment_files

FORMAT = "custody.log"
VERSION = 1
SOURCE = "custody"


class UnreadableLog(Exception):
    """This is no log that can be read.

    `line` counts from 1; it is 0 when the fault belongs to no line, and then `reason` says where.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}" if line else reason)
        self.line = line
        self.reason = reason


@attrs.frozen
class UnknownRecord:
    """A record whose event cannot be made; kept, so that nobody takes the rest for all.

    `line` is 0 in a segment, `position` None where the record does not say.
    """

    line: int
    position: int | None
    name: str
    reason: str
    record: Mapping[str, Any]


@attrs.frozen
class LogFile:
    """What a file holds.

    `foreign`: another system's log, of which no order, sequence or proof was checked on entry.
    `complete`: this is a whole log from its first position; a replay's verdict needs that.
    `snapshot` stands for a beginning that was dropped.
    """

    entries: tuple[Stored, ...]
    foreign: bool
    complete: bool
    unknown: tuple[UnknownRecord, ...]
    source: str
    snapshot: Snapshot | None = None


# --- Writing ----------------------------------------------------------------------------------


def header_line(
    *,
    complete: bool,
    entries: int,
    first_position: int = 0,
    last_position: int = 0,
    source: str = SOURCE,
    foreign: bool = False,
) -> str:
    """The first line; positions are 0 when there are no entries."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "foreign": foreign,
        "complete": complete,
        "entries": entries,
        "first_position": first_position,
        "last_position": last_position,
    }
    return json.dumps(header, separators=(",", ":")) + "\n"


def entry_line(stored: Stored) -> str:
    """One entry's line."""
    return json.dumps(entry_object(stored), separators=(",", ":")) + "\n"


def entry_object(stored: Stored) -> dict[str, Any]:
    """One entry as a JSON object, which is also how the command line prints it."""
    entry = stored.entry
    return {
        "position": stored.position,
        "request": entry.request,
        "sequence": entry.sequence,
        "attempt": entry.attempt,
        "proposer": _proposer_object(entry.proposer),
        "time_ns": entry.time_ns,
        "event": type(entry.event).__name__,
        "fields": to_json(entry.event),
    }


def _proposer_object(proposer: Proposer) -> dict[str, Any]:
    match proposer:
        case ByScheduler(epoch):
            return {"epoch": epoch}
        case ByEngine(party, number):
            return {**to_json(party), "number": number}


def jsonlines(
    stored: Sequence[Stored], *, complete: bool, source: str = SOURCE, foreign: bool = False
) -> Iterator[str]:
    """Header and entries; `complete` says that these are all entries of the log so far."""
    yield header_line(
        complete=complete,
        entries=len(stored),
        first_position=stored[0].position if stored else 0,
        last_position=stored[-1].position if stored else 0,
        source=source,
        foreign=foreign,
    )
    for one in stored:
        yield entry_line(one)


def write_jsonlines(
    stream: IO[str],
    stored: Sequence[Stored],
    *,
    complete: bool,
    source: str = SOURCE,
    foreign: bool = False,
) -> None:
    """Write a whole file; what came from another system stays marked as foreign."""
    for line in jsonlines(stored, complete=complete, source=source, foreign=foreign):
        stream.write(line)


# --- Reading ----------------------------------------------------------------------------------


def read_jsonlines(source: Path | IO[bytes]) -> LogFile:
    """Read a file or a stream.  Raises `UnreadableLog`."""
    if not isinstance(source, Path):
        return _read(source)
    try:
        with source.open("rb") as stream:
            return _read(stream)
    except OSError as error:
        raise UnreadableLog(0, str(error)) from error


def _read(stream: Iterable[bytes]) -> LogFile:
    lines = _objects(stream)
    first = next(lines, None)
    if first is None:
        raise UnreadableLog(1, "the file is empty")
    header = Header.of(*first)
    entries: list[Stored] = []
    unknown: list[UnknownRecord] = []
    seen: Counter[str] = Counter()
    for line, record in lines:
        given = supplied(record, len(entries) + 1, seen) if header.foreign else record
        try:
            one = stored_of(given, strict=not header.foreign)
            entries.append(one)
            seen[one.entry.request] += 1
        except UnknownName as found:
            unknown.append(kept(line, record, str(found)))
        except MalformedRecord as error:
            if not header.foreign:
                raise UnreadableLog(line, str(error)) from error
            unknown.append(kept(line, record, str(error)))
    count = len(entries) + len(unknown)
    positions = [one.position for one in entries] + [record.position or 0 for record in unknown]
    # A foreign log's positions mean nothing here, so only its own word is left.
    whole = header.foreign or sorted(positions) == list(range(1, count + 1))
    return LogFile(
        entries=tuple(entries),
        foreign=header.foreign,
        complete=header.complete and whole and header.entries in (None, count),
        unknown=tuple(unknown),
        source=header.source,
    )


def _objects(stream: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line that is not blank, with its number."""
    for line, text in enumerate(stream, start=1):
        if not text.strip():
            continue
        yield line, object_of(line, text)


def object_of(line: int, text: bytes) -> dict[str, Any]:
    """What a line says.  Raises `UnreadableLog`."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableLog(line, f"is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnreadableLog(line, "is no JSON object")
    return record


@attrs.frozen
class Header:
    """What the first line says."""

    foreign: bool
    complete: bool
    source: str
    entries: int | None

    @classmethod
    def of(cls, line: int, record: dict[str, Any]) -> Header:
        if record.get("format") != FORMAT:
            raise UnreadableLog(line, f'is no header: "format" is not "{FORMAT}"')
        if type(record.get("version")) is not int or record["version"] != VERSION:
            raise UnreadableLog(line, f"version {record.get('version')!r} is not {VERSION}")
        source, complete = record.get("source", SOURCE), record.get("complete")
        foreign, entries = record.get("foreign", False), record.get("entries")
        if not isinstance(source, str) or not isinstance(foreign, bool):
            raise UnreadableLog(line, 'the header\'s "source" or "foreign" is malformed')
        if not isinstance(complete, bool):
            raise UnreadableLog(line, 'the header does not say whether the log is "complete"')
        if entries is not None and type(entries) is not int:
            raise UnreadableLog(line, 'the header\'s "entries" is no number')
        return cls(foreign or source != SOURCE, complete, source, entries)


class UnknownName(Exception):
    """The event's name is unknown."""


def supplied(record: dict[str, Any], position: int, seen: Counter[str]) -> dict[str, Any]:
    """A foreign line with what it may leave out: nothing of what an event says.

    Numbers count the entries that could be made, so that no gap is of the reader's making.
    """
    request = record.get("request")
    return {
        "position": position,
        "sequence": seen[request] if isinstance(request, str) else 0,
        "attempt": 0 if record.get("event") == Rejected.__name__ else 1,
        "proposer": {"epoch": 1},
        "time_ns": 0,
        **record,
    }


def stored_of(record: Mapping[str, Any], *, strict: bool) -> Stored:
    """Raises `MalformedRecord` or `UnknownName`."""

    def part(name: str, wanted: Any) -> Any:
        if name not in record:
            raise MalformedRecord(name, "is missing")
        return from_json(wanted, record[name], where=name, strict=strict)

    position = part("position", int)
    name = part("event", str)
    event_type = EVENTS_BY_NAME.get(name)
    if event_type is None:
        raise UnknownName(f"no event is called {name!r}")
    if position < 1:
        raise MalformedRecord("position", "is 0, but positions count from 1")
    event: Event = part("fields", event_type)
    entry = Entry(
        request=RequestId(part("request", str)),
        sequence=part("sequence", int),
        attempt=part("attempt", int),
        proposer=_proposer(record.get("proposer"), strict=strict),
        time_ns=part("time_ns", int),
        event=event,
    )
    return Stored(position, entry)


def _proposer(raw: Any, *, strict: bool) -> Proposer:
    if isinstance(raw, dict) and "number" in raw:
        party = {name: value for name, value in raw.items() if name != "number"}
        split = {"party": party, "number": raw["number"]}
        by_engine: ByEngine = from_json(ByEngine, split, where="proposer", strict=strict)
        return by_engine
    by_scheduler: ByScheduler = from_json(ByScheduler, raw, where="proposer", strict=strict)
    return by_scheduler


def kept(line: int, record: Mapping[str, Any], reason: str) -> UnknownRecord:
    position, name = record.get("position"), record.get("event")
    return UnknownRecord(
        line=line,
        position=position if type(position) is int else None,
        name=name if isinstance(name, str) else "",
        reason=reason,
        record=record,
    )


# --- Any kind ---------------------------------------------------------------------------------


def read_log(path: Path) -> LogFile:
    """A folder of segments, one segment, Parquet, or JSON Lines, told apart by what is there.

    Nothing is locked or repaired: a log that is being written is read as far as it is whole.
    Raises `UnreadableLog`.
    """
    try:
        if path.is_dir():
            return _read_folder(path)
        if segment_files.is_segment(path):
            siblings = segment_files.segment_paths(path.parent)
            return _read_segments([path], alone=siblings in ([], [path]))
    except OSError as error:
        raise UnreadableLog(0, str(error)) from error
    if segment_files.is_parquet(path):
        # It is made of what this module reads, and loads its library.
        from transport.parquet_read import read_parquet

        return read_parquet(path)
    return read_jsonlines(path)


def _read_folder(folder: Path) -> LogFile:
    # A snapshot is written as JSON Lines, so its module needs this one.
    from transport.stores.snapshot_file import segments_and_snapshot

    paths, kept = segments_and_snapshot(folder)
    try:
        file = _read_segments(paths, alone=True)
    except FileNotFoundError:
        # A beginning was dropped since they were listed.
        paths, kept = segments_and_snapshot(folder)
        file = _read_segments(paths, alone=True)
    return file if kept is None else attrs.evolve(file, snapshot=kept.snapshot)


def _read_segments(paths: Sequence[Path], *, alone: bool) -> LogFile:
    entries: list[Stored] = []
    unknown: list[UnknownRecord] = []
    # A sealed segment always had a successor.
    complete = alone and not segment_files.is_sealed(paths[-1])
    try:
        whole = segment_files.begins_the_log(paths[0])
        for found in segment_files.walk_segments(paths, whole=whole and len(paths) > 1):
            if isinstance(found.item, frames.Torn):
                complete = False
                continue
            batch = segment_files.parse_batch(found.segment, found.item)
            for position, message in enumerate(batch, start=found.item.first_position):
                try:
                    entries.append(Stored(position, codec.decode_entry(message)))
                except codec.UnknownEvent as error:
                    unknown.append(kept_message(position, message, error))
    except (StoreDamaged, MalformedRecord) as error:
        raise UnreadableLog(0, str(error)) from error
    return LogFile(
        entries=tuple(entries),
        foreign=False,
        complete=complete and whole,
        unknown=tuple(unknown),
        source=SOURCE,
    )


def kept_message(position: int, message: pb.Entry, error: codec.UnknownEvent) -> UnknownRecord:
    record = {
        "request": message.request,
        "sequence": message.sequence,
        "attempt": message.attempt,
        "time_ns": message.time_ns,
        "bytes": message.SerializeToString().hex(),
    }
    return UnknownRecord(0, position, f"fields {error.numbers}", str(error), record)
