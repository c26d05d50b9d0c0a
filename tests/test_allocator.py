"""Claims about the page allocator, beside a naive model that keeps one word for each page."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.allocator import (
    AllocatorError,
    ForeignPagesError,
    NotHeldError,
    NotWithdrawnError,
    PageAllocator,
    PageRun,
    WithdrawnPagesError,
    pages_of,
    runs_of,
    slice_runs,
)

CAPACITY = 12


class AllocatorBesideModel(RuleBasedStateMachine):
    """Every call gives the allocator and a list of page states the same result."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(CAPACITY)
        self.states = ["free"] * CAPACITY

    def naive_runs(self, state: str) -> tuple[PageRun, ...]:
        return runs_of(page for page in range(CAPACITY) if self.states[page] == state)

    def mark(self, runs: tuple[PageRun, ...], state: str) -> None:
        for page in pages_of(runs):
            self.states[page] = state

    @rule(count=st.integers(1, CAPACITY + 2))
    def take(self, count: int) -> None:
        free = self.naive_runs("free")
        runs = self.allocator.take(count)
        if count > sum(size for _, size in free):
            assert runs is None
            return
        assert runs is not None
        pages = pages_of(runs)
        assert len(pages) == len(set(pages)) == count
        assert all(self.states[page] == "free" for page in pages)
        fitting = [size for _, size in free if size >= count]
        if fitting:
            assert len(runs) == 1
            (home,) = [size for start, size in free if start <= runs[0][0] < start + size]
            assert home == min(fitting)
        else:
            sizes, fewest = sorted((size for _, size in free), reverse=True), 0
            while sum(sizes[:fewest]) < count:
                fewest += 1
            assert len(runs) == fewest
        self.mark(runs, "held")

    @rule(after=st.integers(0, CAPACITY - 1), count=st.integers(1, 4))
    def take_adjacent(self, after: int, count: int) -> None:
        wanted = range(after + 1, after + 1 + count)
        possible = wanted.stop <= CAPACITY and all(self.states[page] == "free" for page in wanted)
        run = self.allocator.take_adjacent(after, count)
        assert run == ((after + 1, count) if possible else None)
        if run is not None:
            self.mark((run,), "held")

    @rule(
        verb=st.sampled_from(["give_back", "withdraw", "readmit"]),
        start=st.integers(-1, CAPACITY),
        count=st.integers(0, 5),
        other=st.integers(0, CAPACITY - 1),
    )
    def move(self, verb: str, start: int, count: int, other: int) -> None:
        """Any two ranges, legal or not: moved as a whole or refused without a trace."""
        needed = "withdrawn" if verb == "readmit" else "held"
        runs = ((start, count), (other, 1))
        pages = pages_of(runs)
        legal = (
            count > 0
            and start >= 0
            and start + count <= CAPACITY
            and len(pages) == len(set(pages))
            and all(self.states[page] == needed for page in pages)
        )
        before = self.allocator.key()
        if legal:
            getattr(self.allocator, verb)(runs)
            self.mark(runs, "withdrawn" if verb == "withdraw" else "free")
        else:
            with pytest.raises(AllocatorError):
                getattr(self.allocator, verb)(runs)
            assert self.allocator.key() == before

    @precondition(lambda self: "held" in self.states)
    @rule(verb=st.sampled_from(["give_back", "withdraw"]), data=st.data())
    def move_held(self, verb: str, data: st.DataObject) -> None:
        self.move_all(verb, data.draw(st.sampled_from(self.naive_runs("held"))))

    @precondition(lambda self: "withdrawn" in self.states)
    @rule(data=st.data())
    def move_withdrawn(self, data: st.DataObject) -> None:
        self.move_all("readmit", data.draw(st.sampled_from(self.naive_runs("withdrawn"))))

    def move_all(self, verb: str, run: PageRun) -> None:
        getattr(self.allocator, verb)([run])
        self.mark((run,), "withdrawn" if verb == "withdraw" else "free")

    @invariant()
    def same(self) -> None:
        assert self.allocator.free_runs() == self.naive_runs("free")
        assert self.allocator.withdrawn_runs() == self.naive_runs("withdrawn")
        assert self.allocator.free == self.states.count("free")
        assert self.allocator.held == self.states.count("held")
        assert self.allocator.withdrawn == self.states.count("withdrawn")


TestAllocatorBesideModel = AllocatorBesideModel.TestCase


def with_free(*free: PageRun, capacity: int = 20) -> PageAllocator:
    """An allocator whose free pages are exactly those named."""
    allocator = PageAllocator(capacity)
    assert allocator.take(capacity) == ((0, capacity),)
    allocator.give_back(free)
    return allocator


def test_the_smallest_run_that_fits_is_taken() -> None:
    """Large runs are kept for large requests, and of equal runs the lowest is taken."""
    allocator = with_free((0, 5), (7, 3), (12, 3))
    assert allocator.take(3) == ((7, 3),)
    assert allocator.take(2) == ((12, 2),)
    assert allocator.take(4) == ((0, 4),)


def test_scattered_pages_come_in_few_runs() -> None:
    """Where no run is long enough the longest are joined, ascending, the rest by best fit."""
    allocator = with_free((0, 2), (4, 5), (11, 3), (16, 1))
    assert allocator.take(6) == ((4, 5), (16, 1))
    assert allocator.take(5) == ((0, 2), (11, 3))
    assert allocator.free == 0
    assert allocator.take(1) is None


def test_growth_in_place_is_all_or_nothing() -> None:
    """A run grows into the pages right behind it, or not at all."""
    allocator = with_free((5, 3), (19, 1))
    assert allocator.take_adjacent(4, 4) is None
    assert allocator.take_adjacent(3, 1) is None
    assert allocator.take_adjacent(4, 2) == (5, 2)
    assert allocator.take_adjacent(18, 1) == (19, 1)
    assert allocator.take_adjacent(19, 1) is None
    assert allocator.free_runs() == ((7, 1),)


def test_each_wrong_range_has_its_error() -> None:
    """Double free, foreign, withdrawn and not withdrawn pages are told apart, with the page."""
    allocator = with_free((0, 5))
    allocator.withdraw([(10, 2)])
    before = allocator.key()
    with pytest.raises(NotHeldError) as free_already:
        allocator.give_back([(12, 1), (3, 4)])
    assert free_already.value.page == 3
    with pytest.raises(NotHeldError) as named_twice:
        allocator.give_back([(12, 2), (13, 1)])
    assert named_twice.value.page == 13
    with pytest.raises(WithdrawnPagesError) as withdrawn:
        allocator.give_back([(8, 3)])
    assert withdrawn.value.page == 10
    with pytest.raises(NotWithdrawnError) as held:
        allocator.readmit([(11, 2)])
    assert held.value.page == 12
    for run in ((18, 3), (-1, 1), (6, 0)):
        with pytest.raises(ForeignPagesError, match="pool of 20 pages"):
            allocator.give_back([run])
    assert allocator.key() == before


@pytest.mark.parametrize("count", [0, -1])
def test_empty_requests_are_refused(count: int) -> None:
    """Nobody takes nothing, and no pool has no pages."""
    with pytest.raises(ForeignPagesError):
        PageAllocator(count)
    with pytest.raises(ForeignPagesError):
        PageAllocator(3).take(count)
    with pytest.raises(ForeignPagesError):
        PageAllocator(3).take_adjacent(0, count)
    with pytest.raises(ForeignPagesError):
        PageAllocator(3).take_adjacent(3, 1)


def test_a_copy_is_equal_and_independent() -> None:
    """Copies have the same hashable key until one of them moves."""
    allocator = with_free((0, 5))
    allocator.withdraw([(9, 1)])
    twin = allocator.copy()
    assert twin.key() == allocator.key()
    assert hash(twin.key()) == hash(allocator.key())
    assert twin.take(3) == ((0, 3),)
    assert twin.key() != allocator.key()
    assert allocator.free_runs() == ((0, 5),)
    assert (twin.free, twin.withdrawn, twin.held) == (2, 1, 17)


@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 12), st.integers(0, 12))
def test_runs_spell_block_tables(pages: list[int], first: int, count: int) -> None:
    """Runs and block tables are two spellings, and slices of one are slices of the other."""
    runs = runs_of(pages)
    assert pages_of(runs) == pages
    assert all(one[0] + one[1] != two[0] for one, two in itertools.pairwise(runs))
    assert pages_of(slice_runs(runs, first=first, count=count)) == pages[first : first + count]
