"""Steps over a pool on a GPU: the operations of `kernels.dispatch` as a model's KV context.

Owns: the order of a step there, and how a raised flag becomes a mismatch.
Must not know: requests, sampling.

Nothing waits for the device before the end of a step. Headers are compared in every layer before the
first write, in the loop that reads each page, and again at the end; what any of them finds raises a
sequence's flag, which silences the sequence from then on, and the flags are read once, before
tokens leave. A sequence that fails in a later layer may have been written in earlier ones: its
pages are its own there, and it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.decode_step import Outcome
from engine.model import Model
from engine.paged import PagedBatch, RowCountError, StepOrderError
from engine.pool import KVPool
from engine.step_plan import SequenceSlice, live_table
from kernels import dispatch, headers
from kernels.digest import to_unsigned
from kernels.headers import HeaderField, HeaderMismatch
from kernels.tables import Fault, PageLabels, PageTables, new_flags

_FIELDS: tuple[tuple[Fault, HeaderField], ...] = (
    (Fault.HEAD_TAG, "head_tag"),
    (Fault.TAIL_TAG, "tail_tag"),
    (Fault.LAYER, "layer"),
    (Fault.POSITION, "position"),
    (Fault.FILLED, "filled"),
)


class DeviceBatch:
    """One step of several sequences; the model sees it as its KV context.

    Rows of the model's tensors are the sequences' tokens in order.

    Raises:
        SliceOutOfBoundsError: pages outside the pool, or fewer than the tokens need.
        TagZeroError: a tag is 0.
    """

    def __init__(self, pool: KVPool, sequences: Sequence[SequenceSlice]) -> None:
        self._pool = pool
        self._sequences = tuple(sequences)
        self._state: Literal["new", "begun", "ended"] = "new"
        tables = [live_table(pool, number, each) for number, each in enumerate(sequences)]
        device = pool.memory.octets.device
        self._tables = PageTables.of(
            [pages for pages, _ in tables],
            [tags for _, tags in tables],
            tokens=[each.start + each.count for each in sequences],
            rows=[each.count for each in sequences],
            device=device,
        )
        self._rows = sum(each.count for each in sequences)
        counts = torch.tensor([len(pages) for pages, _ in tables], dtype=torch.int64)
        places = torch.cat([torch.arange(len(pages)) for pages, _ in tables])
        self._live_pages = places.numel()
        self._owners = torch.repeat_interleave(counts).to(device)
        self._positions = places.to(dtype=torch.int32, device=device)
        mine = torch.arange(self._tables.width, device=device) < counts.to(device)[:, None]
        self._pages, self._tags = self._tables.pages[mine], self._tables.tags[mine]
        self._flags = new_flags(len(self._sequences), device)

    def begin_step(self) -> None:
        """Compare the headers of every page that will be read or written, in every layer."""
        if self._state != "new":
            raise StepOrderError(called="begin_step", state=self._state)
        self._state = "begun"
        self._compare(self._tables.tokens - self._tables.rows)
        self._pool.counters.reads_checked += self._live_pages * self._pool.layout.layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K and V, each `[rows, kv_heads, head_dim]`, of this step's tokens in one layer.

        Raises:
            StepOrderError: the step is not between `begin_step` and `end_step`.
            RowCountError: another number of rows.
        """
        self._require_begun("append", k.shape[0])
        dtype = self._pool.layout.dtype
        keys, values = k.to(dtype), v.to(dtype)
        memory = self._pool.memory
        dispatch.write_tokens(memory, layer, keys, values, self._tables, self._flags)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of each sequence over its own rows; `[rows, heads, head_dim]`.

        Raises:
            StepOrderError: the step is not between `begin_step` and `end_step`.
            RowCountError: another number of rows.
        """
        self._require_begun("attend", q.shape[0])
        decoding = self._rows == len(self._sequences)
        operation = dispatch.decode_attention if decoding else dispatch.prefill_attention
        queries = q.to(self._pool.layout.dtype)
        output = operation(self._pool.memory, layer, queries, self._tables, self._flags)
        return output.to(q.dtype)

    def end_step(self) -> dict[int, HeaderMismatch]:
        """Compare all headers again, wait for the device, and say which sequences failed.

        The tokens of a step may leave only for sequences that are not in the result.
        """
        if self._state != "begun":
            raise StepOrderError(called="end_step", state=self._state)
        self._state = "ended"
        self._compare(self._tables.tokens)
        counters = self._pool.counters
        counters.reads_rechecked += self._live_pages * self._pool.layout.layers
        flags: list[int] = self._flags.tolist()
        mismatches = {
            number: self._describe(number, Fault(bits)) for number, bits in enumerate(flags) if bits
        }
        counters.mismatches += len(mismatches)
        return mismatches

    def _require_begun(self, called: str, rows: int) -> None:
        if self._state != "begun":
            raise StepOrderError(called=called, state=self._state)
        if rows != self._rows:
            raise RowCountError(rows=rows, expected=self._rows)

    def _labels(self, tokens: Tensor) -> PageLabels:
        """What each live page must be, and hold at least when sequences hold so many tokens."""
        size = self._pool.layout.page_tokens
        filled = (tokens[self._owners] - self._positions * size).clamp_(0, size)
        return PageLabels(
            pages=self._pages, tags=self._tags, positions=self._positions, filled=filled
        )

    def _compare(self, tokens: Tensor) -> None:
        found = new_flags(self._live_pages, self._flags.device)
        dispatch.check_headers(self._pool.memory, self._labels(tokens), found)
        # Flags of a sequence's pages are joined by their largest: which bits does not matter here.
        self._flags.scatter_reduce_(0, self._owners, found, "amax")

    def _describe(self, number: int, fault: Fault) -> HeaderMismatch:
        """The first mismatch that still stands there; what the flag says where it is gone again."""
        labels = self._labels(self._tables.tokens - self._tables.rows)
        mine = self._owners == number
        report = headers.check(
            self._pool.memory,
            labels.pages[mine].long(),
            labels.tags[mine],
            labels.positions[mine].long(),
            labels.filled[mine].long(),
        )
        if report.first is not None:
            return report.first
        field: HeaderField = next((name for bit, name in _FIELDS if bit & fault), "filled")
        page, tag = int(self._tables.pages[number, 0]), int(self._tables.tags[number, 0])
        return HeaderMismatch(
            page=page, layer=0, field=field, expected=to_unsigned(tag), found=int(fault)
        )


def make_batch(pool: KVPool, sequences: Sequence[SequenceSlice]) -> PagedBatch | DeviceBatch:
    """One step over this pool, by what its device computes best."""
    return DeviceBatch(pool, sequences) if pool.on_device else PagedBatch(pool, sequences)


class DeviceSteps:
    """Decode steps over a pool on a device, as `decode_step.DecodeSteps` says."""

    path = "device"
    reason: str | None = None

    def __init__(self, model: Model, pool: KVPool) -> None:
        self._model = model
        self._pool = pool

    def run(self, tokens: Sequence[int], sequences: Sequence[SequenceSlice]) -> Outcome:
        """As `DecodeSteps.run` says."""
        batch = DeviceBatch(self._pool, sequences)
        device = self._model.device
        places = [each.start for each in sequences]
        batch.begin_step()
        hidden = self._model.forward(
            torch.tensor(tokens, device=device), torch.tensor(places, device=device), batch
        )
        # Sampling is the host's; the copy is the first thing of a step that waits for the device.
        return Outcome(self._model.logits(hidden).cpu(), batch.end_step())
