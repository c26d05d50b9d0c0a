"""Which pages are free, as runs, and which leave circulation.

It owns page numbers only: it must not know memory, requests, tags or tensors.
Everything is deterministic, so that the scheduler's mirror and the engine's own list agree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

PageRun = tuple[int, int]
"""(first page, number of pages)."""

AllocatorKey = tuple[int, tuple[PageRun, ...], tuple[PageRun, ...]]


class AllocatorError(ValueError):
    """A range cannot be moved as asked; nothing has changed. Its caller has lost count."""

    def __init__(self, run: PageRun, reason: str) -> None:
        super().__init__(f"pages {run[0]} to {run[0] + run[1] - 1}: {reason}")
        self.run = run


class ForeignPagesError(AllocatorError):
    """A range is empty or reaches outside the pool."""

    def __init__(self, run: PageRun, *, capacity: int) -> None:
        super().__init__(run, f"not a range of a pool of {capacity} pages")
        self.capacity = capacity


class NotHeldError(AllocatorError):
    """A range holds a page that is free already (a double free) or named twice."""

    def __init__(self, run: PageRun, *, page: int) -> None:
        super().__init__(run, f"page {page} is not held")
        self.page = page


class WithdrawnPagesError(AllocatorError):
    """A range holds a page that was withdrawn; it comes back by `readmit` only."""

    def __init__(self, run: PageRun, *, page: int) -> None:
        super().__init__(run, f"page {page} is withdrawn from circulation")
        self.page = page


class NotWithdrawnError(AllocatorError):
    """A range to readmit holds a page that was not withdrawn."""

    def __init__(self, run: PageRun, *, page: int) -> None:
        super().__init__(run, f"page {page} is not withdrawn")
        self.page = page


class _Runs:
    """A set of pages as sorted, maximal, disjoint runs."""

    __slots__ = ("counts", "starts")

    def __init__(self, starts: list[int], counts: list[int]) -> None:
        self.starts = starts
        self.counts = counts

    def first_within(self, start: int, count: int) -> int | None:
        """The lowest member of the set in the range, or None."""
        index = bisect_right(self.starts, start) - 1
        if index >= 0 and self.starts[index] + self.counts[index] > start:
            return start
        index += 1
        if index < len(self.starts) and self.starts[index] < start + count:
            return self.starts[index]
        return None

    def first_missing(self, start: int, count: int) -> int | None:
        """The lowest page of the range that is not in the set, or None."""
        index = bisect_right(self.starts, start) - 1
        if index < 0 or self.starts[index] + self.counts[index] <= start:
            return start
        end = self.starts[index] + self.counts[index]
        return None if end >= start + count else end

    def add(self, start: int, count: int) -> None:
        index = bisect_left(self.starts, start)
        if index < len(self.starts) and self.starts[index] == start + count:
            count += self.counts[index]
            del self.starts[index], self.counts[index]
        if index > 0 and self.starts[index - 1] + self.counts[index - 1] == start:
            self.counts[index - 1] += count
        else:
            self.starts.insert(index, start)
            self.counts.insert(index, count)

    def remove(self, start: int, count: int) -> None:
        index = bisect_right(self.starts, start) - 1
        first, size = self.starts[index], self.counts[index]
        del self.starts[index], self.counts[index]
        if first + size > start + count:
            self.starts.insert(index, start + count)
            self.counts.insert(index, first + size - start - count)
        if start > first:
            self.starts.insert(index, first)
            self.counts.insert(index, start - first)

    def runs(self) -> tuple[PageRun, ...]:
        return tuple(zip(self.starts, self.counts, strict=True))

    def copy(self) -> _Runs:
        return _Runs(list(self.starts), list(self.counts))


class PageAllocator:
    """Free pages of one pool.

    A page is free, held, or withdrawn. `take` and `take_adjacent` make free pages held,
    `give_back` makes held pages free, `withdraw` takes held pages out of circulation, and
    `readmit` makes withdrawn pages free once a proof is there.
    Calls that raise change nothing.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ForeignPagesError((0, capacity), capacity=capacity)
        self._capacity = capacity
        self._free = _Runs([0], [capacity])
        self._withdrawn = _Runs([], [])
        self._free_count = capacity
        self._withdrawn_count = 0

    @property
    def capacity(self) -> int:
        """All pages of the pool, withdrawn ones included."""
        return self._capacity

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self._free_count

    @property
    def withdrawn(self) -> int:
        """Number of pages out of circulation."""
        return self._withdrawn_count

    @property
    def held(self) -> int:
        """Number of pages that somebody holds."""
        return self._capacity - self._free_count - self._withdrawn_count

    def free_runs(self) -> tuple[PageRun, ...]:
        """The free pages as maximal runs in ascending order."""
        return self._free.runs()

    def withdrawn_runs(self) -> tuple[PageRun, ...]:
        return self._withdrawn.runs()

    def take(self, count: int) -> tuple[PageRun, ...] | None:
        """Take `count` pages: the smallest run that holds them, else as few runs as possible.

        Returns ascending runs, or None (and takes nothing) where fewer pages are free.

        Raises:
            ForeignPagesError: the count is not positive.
        """
        if count < 1:
            raise ForeignPagesError((0, count), capacity=self._capacity)
        if count > self._free_count:
            return None
        taken: list[PageRun] = []
        while count:
            start, size = self._best_run(count)
            size = min(size, count)
            self._free.remove(start, size)
            taken.append((start, size))
            count -= size
            self._free_count -= size
        return tuple(sorted(taken))

    def _best_run(self, count: int) -> PageRun:
        """The smallest run of at least `count` pages, else the largest; the lowest of equals."""
        fitting: PageRun | None = None
        largest: PageRun = (0, 0)
        for start, size in zip(self._free.starts, self._free.counts, strict=True):
            if size >= count and (fitting is None or size < fitting[1]):
                fitting = (start, size)
            if size > largest[1]:
                largest = (start, size)
        return fitting or largest

    def take_adjacent(self, after_page: int, count: int) -> PageRun | None:
        """Take exactly the `count` pages behind `after_page`, or nothing.

        Raises:
            ForeignPagesError: the count is not positive or `after_page` is not in the pool.
        """
        if count < 1 or not 0 <= after_page < self._capacity:
            raise ForeignPagesError((after_page, count), capacity=self._capacity)
        run = (after_page + 1, count)
        if self._free.first_missing(*run) is not None:
            return None
        self._free.remove(*run)
        self._free_count -= count
        return run

    def give_back(self, ranges: Iterable[PageRun]) -> None:
        """Make held pages free.

        Raises:
            ForeignPagesError: a range is no range of the pool.
            NotHeldError: a page is free already, or named twice.
            WithdrawnPagesError: a page was withdrawn.
        """
        runs = self._held_runs(ranges)
        for start, count in runs:
            self._free.add(start, count)
            self._free_count += count

    def withdraw(self, ranges: Iterable[PageRun]) -> None:
        """Take held pages out of circulation; capacity to serve shrinks.

        Raises:
            As `give_back`.
        """
        runs = self._held_runs(ranges)
        for start, count in runs:
            self._withdrawn.add(start, count)
            self._withdrawn_count += count

    def readmit(self, ranges: Iterable[PageRun]) -> None:
        """Make withdrawn pages free again.

        Raises:
            ForeignPagesError: a range is no range of the pool.
            NotWithdrawnError: a page was not withdrawn, or is named twice.
        """
        runs = self._disjoint_runs(ranges)
        for run in runs:
            missing = self._withdrawn.first_missing(*run)
            if missing is not None:
                raise NotWithdrawnError(run, page=missing)
        for start, count in runs:
            self._withdrawn.remove(start, count)
            self._withdrawn_count -= count
            self._free.add(start, count)
            self._free_count += count

    def _disjoint_runs(self, ranges: Iterable[PageRun]) -> list[PageRun]:
        runs = sorted((start, count) for start, count in ranges)
        end = 0
        for start, count in runs:
            if count < 1 or start < 0 or start + count > self._capacity:
                raise ForeignPagesError((start, count), capacity=self._capacity)
            if start < end:
                raise NotHeldError((start, count), page=start)
            end = start + count
        return runs

    def _held_runs(self, ranges: Iterable[PageRun]) -> list[PageRun]:
        runs = self._disjoint_runs(ranges)
        for run in runs:
            page = self._free.first_within(*run)
            if page is not None:
                raise NotHeldError(run, page=page)
            page = self._withdrawn.first_within(*run)
            if page is not None:
                raise WithdrawnPagesError(run, page=page)
        return runs

    def copy(self) -> PageAllocator:
        twin = PageAllocator(self._capacity)
        twin._free = self._free.copy()
        twin._withdrawn = self._withdrawn.copy()
        twin._free_count = self._free_count
        twin._withdrawn_count = self._withdrawn_count
        return twin

    def key(self) -> AllocatorKey:
        """A hashable value that is equal exactly for allocators in the same state."""
        return (self._capacity, self._free.runs(), self._withdrawn.runs())


def pages_of(runs: Iterable[PageRun]) -> list[int]:
    """The page numbers of runs, in the runs' order: the block table."""
    return [page for start, count in runs for page in range(start, start + count)]


def runs_of(pages: Iterable[int]) -> tuple[PageRun, ...]:
    """The shortest runs that spell a block table in its order."""
    runs: list[PageRun] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return tuple(runs)


def slice_runs(runs: Iterable[PageRun], *, first: int, count: int) -> tuple[PageRun, ...]:
    """The runs of `count` pages from the `first` logical page on; fewer where the runs end."""
    part: list[PageRun] = []
    for start, size in runs:
        skipped = min(first, size)
        used = min(count, size - skipped)
        if used > 0:
            part.append((start + skipped, used))
        first -= skipped
        count -= used
    return tuple(part)
