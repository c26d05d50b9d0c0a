"""The pool on real tensors beside a model of lists: nobody ever reads what is not its own."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from engine.allocator import PageAllocator, PageRun, pages_of
from engine.paged import PagedBatch, SequenceSlice
from engine.pool import KVPool
from kernels.layout import PageLayout

PAGES = 9
SIZE = 4
WIDTH = 32
LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=WIDTH, page_tokens=SIZE)


@attrs.define(eq=False)
class Owner:
    """A sequence: its pages with a tag for each run, and its tainted rows, kept outside."""

    number: int
    runs: list[PageRun]
    tags: list[int]
    keys: list[Tensor] = attrs.Factory(list)
    values: list[Tensor] = attrs.Factory(list)
    damaged: bool = False

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return sum(count for _, count in self.runs) * SIZE - len(self.keys)

    def touched(self, count: int) -> list[int]:
        """Pages that a step of so many tokens reads or writes."""
        return pages_of(self.runs)[: -(-(len(self.keys) + count) // SIZE)]


def attention(query: Tensor, owner: Owner) -> Tensor:
    """Softmax attention over the owner's own rows, in float64."""
    keys, values = torch.stack(owner.keys).double(), torch.stack(owner.values).double()
    weights = torch.softmax(keys @ query.double() / WIDTH**0.5, 0)
    return (weights @ values).float()


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, grow, compute together and leave; late writes land on pages of others."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.pool = KVPool.allocate(LAYOUT, PAGES)
        self.pool.memory.octets.fill_(0xFF)
        self.owners: list[Owner] = []
        self.stale: list[tuple[int, Tensor]] = []
        self.numbers = 0
        self.detected = 0
        self.chance = torch.Generator().manual_seed(1)

    @property
    def held(self) -> list[int]:
        """Every page that some owner has, by the model."""
        return [page for owner in self.owners for page in pages_of(owner.runs)]

    def _block(self, page: int) -> Tensor:
        return self.pool.memory.octets.view(LAYOUT.layers, PAGES, -1)[:, page]

    def _tag(self) -> int:
        self.numbers += 1
        return 0x7FF8_0000_0000_0000 + self.numbers

    @rule(pages=st.integers(1, 3))
    def start(self, pages: int) -> None:
        taken = self.allocator.take(pages)
        assert (taken is None) == (pages > PAGES - len(self.held))
        if taken is None:
            return
        owner = Owner(self.numbers, list(taken), [self._tag()] * len(taken))
        self.pool.open_pages(taken, tag=owner.tags[0], first_position=0)
        self.owners.append(owner)

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99))
    def grow(self, which: int) -> None:
        owner = self.owners[which % len(self.owners)]
        last = pages_of(owner.runs)[-1]
        run = self.allocator.take_adjacent(last, 1)
        free = set(range(PAGES)) - set(self.held)
        assert (run is not None) == (last + 1 in free)
        runs = (run,) if run is not None else self.allocator.take(1)
        if runs is None:
            assert not free
            return
        tag, first = self._tag(), len(pages_of(owner.runs))
        self.pool.open_pages(runs, tag=tag, first_position=first)
        owner.runs += runs
        owner.tags.append(tag)

    @precondition(lambda self: self.owners)
    @rule(counts=st.lists(st.integers(0, 5), min_size=8, max_size=8), padding=st.integers(0, 2))
    def compute(self, counts: list[int], padding: int) -> None:
        """One step of some owners together; each sees its own rows, a damaged one nothing."""
        pairs = zip(self.owners, counts, strict=False)
        work = [(o, min(count, o.room)) for o, count in pairs if min(count, o.room)]
        if not work:
            return
        slices = [
            SequenceSlice(tuple(o.runs), tuple(o.tags), start=len(o.keys), count=count)
            for o, count in work
        ]
        wrong = {
            number
            for number, (owner, count) in enumerate(work)
            if owner.damaged and set(self.hit) & set(owner.touched(count))
        }
        batch = PagedBatch(self.pool, slices, padding_rows=padding)
        assert set(batch.begin_step()) == wrong
        rows = sum(count for _, count in work)
        keys, values, queries = (
            torch.randn((rows + padding, 1, WIDTH), generator=self.chance) for _ in range(3)
        )
        batch.append(0, keys, values)
        found = batch.attend(0, queries)
        row = 0
        for number, (owner, count) in enumerate(work):
            for _ in range(count):
                if number in wrong:
                    assert found[row].eq(0).all()
                else:
                    owner.keys.append(keys[row, 0].clone())
                    owner.values.append(values[row, 0].clone())
                    expected = attention(queries[row, 0], owner)
                    torch.testing.assert_close(found[row, 0], expected, rtol=1e-4, atol=1e-5)
                row += 1
        assert found[row:].eq(0).all()
        assert set(batch.end_step()) == wrong
        for number in sorted(wrong, reverse=True):
            self.detected += 1
            self._leave(work[number][0])

    @property
    def hit(self) -> list[int]:
        """Pages whose header is not their owner's, by looking at memory."""
        return [
            page
            for owner in self.owners
            for page, tag in zip(pages_of(owner.runs), self._page_tags(owner), strict=True)
            if int(self.pool.memory.words[0, page, 0]) & 0xFFFF_FFFF_FFFF_FFFF != tag
        ]

    @staticmethod
    def _page_tags(owner: Owner) -> list[int]:
        pairs = zip(owner.runs, owner.tags, strict=True)
        return [tag for (_, count), tag in pairs for _ in range(count)]

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        self._leave(self.owners[which % len(self.owners)])

    def _leave(self, owner: Owner) -> None:
        """Give the pages back; what stood in them may still land later."""
        self.stale += [(page, self._block(page).clone()) for page in pages_of(owner.runs)]
        self.stale = self.stale[-6:]
        self.owners.remove(owner)
        self.allocator.give_back(owner.runs)

    @precondition(lambda self: self.stale)
    @rule(which=st.integers(0, 99))
    def land_late(self, which: int) -> None:
        """A write for an owner that has left lands where its page was."""
        page, block = self.stale[which % len(self.stale)]
        self._block(page).copy_(block)
        for owner in self.owners:
            owner.damaged = owner.damaged or page in pages_of(owner.runs)

    @invariant()
    def books_agree(self) -> None:
        assert len(self.held) == len(set(self.held))
        assert self.allocator.held == len(self.held)
        assert self.pool.counters.reads_unchecked == 0
        assert self.pool.counters.mismatches == self.detected


TestPool = PoolMachine.TestCase
TestPool.settings = settings(settings.default, max_examples=40, stateful_step_count=30)


def test_the_machine_meets_a_late_write() -> None:
    """The dangerous situation by hand: the next owner of a page is told, and decodes nothing."""
    machine = PoolMachine()
    machine.start(2)
    machine.compute([5] * 8, 1)
    machine.end(0)
    machine.start(2)
    machine.compute([3] * 8, 0)
    machine.land_late(0)
    machine.compute([1] * 8, 0)
    assert machine.detected == 1
    assert machine.owners == []
    machine.books_agree()


def test_the_model_notices_a_foreign_row() -> None:
    """A row that another has written behind an intact header differs from the model's attention."""
    machine = PoolMachine()
    machine.start(1)
    machine.compute([2] * 8, 0)
    machine.owners[0].values[0] += 1
    with pytest.raises(AssertionError, match="not close"):
        machine.compute([1] * 8, 0)
