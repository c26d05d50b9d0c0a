"""Names and ranges that events are made of.

Owns: identifiers, parties, grants' names, page and token ranges.
Must not know: what any event means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NewType

import attrs

from lifecycle.wording import counted

RequestId = NewType("RequestId", str)
EngineId = NewType("EngineId", str)

EPOCH_DIGITS = 8
SERIAL_DIGITS = 12


def request_id(*, epoch: int, serial: int) -> RequestId:
    """Mint the name of a request: fixed width, it contains the epoch, and is compared only."""
    return RequestId(f"{epoch:0{EPOCH_DIGITS}x}-{serial:0{SERIAL_DIGITS}x}")


FLEET = request_id(epoch=0, serial=0)
"""The reserved id under which the fleet's own log is kept."""


def natural(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    """Refuse a negative number or a number that is none (validator of events' fields)."""
    if type(value) is not int or value < 0:
        msg = f"{type(instance).__name__}.{attribute.name} must be a whole number >= 0: {value!r}"
        raise ValueError(msg)


def positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    """Refuse a number below one (validator of events' fields)."""
    if type(value) is not int or value < 1:
        msg = f"{type(instance).__name__}.{attribute.name} must be a whole number >= 1: {value!r}"
        raise ValueError(msg)


PAGES_MAX = 1 << 24
"""Pages of a rank's pool; whoever reads a log keeps a bit for each in every account."""

RANKS_MAX = 1 << 12
"""Ranks of an engine."""


def at_most(limit: int) -> Callable[[object, attrs.Attribute[int], int], None]:
    """A validator of events' fields that refuses a number below one or above the limit."""

    def check(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
        positive(instance, attribute, value)
        if value > limit:
            msg = f"{type(instance).__name__}.{attribute.name} is {value}, the limit is {limit}"
            raise ValueError(msg)

    return check


# Parties and grants are looked up far more often than they are made.
@attrs.frozen(order=True, cache_hash=True)
class Party:
    """One rank of one life of one engine: whoever may own pages or write into them."""

    engine: EngineId
    incarnation: int = attrs.field(validator=positive)
    rank: int = attrs.field(validator=natural)

    def __str__(self) -> str:
        return f"{self.engine}/{self.incarnation}/{self.rank}"


@lru_cache(maxsize=4096)
def party_of(engine: EngineId, incarnation: int, rank: int) -> Party:
    """That rank, as the one object of its name: looking it up compares no fields.

    Few parties speak in a log, and each in every second entry.
    """
    return Party(engine, incarnation, rank)


@lru_cache(maxsize=1024)
def ranks_of(engine: EngineId, incarnation: int, ranks: int) -> tuple[Party, ...]:
    """Every rank of one life of an engine; asked for with every admission, so kept."""
    return tuple(party_of(engine, incarnation, rank) for rank in range(ranks))


@attrs.frozen(order=True, cache_hash=True)
class GrantId:
    """The name of a grant: its owner and a serial that only grows."""

    owner: Party
    serial: int = attrs.field(validator=positive)

    def __str__(self) -> str:
        return f"{self.owner}/{self.serial}"


@attrs.frozen(order=True)
class PageRange:
    """Pages `first` to `first + count - 1` of one rank's pool."""

    first: int = attrs.field(validator=natural)
    count: int = attrs.field(validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.first + self.count > PAGES_MAX:
            msg = f"pages {self.first} to {self.first + self.count - 1}: a pool has {PAGES_MAX}"
            raise ValueError(msg)

    @property
    def stop(self) -> int:
        """The page after the last."""
        return self.first + self.count


@attrs.frozen(order=True)
class TokenRange:
    """Tokens `start` to `stop - 1` of a request, counted from its prompt's first token."""

    start: int = attrs.field(validator=natural)
    stop: int = attrs.field(validator=natural)

    def __attrs_post_init__(self) -> None:
        if self.stop < self.start:
            msg = f"a token range may not end before it starts: {self.start} to {self.stop}"
            raise ValueError(msg)

    @property
    def count(self) -> int:
        """How many tokens."""
        return self.stop - self.start


def pages_for(tokens: int, page_tokens: int) -> int:
    """How many whole pages hold that many tokens."""
    return -(-tokens // page_tokens)


def prefill_pages(prompt_tokens: int, page_tokens: int) -> int:
    """Pages that prefill needs: KV of prompt tokens 0 to n-2, and one page at the least."""
    return pages_for(max(1, prompt_tokens - 1), page_tokens)


def count_pages(ranges: Iterable[PageRange]) -> int:
    """How many pages the ranges hold."""
    count = 0
    for r in ranges:
        count += r.count
    return count


def mask_of(ranges: Iterable[PageRange]) -> int:
    """The ranges as a bit mask, page p being bit p."""
    mask = 0
    for r in ranges:
        mask |= ((1 << r.count) - 1) << r.first
    return mask


def slice_pages(ranges: tuple[PageRange, ...], *, start: int, stop: int) -> tuple[PageRange, ...]:
    """The part of a grant's pages with logical numbers `start` to `stop - 1`, as ranges.

    Raises ValueError when the ranges hold fewer than `stop` pages.
    """
    count = count_pages(ranges)
    if stop > count:
        msg = f"logical page {stop - 1} is outside a grant of {counted(count, 'page')}"
        raise ValueError(msg)
    if start <= 0 and stop == count:
        return ranges
    out: list[PageRange] = []
    logical = 0
    for r in ranges:
        low = max(start, logical)
        high = min(stop, logical + r.count)
        if low < high:
            out.append(PageRange(r.first + low - logical, high - low))
        logical += r.count
    return tuple(out)
