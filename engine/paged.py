"""One forward step over paged KV: appends, attention, and the header checks around them.

It owns the order of a step: `begin_step` compares headers, the model appends and attends layer
by layer, `end_step` compares again and notes what was written.
It must not know requests: a sequence is pages, tags and token counts.

A mismatch is data. A sequence that fails before the loads is neither read nor written in this
step: its outputs are zeros, its mismatch is reported, and all others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.pool import KVPool
from engine.step_plan import (
    SequencePlan,
    SequenceSlice,
    SliceOutOfBoundsError,
    live_table,
    plan_sequence,
)
from kernels.attention import chunk_attention, decode_attention, gather_with_gaps
from kernels.headers import HeaderMismatch, check, set_filled

__all__ = [
    "PagedBatch",
    "RowCountError",
    "SequenceSlice",
    "SliceOutOfBoundsError",
    "StepOrderError",
]


class StepOrderError(RuntimeError):
    """A step was used out of order; in particular nothing is read before `begin_step`."""

    def __init__(self, *, called: str, state: str) -> None:
        super().__init__(f"{called} was called on a step that is {state}")
        self.called = called
        self.state = state


class RowCountError(ValueError):
    """The model passed another number of rows than the step was made for."""

    def __init__(self, *, rows: int, expected: int) -> None:
        super().__init__(f"{rows} rows were passed, the step has {expected}")
        self.rows = rows
        self.expected = expected


class PagedBatch:
    """One step of several sequences; the model sees it as its KV context.

    Rows of the model's tensors are the sequences' tokens in order, then `padding_rows` rows that
    belong to nobody: they are not stored and their attention output is zero.

    Raises:
        SliceOutOfBoundsError: pages outside the pool, or fewer than the tokens need.
        TagZeroError: a tag is 0.
    """

    def __init__(
        self, pool: KVPool, sequences: Sequence[SequenceSlice], *, padding_rows: int = 0
    ) -> None:
        self._pool = pool
        self._sequences = tuple(sequences)
        self._state: Literal["new", "begun", "ended"] = "new"
        self._mismatches: dict[int, HeaderMismatch] = {}
        self._read_layers: set[int] = set()
        self._read_blocks = 0
        self._guarded_blocks = 0
        self._plans: list[SequencePlan] = []
        self._owners: list[int] = []
        pages: list[int] = []
        tags: list[int] = []
        positions: list[int] = []
        write_rows: list[Tensor] = []
        row = 0
        for number, sequence in enumerate(self._sequences):
            table, page_tags = live_table(pool, number, sequence)
            plan, written = plan_sequence(pool, sequence, table, first_row=row)
            self._plans.append(plan)
            write_rows.append(written)
            self._owners += [number] * len(table)
            pages += table
            tags += page_tags
            positions += range(len(table))
            row += sequence.count
        self._token_rows = row
        self._rows = row + padding_rows
        self._pages = torch.tensor(pages, dtype=torch.int64)
        self._tags = torch.tensor(tags, dtype=torch.int64)
        self._positions = torch.tensor(positions, dtype=torch.int64)
        first_token = self._positions * pool.layout.page_tokens
        self._filled_before = self._per_page([s.start for s in self._sequences], first_token)
        self._filled_after = self._per_page(
            [s.start + s.count for s in self._sequences], first_token
        )
        self._write_rows = torch.cat(write_rows) if write_rows else torch.empty(0).long()
        self._write_from: Tensor | None = None

    @property
    def live_pages(self) -> int:
        """Pages that hold tokens of this step's sequences, the appended ones included."""
        return len(self._owners)

    def begin_step(self) -> dict[int, HeaderMismatch]:
        """Compare the headers of every page that will be read or written.

        Returns the first mismatch of each failed sequence, by its index in the batch.
        """
        if self._state != "new":
            raise StepOrderError(called="begin_step", state=self._state)
        self._state = "begun"
        checked, failed = self._compare()
        self._pool.counters.reads_checked += checked
        self._pool.counters.mismatches += len(failed)
        self._mismatches = dict(failed)
        # From what was compared, not from what was to be: a compare left out shows as unchecked.
        self._guarded_blocks = checked - self._pool.layout.layers * sum(
            self._plans[number].live_pages for number in failed
        )
        if failed:
            kept = [
                row
                for number, plan in enumerate(self._plans)
                if number not in failed
                for row in range(plan.first_row, plan.first_row + plan.count)
            ]
            self._write_from = torch.tensor(kept, dtype=torch.int64)
            self._write_rows = self._write_rows[self._write_from]
        return dict(failed)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K and V, each `[rows, kv_heads, head_dim]`, of this step's tokens in one layer.

        Raises:
            StepOrderError: the step is not between `begin_step` and `end_step`.
            RowCountError: another number of rows.
        """
        self._require_begun("append", k.shape[0])
        if self._write_from is None:
            keys, values = k[: self._token_rows], v[: self._token_rows]
        else:
            keys, values = k[self._write_from], v[self._write_from]
        target = self._pool.memory.rows[layer]
        target.index_copy_(0, self._write_rows, torch.stack((keys, values), 1).to(target.dtype))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of each sequence over its own rows; `[rows, heads, head_dim]`.

        Raises:
            StepOrderError: the step is not between `begin_step` and `end_step`.
            RowCountError: another number of rows.
        """
        self._require_begun("attend", q.shape[0])
        rows = self._pool.memory.rows[layer]
        output = torch.zeros_like(q)
        q = q.to(rows.dtype)
        first_visit = layer not in self._read_layers
        self._read_layers.add(layer)
        for number, plan in enumerate(self._plans):
            if number in self._mismatches:
                continue
            if first_visit:
                self._read_blocks += plan.live_pages
            end = plan.first_row + plan.count
            if plan.count > 1:
                gathered = rows.index_select(0, plan.index)
                output[plan.first_row : end] = chunk_attention(
                    q[plan.first_row : end], gathered, plan.mask
                )
            else:
                if plan.contiguous_from is not None:
                    view = rows.narrow(0, plan.contiguous_from, plan.row_count)
                else:
                    view = gather_with_gaps(rows, plan.index, plan.gaps)
                output[plan.first_row] = decode_attention(q[plan.first_row], view, plan.gaps)
        return output

    def end_step(self) -> dict[int, HeaderMismatch]:
        """Compare all headers again, then note the written tokens in the headers.

        The tokens of a step may leave only for sequences that are not in the result, which holds
        the first mismatch of each sequence that failed before the loads or now. The headers of
        failed sequences are left as they are.
        """
        if self._state != "begun":
            raise StepOrderError(called="end_step", state=self._state)
        self._state = "ended"
        counters = self._pool.counters
        checked, failed = self._compare()
        counters.reads_rechecked += checked
        fresh = {n: mismatch for n, mismatch in failed.items() if n not in self._mismatches}
        counters.mismatches += len(fresh)
        counters.reads_unchecked += max(0, self._read_blocks - self._guarded_blocks)
        self._mismatches |= fresh
        written = self._filled_after > self._filled_before
        if self._mismatches:
            sound = [owner not in self._mismatches for owner in self._owners]
            written &= torch.tensor(sound, dtype=torch.bool)
        set_filled(self._pool.memory, self._pages[written], self._filled_after[written])
        return dict(self._mismatches)

    def _require_begun(self, called: str, rows: int) -> None:
        if self._state != "begun":
            raise StepOrderError(called=called, state=self._state)
        if rows != self._rows:
            raise RowCountError(rows=rows, expected=self._rows)

    def _compare(self) -> tuple[int, dict[int, HeaderMismatch]]:
        report = check(
            self._pool.memory, self._pages, self._tags, self._positions, self._filled_before
        )
        failed: dict[int, HeaderMismatch] = {}
        for entry, mismatch in report.mismatches:
            failed.setdefault(self._owners[entry], mismatch)
        return report.checked, failed

    def _per_page(self, tokens: list[int], first_token: Tensor) -> Tensor:
        """int64 `[live pages]`: how many of each sequence's tokens lie in each of its pages."""
        owned = torch.tensor([tokens[owner] for owner in self._owners], dtype=torch.int64)
        return (owned - first_token).clamp_(0, self._pool.layout.page_tokens)
