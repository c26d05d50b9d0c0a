"""Changed logs: what a legal log looks like after one thing in it went wrong.

Owns: dropping, repeating, swapping and inserting entries, and editing one field of one.
Must not know: which rule will refuse the result.

A changed log is renumbered unless it is wanted otherwise, so that what is judged is the change and
not the gap that it left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import attrs

from lifecycle.events import Attached, ByEngine, ByScheduler, Entry, Reserved
from lifecycle.history import History
from lifecycle.ids import FLEET, GrantId, PageRange, Party, RequestId, TokenRange
from lifecycle.state import Phase

Entries = list[tuple[int, Entry]]
HOW = ("drop", "repeat", "swap", "insert", "edit")


def moved(entries: Sequence[tuple[int, Entry]], how: str, at: int, other: int) -> Entries:
    """One entry dropped, one repeated at another place, two swapped, or one put elsewhere.

    An entry that is put elsewhere takes request and attempt of the entry that stands there.
    """
    result = list(entries)
    if how == "drop":
        del result[at]
    elif how == "repeat":
        result.insert(other, result[at])
    elif how == "swap":
        result[at], result[other] = result[other], result[at]
    else:
        there = result[other][1]
        place = Place(Phase.NEW, other, there.request, there.attempt)
        return put(entries, entries[at][1], place)
    return result


def put(entries: Sequence[tuple[int, Entry]], entry: Entry, place: Place) -> Entries:
    """The log with that entry's event once more, at that place."""
    result = list(entries)
    moved_here = attrs.evolve(entry, request=place.request, attempt=place.attempt)
    result.insert(place.index, (place.index + 1, moved_here))
    return result


def renumbered(history: History, entry: Entry) -> Entry:
    """The entry with the number that is next, at a time that is not before the last one's."""
    state = history.state(entry.request)
    fleet = history.fleet.sequence
    sequence = fleet if entry.request == FLEET else state.sequence
    return attrs.evolve(entry, sequence=sequence, time_ns=max(entry.time_ns, history.time_ns))


# --- fields -----------------------------------------------------------------------------------


@attrs.frozen
class Seen:
    """Parties and grants that a log names, so that an edited field names another of them."""

    parties: tuple[Party, ...]
    grants: tuple[GrantId, ...]

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Entry]]) -> Seen:
        """Whoever speaks, and whatever is granted or named."""
        parties: dict[Party, None] = {}
        grants: dict[GrantId, None] = {}
        for _, entry in entries:
            if isinstance(entry.proposer, ByEngine):
                parties[entry.proposer.party] = None
            grant = getattr(entry.event, "grant", None)
            if grant is not None:
                grants[grant] = None
        return cls(tuple(parties), tuple(grants))


def edits(value: Any, seen: Seen) -> Iterator[Any]:
    """Other values that a field could have; some are no values of its type's validators."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (n for n in (value + 1, value - 1, 0, 1, 2 * value + 7) if n != value)
        case str():
            yield value + "x"
        case bytes():
            yield value + b"x"
        case None:
            yield 0
        case Enum():
            yield from (member for member in type(value) if member is not value)
        case Party():
            yield from (party for party in seen.parties if party != value)
            yield attrs.evolve(value, incarnation=value.incarnation + 1)
            yield attrs.evolve(value, rank=value.rank + 1)
        case GrantId():
            yield from (grant for grant in seen.grants if grant != value)
            yield attrs.evolve(value, serial=value.serial + 1_000)
        case ByEngine():
            yield from (ByEngine(party, value.number) for party in edits(value.party, seen))
            yield ByScheduler(1)
        case ByScheduler():
            yield ByScheduler(value.epoch + 1)
            yield from (ByEngine(party, 1) for party in seen.parties)
        case PageRange() | TokenRange():
            yield from _edited_fields(value, seen)
        case tuple():
            yield value[:-1]
            yield (*value, *value[-1:])
            for index, item in enumerate(value):
                for other in edits(item, seen):
                    yield (*value[:index], other, *value[index + 1 :])
        case _ if attrs.has(type(value)):
            yield from _edited_fields(value, seen)


def _edited_fields(value: Any, seen: Seen) -> Iterator[Any]:
    for field in attrs.fields(type(value)):
        for other in edits(getattr(value, field.name), seen):
            try:
                yield attrs.evolve(value, **{field.name: other})
            except (ValueError, TypeError):
                continue


def edited_entries(entry: Entry, seen: Seen) -> Iterator[tuple[str, Entry]]:
    """Every entry that differs in one field of itself or of its event, with the field's name."""
    for name in ("attempt", "proposer", "time_ns"):
        for other in edits(getattr(entry, name), seen):
            try:
                yield name, attrs.evolve(entry, **{name: other})
            except (ValueError, TypeError):
                continue
    for field in attrs.fields(type(entry.event)):
        for other in edits(getattr(entry.event, field.name), seen):
            try:
                event = attrs.evolve(entry.event, **{field.name: other})
            except (ValueError, TypeError):
                continue
            yield f"{type(entry.event).__name__}.{field.name}", attrs.evolve(entry, event=event)


# --- at random --------------------------------------------------------------------------------


def changed(entries: Sequence[tuple[int, Entry]], chance: random.Random) -> Entries:
    """The log with one change, drawn at random: kinds of events are alike, however many there are.

    Raises ValueError when there is no entry.
    """
    if not entries:
        msg = "a log of 0 entries cannot be changed"
        raise ValueError(msg)
    kinds: dict[type[object], list[int]] = {}
    for index, (_, entry) in enumerate(entries):
        kinds.setdefault(type(entry.event), []).append(index)
    how, other = chance.choice(HOW), chance.randrange(len(entries))
    at = chance.choice(kinds[chance.choice(list(kinds))])
    if how != "edit":
        return moved(entries, how, at, other)
    position, entry = entries[at]
    ways = list(edited_entries(entry, Seen.of(entries)))
    result = list(entries)
    if ways:
        # Fields are alike, too, however many other values each of them could have.
        name = chance.choice(sorted({name for name, _ in ways}))
        result[at] = (position, chance.choice([e for n, e in ways if n == name]))
    return result


def edited_base(entries: Sequence[tuple[int, Entry]], chance: random.Random) -> Entries:
    """The log with one field edited in every introduction of an engine, or in one grant.

    What follows rests on these, so that it is what follows that may be refused.
    """
    kind = chance.choice((Attached, Reserved))
    bases = [i for i, (_, entry) in enumerate(entries) if isinstance(entry.event, kind)]
    result = list(entries)
    if bases and kind is Reserved:
        bases = [chance.choice(bases)]
    seen, name = Seen.of(entries), chance.choice([field.name for field in attrs.fields(kind)])
    for at in bases:
        position, entry = entries[at]
        ways = [e for n, e in edited_entries(entry, seen) if n == f"{kind.__name__}.{name}"]
        if ways:
            result[at] = (position, chance.choice(ways))
    return result


@attrs.frozen
class Place:
    """Where an entry of a request could stand: before `index`, in that phase, of that attempt."""

    phase: Phase
    index: int
    request: RequestId
    attempt: int


def places(entries: Sequence[tuple[int, Entry]]) -> Iterator[Place]:
    """Every place in front of an entry of its request, and one for each request at the end."""
    history = History()
    for index, (_, entry) in enumerate(entries):
        if entry.request != FLEET:
            state = history.state(entry.request)
            yield Place(state.phase, index, entry.request, max(1, state.attempt))
        history.apply(entry)
    for request, state in history.requests.items():
        yield Place(state.phase, len(entries), request, max(1, state.attempt))
