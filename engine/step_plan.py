"""What one sequence reads and writes in a step, as index tensors.

It owns the way from tokens to pool rows. It must not know headers or the order of a step.
"""

from __future__ import annotations

import itertools

import attrs
import torch
from torch import Tensor

from engine.allocator import PageRun, pages_of
from engine.pool import KVPool
from kernels.attention import chunk_mask, gap_rows, view_rows
from kernels.digest import to_signed
from kernels.headers import TagZeroError


class SliceOutOfBoundsError(ValueError):
    """A sequence's pages do not hold its tokens or do not lie in the pool: a caller's bug."""

    def __init__(self, *, sequence: int, quantity: str, value: int, limit: int) -> None:
        super().__init__(f"sequence {sequence}: {quantity} is {value}, the limit is {limit}")
        self.sequence = sequence
        self.quantity = quantity
        self.value = value
        self.limit = limit


@attrs.frozen
class SequenceSlice:
    """What one sequence does in a step.

    pages: its pages as runs, in logical order.
    tag: one tag for all runs, or one for each run (a request grows by further grants).
    start: tokens that the pages hold already.
    count: tokens that this step appends and queries.
    """

    pages: tuple[PageRun, ...]
    tag: int | tuple[int, ...]
    start: int
    count: int


@attrs.define(eq=False)
class SequencePlan:
    """Index tensors of one sequence, made once and used by every layer."""

    first_row: int
    count: int
    live_pages: int
    contiguous_from: int | None
    row_count: int
    gaps: Tensor
    index: Tensor
    mask: Tensor | None


def live_table(pool: KVPool, number: int, sequence: SequenceSlice) -> tuple[list[int], list[int]]:
    """Pages and signed tags of the pages that hold the sequence's tokens; checks the bounds."""
    table = pages_of(sequence.pages)
    tokens = sequence.start + sequence.count
    if sequence.count < 1 or sequence.start < 0:
        raise SliceOutOfBoundsError(
            sequence=number,
            quantity="count" if sequence.count < 1 else "start",
            value=min(sequence.count, sequence.start),
            limit=0,
        )
    live = pool.layout.pages_for_tokens(tokens)
    if live > len(table):
        raise SliceOutOfBoundsError(
            sequence=number,
            quantity="token count",
            value=tokens,
            limit=len(table) * pool.layout.page_tokens,
        )
    for page in table:
        if not 0 <= page < pool.pages:
            raise SliceOutOfBoundsError(
                sequence=number, quantity="page", value=page, limit=pool.pages - 1
            )
    given = sequence.tag
    run_tags = given if isinstance(given, tuple) else (given,) * len(sequence.pages)
    if len(run_tags) != len(sequence.pages):
        raise SliceOutOfBoundsError(
            sequence=number,
            quantity="number of tags",
            value=len(run_tags),
            limit=len(sequence.pages),
        )
    tags = [
        to_signed(tag)
        for tag, (_, count) in zip(run_tags, sequence.pages, strict=True)
        for _ in range(count)
    ]
    if 0 in tags:
        raise TagZeroError
    return table[:live], tags[:live]


def plan_sequence(
    pool: KVPool, sequence: SequenceSlice, table: list[int], *, first_row: int
) -> tuple[SequencePlan, Tensor]:
    """The index tensors of one sequence, and the pool rows that it appends."""
    page_tokens, block_rows = pool.layout.page_tokens, pool.layout.block_rows
    tokens = sequence.start + sequence.count
    contiguous = all(after == before + 1 for before, after in itertools.pairwise(table))
    bases = torch.tensor(table, dtype=torch.int64) * block_rows
    written = torch.arange(sequence.start, tokens)
    written = bases[written // page_tokens] + written % page_tokens
    gaps = gap_rows(tokens, page_tokens)
    rows = view_rows(tokens, page_tokens)
    if sequence.count > 1:
        index = (bases[:, None] + torch.arange(page_tokens)).flatten()[:tokens]
    elif contiguous:
        index = bases[:0]
    else:
        # A gap row has no place of its own in scattered pages: the first row stands in for it.
        index = (bases[:, None] + torch.arange(block_rows)).flatten()[:rows]
        index[gaps] = bases[0]
    plan = SequencePlan(
        first_row=first_row,
        count=sequence.count,
        live_pages=len(table),
        contiguous_from=table[0] * block_rows if contiguous else None,
        row_count=rows,
        gaps=gaps,
        index=index,
        mask=chunk_mask(sequence.start, sequence.count) if sequence.count > 1 else None,
    )
    return plan, written
