"""Two logs of the same traffic: where the fleets differ, and where each request first goes apart.

Owns: which fields differ between any two runs and so say nothing, and what a divergence is.
Must not know: files, wording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import zip_longest
from typing import Any

import attrs

from lifecycle.events import Attached, ByEngine, Entry
from lifecycle.forensics_values import Positioned
from lifecycle.ids import FLEET, Party, RequestId

VOLATILE = frozenset(
    {"tag", "digest", "prompt_digest", "first_token_ns", "deadline_ns", "endpoints", "message"}
)
"""Fields that are drawn, keyed or timed anew in every run."""

LEFT, RIGHT = 0, 1
_Waiting = dict[RequestId, deque[Positioned]]


@attrs.frozen
class Divergence:
    """The first place where a request's logs differ; `index` counts its entries from 0.

    `field` is the path of the first unequal field, `event` where the events themselves differ, and
    `end` where one log stops; `left` and `right` are what stands there, empty for nothing.
    """

    request: RequestId
    index: int
    field: str
    left: str
    right: str
    left_position: int
    right_position: int


@attrs.frozen
class Setting:
    """Something of the fleet that differs: an engine's field, or an engine that is in one only."""

    engine: str
    field: str
    left: str
    right: str


@attrs.frozen
class Difference:
    """All of it."""

    settings: tuple[Setting, ...]
    divergences: tuple[Divergence, ...]
    only_left: tuple[RequestId, ...]
    only_right: tuple[RequestId, ...]
    compared: int

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.settings or self.divergences or self.only_left or self.only_right)


def difference(
    left: Iterable[Positioned],
    right: Iterable[Positioned],
    *,
    everything: bool = False,
) -> Difference:
    """Compare two logs request by request; `everything` compares drawn and timed fields too."""
    ignored: frozenset[str] = frozenset() if everything else VOLATILE
    comparison = _Comparison(ignored)
    for mine, its in zip_longest(left, right):
        if mine is not None and its is not None and comparison.together(mine, its):
            continue
        if mine is not None:
            comparison.take(LEFT, mine)
        if its is not None:
            comparison.take(RIGHT, its)
    return comparison.difference()


class _Comparison:
    """Both logs as far as they were read, side by side, so that little of either has to be kept.

    What one log said of a request waits for the other's word.
    """

    def __init__(self, ignored: frozenset[str]) -> None:
        self._ignored = ignored
        self._fleet: tuple[dict[str, Attached], dict[str, Attached]] = ({}, {})
        self._waiting: tuple[_Waiting, _Waiting] = ({}, {})
        self._compared: dict[RequestId, int] = {}
        self._apart: dict[RequestId, Divergence] = {}

    def together(self, mine: Positioned, its: Positioned) -> bool:
        """Compare entries that need not wait, as nearly all of a repeated run; False where they do."""
        request = mine[1].request
        if request != its[1].request or request == FLEET:
            return False
        if request in self._waiting[LEFT] or request in self._waiting[RIGHT]:
            return False
        if request not in self._apart:
            self._pair(mine, its)
        return True

    def take(self, side: int, said: Positioned) -> None:
        """The next entry of one log."""
        entry = said[1]
        request = entry.request
        if request == FLEET:
            if isinstance(entry.event, Attached):
                self._fleet[side].setdefault(entry.event.engine, entry.event)
            return
        if request in self._apart:
            return
        waiting = self._waiting[1 - side].get(request)
        if waiting is None:
            self._waiting[side].setdefault(request, deque()).append(said)
            return
        other = waiting.popleft()
        if not waiting:
            del self._waiting[1 - side][request]
        self._pair(*((said, other) if side == LEFT else (other, said)))

    def _pair(self, mine: Positioned, its: Positioned) -> None:
        request = mine[1].request
        index = self._compared.get(request, 0)
        self._compared[request] = index + 1
        found = _compared(mine, its, index, self._ignored)
        if found is not None:
            self._apart[request] = found
            for waiting in self._waiting:
                waiting.pop(request, None)

    def difference(self) -> Difference:
        """What both logs come to, once each was read to its end."""
        only: tuple[list[RequestId], list[RequestId]] = ([], [])
        for side in (LEFT, RIGHT):
            for request, waiting in self._waiting[side].items():
                index = self._compared.get(request, 0)
                if not index:
                    only[side].append(request)
                    continue
                position, entry = waiting[0]
                kind = type(entry.event).__name__
                ends, places = (kind, ""), (position, 0)
                if side == RIGHT:
                    ends, places = ends[::-1], places[::-1]
                self._apart[request] = Divergence(request, index, "end", *ends, *places)
        return Difference(
            settings=tuple(_settings(*self._fleet, self._ignored)),
            divergences=tuple(
                sorted(self._apart.values(), key=lambda d: (d.left_position, d.request))
            ),
            only_left=tuple(only[LEFT]),
            only_right=tuple(only[RIGHT]),
            compared=len(self._compared),
        )


def _compared(
    left: Positioned, right: Positioned, index: int, ignored: frozenset[str]
) -> Divergence | None:
    mine, its = left[1], right[1]
    alike = mine.attempt == its.attempt and mine.event == its.event
    if alike and _speaker(mine) == _speaker(its):
        return None

    def apart(field: str, one: str, other: str) -> Divergence:
        return Divergence(mine.request, index, field, one, other, left[0], right[0])

    kind = type(mine.event).__name__
    if type(mine.event) is not type(its.event):
        return apart("event", kind, type(its.event).__name__)
    if _speaker(mine) != _speaker(its):
        return apart("proposer", *(str(_speaker(e) or "scheduler") for e in (mine, its)))
    if mine.attempt != its.attempt:
        return apart("attempt", str(mine.attempt), str(its.attempt))
    unequal = first_unequal(mine.event, its.event, ignored)
    if unequal is None:
        return None
    path, one, other = unequal
    return apart(f"{kind}.{path}", _shown(one), _shown(other))


def _speaker(entry: Entry) -> Party | None:
    """Who said it; the number of the proposal says only how much was said before."""
    by = entry.proposer
    return by.party if isinstance(by, ByEngine) else None


def first_unequal(left: Any, right: Any, ignored: frozenset[str]) -> tuple[str, Any, Any] | None:
    """Path and both values of the first field that differs, in the fields' own order."""
    for field in attrs.fields(type(left)):
        name = field.name
        one, other = getattr(left, name), getattr(right, name)
        if name in ignored or one == other:
            continue
        if attrs.has(type(one)) and type(one) is type(other):
            inner = first_unequal(one, other, ignored)
            if inner is None:
                continue
            return f"{name}.{inner[0]}", inner[1], inner[2]
        return name, one, other
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return value.hex() if isinstance(value, bytes) else str(value)


def _settings(
    left: dict[str, Attached], right: dict[str, Attached], ignored: frozenset[str]
) -> Iterator[Setting]:
    for engine in sorted(left.keys() | right.keys()):
        mine, its = left.get(engine), right.get(engine)
        if mine is None or its is None:
            sides = ("" if one is None else "attached" for one in (mine, its))
            yield Setting(engine, "engine", *sides)
            continue
        for field in attrs.fields(Attached):
            one, other = getattr(mine, field.name), getattr(its, field.name)
            if field.name not in ignored and one != other:
                yield Setting(engine, field.name, _shown(one), _shown(other))
