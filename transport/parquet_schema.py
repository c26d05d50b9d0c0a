"""A log as a table, version 1: its columns, and entries to rows and back without loss.

Owns: the columns and their types, which follow the events' own annotations.
Must not know: files, queries, or which event is legal when.

One row is one record, in the log's order.  Each event has a column of its own, a struct with the
event's fields, which is null in the rows of other events; so every field has its own type, and a
query that needs three of them reads three.  `docs/forensics.md` describes every column.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any

import attrs

from lifecycle.events import ByEngine, ByScheduler, Entry, Event, Proposer
from lifecycle.ids import EngineId, RequestId, party_of
from transport.codec_values import MalformedRecord
from transport.json_values import EVENTS_BY_NAME, annotations_of

FORMAT = "custody.log"
VERSION = 1

ENTRY, KEPT, UNKNOWN, ACCOUNT = "entry", "kept", "unknown", "account"
"""What a row is: an entry, an entry that a snapshot kept of a dropped beginning, a record that could
not be understood, or the last row, which says what is missing from all of them."""

PROPOSER = {
    "epoch": "UBIGINT",
    "engine": "VARCHAR",
    "incarnation": "UBIGINT",
    "rank": "UBIGINT",
    "number": "UBIGINT",
}
HEAD_COLUMNS = {
    "record": "VARCHAR",
    "position": "UBIGINT",
    "request": "VARCHAR",
    "sequence": "UBIGINT",
    "attempt": "UBIGINT",
    "time_ns": "UBIGINT",
    "event": "VARCHAR",
}
TAIL_COLUMNS = {"line": "UBIGINT", "reason": "VARCHAR", "document": "VARCHAR"}
"""Of a record that could not be understood, and of the account."""


def column_of(event: str) -> str:
    """The column that holds the fields of an event of this name."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", event).lower()


EVENT_COLUMNS = {name: column_of(name) for name in EVENTS_BY_NAME}


def columns() -> dict[str, str]:
    """Every column and its type, in order, in DuckDB's words."""
    events = {EVENT_COLUMNS[name]: type_of(event) for name, event in EVENTS_BY_NAME.items()}
    return {**HEAD_COLUMNS, "proposer": _struct(PROPOSER), **events, **TAIL_COLUMNS}


def _struct(fields: Mapping[str, str]) -> str:
    inside = ", ".join([f'"{name}" {kind}' for name, kind in fields.items()])
    return f"STRUCT({inside})"


def type_of(wanted: Any) -> str:
    """The column type of a field of this annotation."""
    origin = typing.get_origin(wanted)
    if attrs.has(wanted):
        hints = annotations_of(wanted)
        return _struct({field.name: type_of(hints[field.name]) for field in attrs.fields(wanted)})
    if origin is tuple:
        return f"{type_of(typing.get_args(wanted)[0])}[]"
    if origin in (types.UnionType, typing.Union):
        return type_of(_something(wanted))
    wanted = getattr(wanted, "__supertype__", wanted)
    return {int: "UBIGINT", bytes: "BLOB"}.get(wanted, "VARCHAR")


def _something(wanted: Any) -> Any:
    """The type of an optional field where it is given."""
    (given,) = (part for part in typing.get_args(wanted) if part is not types.NoneType)
    return given


# --- Entries to rows --------------------------------------------------------------------------


def row_of(position: int, entry: Entry, *, record: str = ENTRY) -> dict[str, Any]:
    """An entry as JSON that DuckDB reads into these columns; what is null is left out."""
    name = type(entry.event).__name__
    return {
        "record": record,
        "position": position,
        "request": entry.request,
        "sequence": entry.sequence,
        "attempt": entry.attempt,
        "time_ns": entry.time_ns,
        "event": name,
        "proposer": _proposer_value(entry.proposer),
        EVENT_COLUMNS[name]: _value(entry.event),
    }


def _proposer_value(proposer: Proposer) -> dict[str, Any]:
    match proposer:
        case ByScheduler(epoch):
            return {"epoch": epoch}
        case ByEngine(party, number):
            return {
                "engine": party.engine,
                "incarnation": party.incarnation,
                "rank": party.rank,
                "number": number,
            }


def _value(value: Any) -> Any:
    kind: Any = type(value)
    if kind is int or kind is str or value is None:
        return value
    if kind is tuple:
        return [_value(part) for part in value]
    if kind is bytes:
        # DuckDB's own spelling of bytes as text.
        return "".join([f"\\x{byte:02X}" for byte in value])
    if isinstance(value, Enum):
        return value.value
    return {name: _value(getattr(value, name)) for name in _names(kind)}


@cache
def _names(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(record))


# --- Rows to entries --------------------------------------------------------------------------


@cache
def event_maker(name: str) -> Callable[[Any], Event]:
    """What makes the event of this name from its column's value."""
    event_type: Any = EVENTS_BY_NAME[name]
    maker: Callable[[Any], Event] = _maker(event_type)
    return maker


def entry_of(
    head: tuple[str, int, int, int], proposer: Mapping[str, Any], name: str, fields: Any
) -> Entry:
    """The entry of a row; `head` is request, sequence, attempt, time.  Raises `MalformedRecord`."""
    request, sequence, attempt, time_ns = head
    try:
        event = event_maker(name)(fields)
        by = _proposer_of(proposer)
        return Entry(RequestId(request), sequence, attempt, by, time_ns, event)
    except (ValueError, TypeError, KeyError) as error:
        raise MalformedRecord(name, str(error)) from error


def _proposer_of(value: Mapping[str, Any]) -> Proposer:
    if value["epoch"] is not None:
        return ByScheduler(value["epoch"])
    party = party_of(EngineId(value["engine"]), value["incarnation"], value["rank"])
    return ByEngine(party, value["number"])


@cache
def _maker(wanted: Any) -> Callable[[Any], Any]:
    origin = typing.get_origin(wanted)
    if attrs.has(wanted):
        return _record_maker(wanted)
    if origin is tuple:
        inner = _maker(typing.get_args(wanted)[0])
        return lambda value: tuple([inner(part) for part in value])
    if origin in (types.UnionType, typing.Union):
        given = _maker(_something(wanted))
        return lambda value: None if value is None else given(value)
    wanted = getattr(wanted, "__supertype__", wanted)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        members: dict[Any, Any] = {member.value: member for member in wanted}
        return members.__getitem__
    return lambda value: value


def _record_maker(record: Any) -> Callable[[Any], Any]:
    hints = annotations_of(record)
    # What is null and may be left out was no field yet when the row was written.
    parts = [
        (field.name, _maker(hints[field.name]), field.default is not attrs.NOTHING)
        for field in attrs.fields(record)
    ]

    def make(value: Any) -> Any:
        given = {}
        for name, part, optional in parts:
            found = value.get(name)
            if found is not None:
                given[name] = part(found)
            elif not optional:
                raise ValueError(f"{record.__name__}.{name} is missing")
        return record(**given)

    return make
