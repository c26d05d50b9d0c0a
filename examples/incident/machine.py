"""The memory and the allocator of the simulated engine.

Owns: whose bytes lie in every token slot, which is the truth that no log is asked for.
Must not know: requests' lives, or the log.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lifecycle.ids import PageRange

BEFORE = 0
"""Whose bytes lie in memory that nobody has written since the engine began."""


class Memory:
    """One number for each token slot: who wrote it last."""

    def __init__(self, *, pages: int, page_tokens: int) -> None:
        """All slots hold what was there before."""
        self.page_tokens = page_tokens
        self.taint = np.full(pages * page_tokens, BEFORE, dtype=np.int32)

    def write(self, pages: tuple[PageRange, ...], *, start: int, stop: int, who: int) -> None:
        """Tokens `start` to `stop - 1` of these pages get these bytes."""
        for low, high in self._slots(pages, start, stop):
            self.taint[low:high] = who

    def read(self, pages: tuple[PageRange, ...], *, start: int, stop: int) -> set[int]:
        """Whose bytes a reader of these tokens sees."""
        seen: set[int] = set()
        for low, high in self._slots(pages, start, stop):
            part = self.taint[low:high]
            changes = np.flatnonzero(part[1:] != part[:-1]) + 1
            seen.add(int(part[0]))
            seen.update(part[changes].tolist())
        return seen

    def _slots(
        self, pages: tuple[PageRange, ...], start: int, stop: int
    ) -> Iterator[tuple[int, int]]:
        logical = 0
        for run in pages:
            low, high = max(start, logical), min(stop, logical + run.count * self.page_tokens)
            if low < high:
                base = run.first * self.page_tokens - logical
                yield base + low, base + high
            logical += run.count * self.page_tokens


class Pages:
    """A free list of runs: what was given back last is handed out last, or first."""

    def __init__(self, count: int, *, latest_first: bool) -> None:
        """All pages are free."""
        self.count = count
        self.latest_first = latest_first
        self.free = count
        self._runs = [PageRange(0, count)]

    def take(self, count: int) -> tuple[PageRange, ...] | None:
        """So many pages, or None when there are not enough."""
        if count > self.free:
            return None
        self.free -= count
        taken: list[PageRange] = []
        while count:
            run = self._runs.pop(-1 if self.latest_first else 0)
            if run.count > count:
                rest = PageRange(run.first + count, run.count - count)
                self._runs.insert(len(self._runs) if self.latest_first else 0, rest)
                run = PageRange(run.first, count)
            taken.append(run)
            count -= run.count
        return tuple(taken)

    def give(self, pages: tuple[PageRange, ...]) -> None:
        """Back into the list, in the order in which they were taken."""
        self.free += sum(run.count for run in pages)
        back = reversed(pages) if self.latest_first else pages
        for run in back:
            last = self._runs[-1] if self._runs else None
            if last is not None and last.stop == run.first:
                self._runs[-1] = PageRange(last.first, last.count + run.count)
            else:
                self._runs.append(run)
