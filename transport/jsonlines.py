"""Logs as JSON Lines, version 1: one object an entry, readable without this project.

Owns: what the header and each line say, and reading one line.
Must not know: which event is legal when; a log that breaks every rule is still readable.
`docs/log-format.md` describes every field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import attrs

from engine.store import Stored
from lifecycle.events import ByEngine, ByScheduler, Entry, Event, Proposer, Rejected
from lifecycle.ids import RequestId
from transport import codec
from transport.codec_values import MalformedRecord, decode_proposer
from transport.json_values import EVENTS_BY_NAME, from_json, to_json
from transport.pb import lifecycle_pb2 as pb

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


def kept_message(position: int, message: pb.Entry, error: codec.CodecError) -> UnknownRecord:
    """An entry that says nothing here: what can be told of it, and its bytes for who can tell more."""
    record: dict[str, Any] = {
        "request": message.request,
        "sequence": message.sequence,
        "attempt": message.attempt,
        "time_ns": message.time_ns,
        "fields": {},
        "bytes": message.SerializeToString().hex(),
    }
    with suppress(MalformedRecord):
        record["proposer"] = _proposer_object(decode_proposer(message.proposer))
    name = f"fields {error.numbers}" if isinstance(error, codec.UnknownEvent) else ""
    return UnknownRecord(0, position, name, str(error), record)
