"""The JSON Schema of JSON Lines, made from the events' own annotations.

Owns: how a field's type is said in JSON Schema.
Must not know: reading and writing; `json_values` follows the same annotations.
"""

from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any

import attrs

from lifecycle.events import ByEngine
from lifecycle.ids import Party
from transport.json_values import EVENTS_BY_NAME, HEXADECIMAL, NUMBER_MAX, annotations_of
from transport.jsonlines import FORMAT, VERSION

DRAFT = "https://json-schema.org/draft/2020-12/schema"
NUMBER = {"type": "integer", "minimum": 0, "maximum": NUMBER_MAX}
HEX = {"type": "string", "pattern": "^[0-9a-f]{1,16}$"}


def line_schema() -> dict[str, Any]:
    """The schema of one line of a native log: the header, or an entry."""
    definitions: dict[str, Any] = {}
    events = [_event(name, kind, definitions) for name, kind in EVENTS_BY_NAME.items()]
    return {
        "$schema": DRAFT,
        "title": "A line of a custody log, JSON Lines version 1",
        "description": "Another system's log may leave out what docs/log-format.md names.",
        "oneOf": [{"$ref": "#/$defs/header"}, {"$ref": "#/$defs/entry"}],
        "$defs": {
            "header": _header(),
            "entry": {
                "type": "object",
                "required": [
                    *("position", "request", "sequence", "attempt"),
                    *("proposer", "time_ns", "event", "fields"),
                ],
                "properties": {
                    "position": {**NUMBER, "minimum": 1},
                    "request": {"type": "string"},
                    "sequence": NUMBER,
                    "attempt": NUMBER,
                    "proposer": _proposer(definitions),
                    "time_ns": NUMBER,
                    "event": {"type": "string"},
                    "fields": {"type": "object"},
                },
                # An event of a later version is kept, so its fields are anybody's.
                "allOf": events,
            },
            **definitions,
        },
    }


def _header() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["format", "version", "complete"],
        "properties": {
            "format": {"const": FORMAT},
            "version": {"const": VERSION},
            "source": {"type": "string"},
            "foreign": {"type": "boolean"},
            "complete": {"type": "boolean"},
            "entries": NUMBER,
            "first_position": NUMBER,
            "last_position": NUMBER,
        },
    }


def _proposer(definitions: dict[str, Any]) -> dict[str, Any]:
    party = _record(Party, definitions)
    number = annotations_of(ByEngine)["number"]
    assert number is int
    by_engine = {
        **party,
        "required": [*party["required"], "number"],
        "properties": {**party["properties"], "number": {**NUMBER, "minimum": 1}},
    }
    by_scheduler = {
        "type": "object",
        "required": ["epoch"],
        "properties": {"epoch": {**NUMBER, "minimum": 1}},
        "additionalProperties": False,
    }
    return {"oneOf": [by_engine, by_scheduler]}


def _event(name: str, kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    return {
        "if": {"properties": {"event": {"const": name}}, "required": ["event"]},
        "then": {"properties": {"fields": _record(kind, definitions)}},
    }


def _record(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in attrs.fields(kind)]
    annotations = annotations_of(kind)
    return {
        "type": "object",
        "required": names,
        "properties": {
            name: _value(annotations[name], name=name, definitions=definitions) for name in names
        },
        "additionalProperties": False,
    }


def _value(wanted: Any, *, name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    origin = typing.get_origin(wanted)
    if origin is tuple:
        item = typing.get_args(wanted)[0]
        return {"type": "array", "items": _value(item, name="", definitions=definitions)}
    if origin in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(wanted) if part is not types.NoneType]
        return {"oneOf": [_value(parts[0], name=name, definitions=definitions), {"type": "null"}]}
    if attrs.has(wanted):
        if wanted.__name__ not in definitions:
            # The place is taken first: records could name each other.
            definitions[wanted.__name__] = {}
            definitions[wanted.__name__] = _record(wanted, definitions)
        return {"$ref": f"#/$defs/{wanted.__name__}"}
    wanted = getattr(wanted, "__supertype__", wanted)
    if wanted is int:
        return HEX if name in HEXADECIMAL else NUMBER
    if wanted is bytes:
        return {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return {"enum": [member.value for member in wanted]}
    return {"type": "string"}
