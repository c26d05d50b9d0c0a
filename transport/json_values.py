"""Events' values to plain JSON and back, guided by the classes' own annotations.

Owns: how a number, a tag, a digest, a choice or a record looks in JSON.
Must not know: lines, headers, files.

Nothing here names an event: a field that is added to one is carried without a change.
Tags and digests are hexadecimal strings, because many JSON readers round large numbers.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import attrs

from lifecycle import events, ids
from lifecycle.events import Event
from transport.codec_values import MalformedRecord

HEXADECIMAL = frozenset({"tag", "tag_expected", "tag_found", "digest"})
"""Fields whose whole numbers are written as 16 hexadecimal digits."""
NUMBER_MAX = (1 << 64) - 1

EVENTS_BY_NAME: dict[str, type[Event]] = {
    event_type.__name__: event_type for event_type in typing.get_args(Event)
}

_HEX = re.compile(r"[0-9a-f]{1,16}")


def to_json(value: object, *, name: str = "") -> Any:
    """A record, or the field `name` of one, as what `json.dumps` takes."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int) and name in HEXADECIMAL:
        return f"{value:016x}"
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    record: Any = type(value)
    if not attrs.has(record):
        return value
    names = [field.name for field in attrs.fields(record)]
    return {part: to_json(getattr(value, part), name=part) for part in names}


@cache
def annotations_of(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record, {**vars(ids), **vars(events)})


def from_json(wanted: Any, raw: Any, *, where: str, strict: bool) -> Any:
    """The value of the wanted type; `strict` refuses fields that the type does not have.

    Raises `MalformedRecord`, whose field is the path from `where` on.
    """
    try:
        return _converter(wanted, where.rpartition(".")[2])(raw)
    except (ValueError, TypeError, KeyError, AttributeError):
        # Slowly, in order to say what is wrong, or to fill in what may be left out.
        return _explained(wanted, raw, where=where, strict=strict)


# --- The usual value --------------------------------------------------------------------------


@cache
def _converter(wanted: Any, name: str) -> Callable[[Any], Any]:
    """What makes a value out of JSON that has every field and no other.

    It accepts nothing that the slow way refuses, and raises any of four errors for the rest.
    """
    origin = typing.get_origin(wanted)
    if attrs.has(wanted):
        return _record_converter(wanted)
    if origin is tuple:
        inner = _converter(typing.get_args(wanted)[0], "")
        return lambda raw: tuple([inner(part) for part in _typed(raw, list)])
    if origin in (types.UnionType, typing.Union):
        (something,) = (part for part in typing.get_args(wanted) if part is not types.NoneType)
        given = _converter(something, name)
        return lambda raw: None if raw is None else given(raw)
    wanted = getattr(wanted, "__supertype__", wanted)
    if wanted is int:
        return _hexadecimal_number if name in HEXADECIMAL else _number
    if wanted is str:
        return _ascii
    if wanted is bytes:
        return bytes.fromhex
    members: dict[Any, Any] = {member.value: member for member in wanted}
    return members.__getitem__


def _record_converter(record: Any) -> Callable[[Any], Any]:
    hints = annotations_of(record)
    parts = [(f.name, _converter(hints[f.name], f.name)) for f in attrs.fields(record)]
    count = len(parts)

    def convert(raw: Any) -> Any:
        if len(_typed(raw, dict)) != count:
            raise ValueError(count)
        return record(*[part(raw[name]) for name, part in parts])

    return convert


def _typed(raw: Any, wanted: type) -> Any:
    if type(raw) is not wanted:
        raise TypeError(wanted)
    return raw


def _number(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= NUMBER_MAX:
        raise ValueError(raw)
    return raw


def _hexadecimal_number(raw: Any) -> int:
    if not _HEX.fullmatch(raw):
        raise ValueError(raw)
    return int(raw, 16)


def _ascii(raw: Any) -> str:
    if type(raw) is not str or not raw.isascii():
        raise ValueError(raw)
    return raw


# --- Any value, and what is wrong with it -----------------------------------------------------


def _explained(wanted: Any, raw: Any, *, where: str, strict: bool) -> Any:
    if attrs.has(wanted):
        return _record(wanted, raw, where=where, strict=strict)
    origin = typing.get_origin(wanted)
    if origin is tuple:
        if not isinstance(raw, list):
            raise MalformedRecord(where, f"is {_kind(raw)} instead of a list")
        (item, _) = typing.get_args(wanted)
        return tuple(
            _explained(item, part, where=f"{where}[{n}]", strict=strict)
            for n, part in enumerate(raw)
        )
    if origin in (types.UnionType, typing.Union):
        # The only choice in an event is between something and nothing.
        (something,) = (part for part in typing.get_args(wanted) if part is not types.NoneType)
        return None if raw is None else _explained(something, raw, where=where, strict=strict)
    return _plain(wanted, raw, where=where)


def _record(wanted: Any, raw: Any, *, where: str, strict: bool) -> Any:
    if not isinstance(raw, dict):
        raise MalformedRecord(where, f"is {_kind(raw)} instead of an object")
    annotations = annotations_of(wanted)
    fields = {field.name: field for field in attrs.fields(wanted)}
    if strict and (extra := raw.keys() - fields.keys()):
        raise MalformedRecord(where, f"has no field {min(extra)!r}")
    values = {}
    for name, field in fields.items():
        path = f"{where}.{name}"
        if name in raw:
            values[name] = _explained(annotations[name], raw[name], where=path, strict=strict)
        elif strict or field.default is attrs.NOTHING:
            raise MalformedRecord(path, "is missing")
    try:
        return wanted(**values)
    except ValueError as error:
        raise MalformedRecord(where, str(error)) from error


def _plain(wanted: Any, raw: Any, *, where: str) -> Any:
    name = where.rpartition(".")[2]
    # An id is a string by another name.
    wanted = getattr(wanted, "__supertype__", wanted)
    if wanted is int:
        if name in HEXADECIMAL:
            return int(_hexadecimal(raw, where=where, pattern=_HEX), 16)
        if type(raw) is not int or not 0 <= raw <= NUMBER_MAX:
            raise MalformedRecord(where, f"is {_kind(raw)} instead of a number of 64 bits")
        return raw
    if not isinstance(raw, str):
        raise MalformedRecord(where, f"is {_kind(raw)} instead of a string")
    if wanted is bytes:
        try:
            return bytes.fromhex(raw)
        except ValueError as error:
            raise MalformedRecord(where, f"{raw[:40]!r} is not hexadecimal") from error
    if wanted is str:
        # JSON can spell half of a surrogate pair, which no other encoding can carry.
        if not raw.isascii() and any("\ud800" <= letter <= "\udfff" for letter in raw):
            raise MalformedRecord(where, "holds half of a surrogate pair")
        return raw
    try:
        return wanted(raw)
    except ValueError as error:
        raise MalformedRecord(where, f"{raw[:40]!r} is no known value") from error


def _hexadecimal(raw: Any, *, where: str, pattern: re.Pattern[str]) -> str:
    if not isinstance(raw, str) or not pattern.fullmatch(raw):
        raise MalformedRecord(where, f"is {_kind(raw)} instead of up to 16 hexadecimal digits")
    return raw


def _kind(raw: Any) -> str:
    """What was found, in JSON's words and short."""
    return {dict: "an object", list: "a list", type(None): "null"}.get(type(raw), repr(raw)[:40])
