"""The operations on pages by Triton: operands turned into launches.

It owns grids, arguments and the buffers between kernels. It must not check operands: `dispatch`
has done so, and this module's functions have the signatures of `kernels.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.layout import PageMemory
from kernels.tables import LayerStep, PageLabels
from kernels.triton_attention import attention_kernel, join_kernel
from kernels.triton_pages import check_kernel, copy_kernel, digest_kernel, write_kernel
from kernels.triton_shapes import (
    CHECK_ENTRIES,
    QUERY_ROWS,
    attention_shape,
    check_shape,
    copy_shape,
    digest_shape,
    join_shape,
    split_tokens,
    write_shape,
)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, ready to be launched: its grid, its arguments, and its compile-time shape.

    warps: how many warps a program has.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    shape: tuple[Any, ...]
    warps: int = 4

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, shape=self.shape, num_warps=self.warps)


def decode_attention(step: LayerStep, queries: Tensor, output: Tensor) -> Tensor:
    """As `dispatch.decode_attention` says."""
    for launch in plan_decode(step, queries, output):
        launch()
    return output


def prefill_attention(step: LayerStep, queries: Tensor, output: Tensor) -> Tensor:
    """As `dispatch.prefill_attention` says."""
    plan_prefill(step, queries, output)()
    return output


def write_tokens(step: LayerStep, keys: Tensor, values: Tensor) -> None:
    """As `dispatch.write_tokens` says."""
    plan_write(step, keys, values)()


def check_headers(memory: PageMemory, labels: PageLabels, flags: Tensor) -> None:
    """As `dispatch.check_headers` says."""
    plan_check(memory, labels, flags)()


def digest_pages(memory: PageMemory, labels: PageLabels, flags: Tensor) -> Tensor:
    """As `dispatch.digest_pages` says."""
    digests = flags.new_empty((memory.layout.layers, labels.count), dtype=torch.int64)
    plan_digest(memory, labels, flags, digests)()
    return digests


def copy_pages(
    source: PageMemory,
    destination: PageMemory,
    labels: PageLabels,
    flags: Tensor,
    *,
    target_pages: Tensor,
    target_tags: Tensor,
    sealed: bool,
) -> Tensor:
    """As `dispatch.copy_pages` says."""
    digests = flags.new_empty((source.layout.layers, labels.count), dtype=torch.int64)
    targets = (target_pages, target_tags)
    plan_copy(source, destination, labels, flags, digests, targets=targets, sealed=sealed)()
    return digests


# --- Launches -------------------------------------------------------------------------------------


def plan_prefill(step: LayerStep, queries: Tensor, output: Tensor) -> Launch:
    """The launch of a prefill attention."""
    layout, tables = step.memory.layout, step.tables
    shape = attention_shape(layout, heads=queries.shape[1], decode=False, split=False)
    grid = (tables.sequences, layout.kv_heads, -(-tables.rows_max // QUERY_ROWS))
    nothing = queries.new_empty(1, dtype=torch.float32)
    arguments = _attention_arguments(step, queries, output, (nothing, nothing, nothing))
    # With fewer warps the running result of so many rows does not fit into registers.
    return Launch(attention_kernel, grid, arguments, shape, warps=8)


def plan_decode(step: LayerStep, queries: Tensor, output: Tensor) -> list[Launch]:
    """The launches of a decode attention, in order; their shapes say that headers are checked."""
    layout, tables = step.memory.layout, step.tables
    heads, sequences = queries.shape[1], tables.sequences
    tokens_a_split = split_tokens(layout)
    splits = max(1, -(-tables.width * layout.page_tokens // tokens_a_split))
    shape = attention_shape(layout, heads=heads, decode=True, split=splits > 1)
    parts = (sequences, splits, heads) if splits > 1 else (1,)
    peaks = torch.empty(parts, dtype=torch.float32, device=queries.device)
    sums = torch.empty_like(peaks)
    partial = torch.empty((*parts, layout.head_dim), dtype=torch.float32, device=queries.device)
    arguments = _attention_arguments(step, queries, output, (partial, peaks, sums))
    grid = (sequences, layout.kv_heads, splits)
    launches = [Launch(attention_kernel, grid, arguments, shape)]
    if splits > 1:
        launches.append(
            Launch(
                join_kernel,
                (sequences, heads),
                (output, partial, peaks, sums, tables.tokens, step.flags, splits),
                join_shape(layout, heads=heads),
            )
        )
    return launches


def plan_write(step: LayerStep, keys: Tensor, values: Tensor) -> Launch:
    """The launch that writes the rows of a step."""
    layout, tables = step.memory.layout, step.tables
    touched = -(-tables.rows_max // layout.page_tokens) + 1
    arguments = (
        keys,
        values,
        *_step_arguments(step),
        keys.stride(0),
        values.stride(0),
        keys.shape[0],
        tables.rows_max,
    )
    shape = write_shape(layout, touched=touched, rows=tables.rows_max)
    return Launch(write_kernel, (tables.sequences, touched), arguments, shape)


def plan_check(memory: PageMemory, labels: PageLabels, flags: Tensor) -> Launch:
    """The launch that compares headers."""
    arguments = (
        memory.octets.view(torch.int64),
        *_label_arguments(labels),
        flags,
        labels.count,
        memory.pages,
    )
    grid = (-(-labels.count // CHECK_ENTRIES), memory.layout.layers)
    return Launch(check_kernel, grid, arguments, check_shape(memory.layout))


def plan_digest(memory: PageMemory, labels: PageLabels, flags: Tensor, digests: Tensor) -> Launch:
    """The launch that digests blocks into int64 `[layers, N]`."""
    arguments = (
        memory.octets.view(torch.int32),
        *_label_arguments(labels),
        flags,
        digests,
        labels.count,
        memory.pages,
    )
    grid = (labels.count, memory.layout.layers)
    return Launch(digest_kernel, grid, arguments, digest_shape(memory.layout))


def plan_copy(
    source: PageMemory,
    destination: PageMemory,
    labels: PageLabels,
    flags: Tensor,
    digests: Tensor,
    *,
    targets: tuple[Tensor, Tensor],
    sealed: bool,
) -> Launch:
    """The launch that copies and seals blocks; targets: their pages and tags."""
    arguments = (
        source.octets.view(torch.int32),
        source.octets.view(torch.int64),
        destination.octets.view(torch.int32),
        destination.octets.view(torch.int64),
        *_label_arguments(labels),
        *targets,
        flags,
        digests,
        labels.count,
        source.pages,
        destination.pages,
    )
    grid = (labels.count, source.layout.layers)
    return Launch(copy_kernel, grid, arguments, copy_shape(source.layout, sealed=sealed))


def _attention_arguments(
    step: LayerStep, queries: Tensor, output: Tensor, buffers: tuple[Tensor, Tensor, Tensor]
) -> tuple[Any, ...]:
    """All arguments of `attention_kernel`; buffers: results, peaks and sums of splits."""
    return (
        queries,
        output,
        *buffers,
        *_step_arguments(step),
        queries.stride(0),
        queries.shape[0],
        step.tables.rows_max,
        step.memory.layout.head_dim**-0.5,
    )


def _step_arguments(step: LayerStep) -> tuple[Any, ...]:
    """What attention and writing take alike: the pool by words and elements, and the tables."""
    memory, tables = step.memory, step.tables
    return (
        memory.octets.view(torch.int64),
        memory.octets.view(memory.layout.dtype),
        tables.pages,
        tables.tags,
        tables.tokens,
        tables.rows,
        tables.first_row,
        step.flags,
        step.layer,
        memory.pages,
        tables.width,
    )


def _label_arguments(labels: PageLabels) -> tuple[Tensor, ...]:
    return labels.pages, labels.tags, labels.positions, labels.filled
