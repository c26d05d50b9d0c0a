"""Digests of sealed pages: algorithm 1, `wsum32`.

It owns the arithmetic. It must not know where digests are kept or who compares them.

The data part reads a block's filled token rows as signed 32-bit words `x[i]` and sums
`x[i] * (i + 1)` modulo 2**64. Weights stay below 2**31 (the layout sees to it), so every change
of a single word and every swap of two different words changes the sum. Rows of zeros add nothing.
The data part is then mixed, by a bijection of 64 bits, with tag, layer, position and filled, so
that it can be made once from the source page and be sealed for any destination.
The digest finds faults; it is not keyed and does not resist a forger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import PageMemory, select_pages

ALGORITHM_WSUM32 = 1
METHOD_NAMES = {ALGORITHM_WSUM32: "wsum32"}
"""Names for the log, by the algorithm id that stands in page headers."""

METHOD_WSUM32 = METHOD_NAMES[ALGORITHM_WSUM32]

_MASK_64 = (1 << 64) - 1


def to_signed(value: int) -> int:
    """The two's complement int64 of an unsigned 64-bit number."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def to_unsigned(value: int) -> int:
    """The unsigned 64-bit number of a two's complement int64."""
    return value & _MASK_64


# The constants of the splitmix64 generator (Steele, Lea, Flood 2014).
_GAMMA = to_signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = to_signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = to_signed(0x94D049BB133111EB)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask takes the copied sign bits away again.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(value: Tensor) -> Tensor:
    """The splitmix64 finaliser, a bijection on 64 bits; int64 in, int64 out."""
    value = value + _GAMMA
    value = (value ^ _shift_right(value, 30)) * _MULTIPLY_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLY_2
    return value ^ _shift_right(value, 31)


def data_sums(memory: PageMemory, pages: Tensor, filled: Tensor) -> Tensor:
    """int64 `[layers, N]`: the data part of each block, over its `filled` first rows.

    pages, filled: int64 `[N]`. Rows at and after `filled` are not part of it.

    With `i + 1 = row * row_words + (column + 1)` the weighted sum falls into sums over rows and
    sums over columns, so no word is widened or multiplied one by one; the value is the same.
    """
    layout = memory.layout
    row_words = layout.row_bytes // 4
    device = memory.data.device
    row_weights = torch.arange(layout.page_tokens, device=device) * row_words
    column_weights = torch.arange(1, row_words + 1, device=device)
    partial = torch.nonzero(filled < layout.page_tokens).flatten().tolist()
    counts = filled.tolist()
    shape = (pages.numel(), layout.page_tokens, row_words)
    sums = torch.empty((layout.layers, pages.numel()), dtype=torch.int64, device=device)
    for layer in range(layout.layers):
        values = select_pages(memory.data[layer], pages).view(shape)
        over_rows = values.sum(dim=-1, dtype=torch.int64)
        over_columns = values.sum(dim=1, dtype=torch.int64)
        for entry in partial:
            over_rows[entry, counts[entry] :] = 0
            over_columns[entry] = values[entry, : counts[entry]].sum(dim=0, dtype=torch.int64)
        sums[layer] = (over_rows * row_weights).sum(-1) + (over_columns * column_weights).sum(-1)
    return sums


def seal(sums: Tensor, *, tags: Tensor, positions: Tensor, filled: Tensor) -> Tensor:
    """int64 `[layers, N]`: digests for headers, never 0, from data parts of the same shape.

    tags, positions, filled: int64 `[N]`.
    """
    layer = torch.arange(sums.shape[0], device=sums.device)[:, None]
    state = mix(tags)[None, :]
    state = mix(state ^ (layer | (positions << 32)))
    state = mix(state ^ filled)
    state = mix(state ^ sums)
    # 0 says "open page", so the one input that gives 0 shares 1 with another.
    return torch.where(state == 0, 1, state)


def range_digest(digests: Tensor) -> int:
    """The unsigned sum modulo 2**64 of block digests: what the log says of a written range.

    It does not depend on the order of blocks, since each digest already binds layer and position.
    """
    return to_unsigned(int(digests.sum()))
