"""The token slots of one pool, and the last write of each.

Owns: where tokens lie; a map from slot numbers to a value, kept as runs, so that a grant of a
million tokens is one change and no page number is too large.
Must not know: what a value means.

Slot s of a pool is place s mod n of page s div n, n being the tokens that a page holds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

from lifecycle.ids import PageRange, TokenRange

V = TypeVar("V")


class SlotMap(Generic[V]):
    """Runs of slots with equal values; a slot that nobody assigned has the value None."""

    __slots__ = ("_starts", "_values")

    def __init__(self) -> None:
        """Nothing is assigned."""
        self._starts: list[int] = [0]
        self._values: list[V | None] = [None]

    def assign(self, start: int, stop: int, value: V) -> None:
        """Slots `start` to `stop - 1` have this value from now on."""
        starts, values = self._starts, self._values
        low = bisect_left(starts, start)
        high = bisect_left(starts, stop, low)
        if high < len(starts) and starts[high] == stop:
            starts[low:high] = (start,)
            values[low:high] = (value,)
        else:
            after = values[high - 1]
            starts[low:high] = (start, stop)
            values[low:high] = (value, after)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, V | None]]:
        """First slot, the slot after the last, and value of each run between these slots."""
        starts, values = self._starts, self._values
        index = bisect_right(starts, start) - 1
        while start < stop:
            end = starts[index + 1] if index + 1 < len(starts) else stop
            end = min(end, stop)
            yield start, end, values[index]
            start = end
            index += 1

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._starts)


def slots_of(
    pages: tuple[PageRange, ...], tokens: TokenRange, page_tokens: int, base: int | None = None
) -> list[tuple[int, int, int]]:
    """First slot, slot after the last, and first token of each run that these tokens lie in.

    `pages` hold the tokens from `base` on; without a base they are just the pages of `tokens`,
    whose first token then lies at its own place in the first page.  What the pages cannot hold
    is left out.
    """
    skip = tokens.start % page_tokens if base is None else tokens.start - base
    left, token = tokens.count, tokens.start
    found = []
    for run in pages:
        room = run.count * page_tokens
        if skip >= room:
            skip -= room
            continue
        if left <= 0:
            break
        count = min(left, room - skip)
        start = run.first * page_tokens + skip
        found.append((start, start + count, token))
        token += count
        left -= count
        skip = 0
    return found
