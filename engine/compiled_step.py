"""Decode steps through compiled code: the tables, the working memory and the team of threads.

Owns: addresses, and that every object behind an address outlives the call that reads it.
Must not know: requests, sampling, what the compiled code computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import attrs
import numpy as np
import torch
from torch import Tensor

from engine.decode_step import Outcome
from engine.model import Model
from engine.paged import RowCountError, SequenceSlice, SliceOutOfBoundsError
from engine.pool import KVPool
from engine.rope import angles, inverse_frequencies
from engine.step_plan import live_table
from engine.team import Team
from kernels import headers
from kernels.cpu_entry import walk
from kernels.cpu_layers import (
    FLAG_WORDS,
    MATRIX_FIELDS,
    WEIGHT_FIELDS,
    Arena,
    Plan,
    Shape,
    Weights,
)
from kernels.cpu_products import FLOAT_BYTES
from kernels.cpu_step import (
    COUNTER_BYTES,
    PHASES_BEHIND,
    PHASES_OF_LAYER,
    ROWS_OF_MLP,
)
from kernels.cpu_vector import LANES
from kernels.digest import to_unsigned
from kernels.headers import LOW_32, HeaderField, HeaderMismatch
from kernels.int8 import Int8Matrix, Matrix, tensors_of

SPLIT_TOKENS = 256
"""Tokens of one part of a context; fixed, so that a context is always cut at the same places."""


class CompiledSteps:
    """Steps of a float32 model on a CPU by `threads` threads; one step at a time."""

    path = "compiled"
    reason: str | None = None

    def __init__(self, model: Model, pool: KVPool, *, threads: int) -> None:
        self._model = model
        self._pool = pool
        self._team = Team(threads)
        self._checked = 1
        config, layout = model.config, pool.layout
        self._frequencies = inverse_frequencies(
            head_dim=config.head_dim, base=config.rope_base, scaling=config.rope_scaling
        )
        self._shape = Shape(
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            hidden=config.hidden,
            mlp=config.mlp,
            vocabulary=model.weights.head.shape[0],
            page_tokens=layout.page_tokens,
            row_bytes=layout.row_bytes,
            block_bytes=layout.block_bytes,
            pages=pool.pages,
            split_pages=max(1, SPLIT_TOKENS // layout.page_tokens),
            scale=config.head_dim**-0.5,
            epsilon=config.norm_epsilon,
        )
        self._layers = torch.tensor(
            [
                [_address(getattr(layer, name)) for name in WEIGHT_FIELDS]
                + [_scales_address(getattr(layer, name)) for name in MATRIX_FIELDS]
                for layer in model.weights.layers
            ],
            dtype=torch.int64,
        )
        self._weights = Weights(
            layers=self._layers.data_ptr(),
            norm=model.weights.norm.data_ptr(),
            head=_address(model.weights.head),
            head_scales=_scales_address(model.weights.head),
        )
        self._memory = _Memory.of(self._shape, rows=1, splits=1, threads=self._team.size)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], sequences: Sequence[SequenceSlice]) -> Outcome:
        if len(tokens) != len(sequences):
            raise RowCountError(rows=len(tokens), expected=len(sequences))
        if not sequences:
            return Outcome(torch.empty(0, self._shape.vocabulary), {})
        tables = _Tables.of(self._pool, sequences, split_pages=self._shape.split_pages)
        rows = len(sequences)
        memory = self._memory_for(rows, len(tables.splits))
        places = tables.starts
        cosines, sines = angles(places, self._frequencies, torch.float32)
        half = self._shape.head_dim // 2
        memory.cosines[: rows * half] = cosines.reshape(-1)
        memory.sines[: rows * half] = sines.reshape(-1)
        torch.index_select(
            self._model.weights.embedding,
            0,
            torch.tensor(tokens),
            out=memory.hidden[: rows * self._shape.hidden].view(rows, -1),
        )
        memory.counters.zero_()
        memory.flags.zero_()
        plan = tables.plan(self._pool, checked=self._checked)
        self._team.run(partial(walk, self._shape, self._weights, plan, memory.arena))
        logits = memory.logits[: rows * self._shape.vocabulary].view(rows, -1)
        return Outcome(logits, self._mismatches(tables, memory))

    def _mismatches(self, tables: _Tables, memory: _Memory) -> dict[int, HeaderMismatch]:
        flags = memory.flags.view(-1, FLAG_WORDS)[: len(tables.starts)]
        bad = torch.nonzero(flags[:, 0]).flatten().tolist()
        counters, layers = self._pool.counters, self._shape.layers
        blocks = layers * int(tables.live.sum())
        if self._checked:
            counters.reads_checked += blocks
            # A row that failed is not looked at to the end.
            counters.reads_rechecked += blocks - layers * int(tables.live[bad].sum())
        else:
            counters.reads_unchecked += blocks
        counters.mismatches += len(bad)
        return {row: self._describe(tables, row, flags[row].tolist()) for row in bad}

    def _describe(self, tables: _Tables, row: int, flag: list[int]) -> HeaderMismatch:
        """The mismatch as the definition names it, or as it was found if it is gone again."""
        live = int(tables.live[row])
        size = self._shape.page_tokens
        positions = torch.arange(live)
        owned = (tables.starts[row] - positions * size).clamp_(0, size)
        report = headers.check(
            self._pool.memory, tables.pages[row, :live], tables.tags[row, :live], positions, owned
        )
        if report.first is not None:
            return report.first
        _, layer, logical, page, head, tail, place, filled = flag
        tag = int(tables.tags[row, logical])
        compares: tuple[tuple[HeaderField, int, int], ...] = (
            ("head_tag", tag, head),
            ("tail_tag", tag, tail),
            ("layer", layer, place & LOW_32),
            ("position", logical, place >> 32),
            ("filled", int(owned[logical]), filled & LOW_32),
        )
        field, expected, found = next(
            (entry for entry in compares if entry[1] != entry[2]), compares[0]
        )
        return HeaderMismatch(
            page=page,
            layer=layer,
            field=field,
            expected=to_unsigned(expected),
            found=to_unsigned(found),
        )

    def _memory_for(self, rows: int, splits: int) -> _Memory:
        memory = self._memory
        if rows > memory.rows or splits > memory.splits:
            # Parts are doubled, so that growing contexts do not make new memory at every step.
            self._memory = memory = _Memory.of(
                self._shape,
                rows=max(rows, memory.rows),
                splits=max(2 * splits, memory.splits),
                threads=self._team.size,
            )
        return memory


@attrs.frozen(eq=False)
class _Tables:
    """Pages, tags and starts of a step's sequences, int64."""

    pages: Tensor
    tags: Tensor
    starts: Tensor
    live: Tensor
    splits: Tensor
    first_split: Tensor

    @classmethod
    def of(cls, pool: KVPool, sequences: Sequence[SequenceSlice], *, split_pages: int) -> _Tables:
        """Raises SliceOutOfBoundsError and TagZeroError."""
        found = []
        for number, sequence in enumerate(sequences):
            if sequence.count != 1:
                raise SliceOutOfBoundsError(
                    sequence=number, quantity="count", value=sequence.count, limit=1
                )
            found.append(live_table(pool, number, sequence))
        live = [len(table) for table, _ in found]
        pages = np.zeros((len(found), max(live)), dtype=np.int64)
        tags = np.zeros_like(pages)
        splits: list[tuple[int, int]] = []
        first_split = [0]
        for row, (table, page_tags) in enumerate(found):
            pages[row, : len(table)] = table
            tags[row, : len(table)] = page_tags
            splits += [(row, first) for first in range(0, len(table), split_pages)]
            first_split.append(len(splits))
        return cls(
            pages=torch.from_numpy(pages),
            tags=torch.from_numpy(tags),
            starts=torch.tensor([sequence.start for sequence in sequences]),
            live=torch.tensor(live),
            splits=torch.tensor(splits),
            first_split=torch.tensor(first_split),
        )

    def plan(self, pool: KVPool, *, checked: int) -> Plan:
        """The addresses; they are good while these tables and the pool live."""
        return Plan(
            rows=len(self.starts),
            pool=pool.memory.octets.data_ptr(),
            tables=self.pages.data_ptr(),
            tags=self.tags.data_ptr(),
            table_pages=self.pages.shape[1],
            starts=self.starts.data_ptr(),
            splits=self.splits.data_ptr(),
            first_split=self.first_split.data_ptr(),
            split_count=len(self.splits),
            checked=checked,
        )


@attrs.frozen(eq=False)
class _Memory:
    """Working memory for steps of up to `rows` sequences, cut into up to `splits` parts."""

    rows: int
    splits: int
    hidden: Tensor
    cosines: Tensor
    sines: Tensor
    logits: Tensor
    counters: Tensor
    flags: Tensor
    kept: tuple[Tensor, ...]
    arena: Arena

    @classmethod
    def of(cls, shape: Shape, *, rows: int, splits: int, threads: int) -> _Memory:
        """Fresh memory; what a phase reads was written by an earlier one."""
        group = shape.heads // shape.kv_heads
        half = shape.head_dim // 2
        inputs = _round(rows * max(shape.hidden, shape.heads * shape.head_dim))
        scores = (group + 1) * _round(shape.page_tokens)
        work = _round(max(rows * 2 * ROWS_OF_MLP, scores, splits) + LANES)
        sizes = {
            "hidden": rows * shape.hidden,
            "query": rows * shape.heads * shape.head_dim,
            "gated": rows * shape.mlp,
            "logits": rows * shape.vocabulary,
            "cosines": rows * half,
            "sines": rows * half,
            "sums": splits * shape.heads * shape.head_dim,
            "highest": splits * shape.heads,
            "totals": splits * shape.heads,
            "scratch": threads * (inputs + work),
        }
        made = {name: torch.empty(_round(size)) for name, size in sizes.items()}
        made["ones"] = torch.ones(_round(shape.page_tokens))
        phases = shape.layers * PHASES_OF_LAYER + PHASES_BEHIND
        counters = torch.zeros(phases * COUNTER_BYTES // 8, dtype=torch.int64)
        flags = torch.zeros(rows * FLAG_WORDS, dtype=torch.int64)
        arena = Arena(
            **{name: tensor.data_ptr() for name, tensor in made.items()},
            scratch_bytes=(inputs + work) * FLOAT_BYTES,
            inputs_bytes=inputs * FLOAT_BYTES,
            counters=counters.data_ptr(),
            flags=flags.data_ptr(),
        )
        return cls(
            rows=rows,
            splits=splits,
            hidden=made["hidden"],
            cosines=made["cosines"],
            sines=made["sines"],
            logits=made["logits"],
            counters=counters,
            flags=flags,
            kept=tuple(made.values()),
            arena=arena,
        )


def _round(elements: int) -> int:
    """Up to whole cache lines of float32."""
    return -(-elements // LANES) * LANES


def _address(weight: Matrix | None) -> int:
    tensors = tensors_of(weight)
    return tensors[0].data_ptr() if tensors else 0


def _scales_address(weight: Matrix) -> int:
    """0 for a matrix that needs none."""
    return weight.scales.data_ptr() if isinstance(weight, Int8Matrix) else 0
