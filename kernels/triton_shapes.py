"""Tile sizes of the Triton kernels, and what each kernel is compiled with.

It owns every compile-time constant: functions of the layout and of few small numbers, so that few
kernels are compiled. It must not know tensors or launches.

A shape is one compile-time argument of its kernel; sizes called `pad` are powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.layout import PageLayout
from kernels.triton_common import INTERPRETED, power_of_two

TILE_TOKENS = 64
"""Tokens in one turn of the page loop; pages longer than that are taken in pieces."""

SPLIT_TOKENS = 512
"""Tokens that one program of a split takes, rounded up to whole tiles of pages."""

QUERY_ROWS = 16
"""Query rows that one program of a prefill takes."""

DOT_MIN = 16
"""The smallest side of a matrix product."""

PIECE_WORDS = 1024
CHECK_ENTRIES = 128
WRITE_ELEMENTS = 4096


class AttentionShape(NamedTuple):
    """Of `attention_kernel`.

    group: query heads of a KV head; query_rows: query rows of a program; page_rows, tile_span: rows
    of a page in a tile, and pages in a tile (a page longer than a tile is taken in pieces);
    split_tiles: tiles of a split. widened: multiply in float32. checked: compare headers, which
    only a measurement of what that costs may switch off.
    """

    kv_heads: int
    group: int
    group_pad: int
    head_dim: int
    dim_pad: int
    page_tokens: int
    block_words: int
    word_elements: int
    row_elements: int
    header_elements: int
    query_rows: int
    page_rows: int
    tile_span: int
    split_tiles: int
    decode: bool
    split: bool
    widened: bool
    checked: bool = True


class JoinShape(NamedTuple):
    """Of `join_kernel`."""

    heads: int
    head_dim: int
    dim_pad: int
    split_tokens: int


class WriteShape(NamedTuple):
    """Of `write_kernel`. half: elements of a row's K; touched_pad: pages that a program compares."""

    half: int
    half_pad: int
    page_tokens: int
    block_words: int
    word_elements: int
    row_elements: int
    header_elements: int
    touched_pad: int
    rows_pad: int


class CheckShape(NamedTuple):
    """Of `check_kernel`. entries: pages of a program."""

    page_tokens: int
    block_words: int
    entries: int


class DigestShape(NamedTuple):
    """Of `digest_kernel`. row_words, header_words: of 32 bits; piece: words of one turn."""

    page_tokens: int
    block_words: int
    row_words: int
    header_words: int
    piece: int


class CopyShape(NamedTuple):
    """Of `copy_kernel`: as `DigestShape`, and whether the source must be sealed."""

    page_tokens: int
    block_words: int
    row_words: int
    header_words: int
    piece: int
    header_pad: int
    sealed: bool


def split_tokens(layout: PageLayout) -> int:
    """Tokens of one split, a whole number of spans of pages."""
    _, span, _ = _tile(layout)
    in_span = span * layout.page_tokens
    return -(-SPLIT_TOKENS // in_span) * in_span


def attention_shape(layout: PageLayout, *, heads: int, decode: bool, split: bool) -> AttentionShape:
    page_rows, span, chunks = _tile(layout)
    group = heads // layout.kv_heads
    query_rows = 1 if decode else QUERY_ROWS
    itemsize = layout.dtype.itemsize
    return AttentionShape(
        kv_heads=layout.kv_heads,
        group=group,
        group_pad=max(power_of_two(group), DOT_MIN // query_rows),
        head_dim=layout.head_dim,
        dim_pad=power_of_two(layout.head_dim),
        page_tokens=layout.page_tokens,
        block_words=layout.block_bytes // 8,
        word_elements=8 // itemsize,
        row_elements=layout.row_bytes // itemsize,
        header_elements=layout.header_bytes // itemsize,
        query_rows=query_rows,
        page_rows=page_rows,
        tile_span=span,
        split_tiles=split_tokens(layout) // (span * layout.page_tokens) * chunks,
        decode=decode,
        split=split,
        widened=INTERPRETED and layout.dtype == torch.bfloat16,
    )


def join_shape(layout: PageLayout, *, heads: int) -> JoinShape:
    return JoinShape(
        heads=heads,
        head_dim=layout.head_dim,
        dim_pad=power_of_two(layout.head_dim),
        split_tokens=split_tokens(layout),
    )


def write_shape(layout: PageLayout, *, touched: int, rows: int) -> WriteShape:
    """touched: most pages that a sequence appends to; rows: most rows that it brings."""
    itemsize = layout.dtype.itemsize
    half_pad = power_of_two(layout.half_row_bytes // itemsize)
    return WriteShape(
        half=layout.half_row_bytes // itemsize,
        half_pad=half_pad,
        page_tokens=layout.page_tokens,
        block_words=layout.block_bytes // 8,
        word_elements=8 // itemsize,
        row_elements=layout.row_bytes // itemsize,
        header_elements=layout.header_bytes // itemsize,
        touched_pad=power_of_two(touched),
        rows_pad=min(
            power_of_two(min(rows, layout.page_tokens)), max(1, WRITE_ELEMENTS // half_pad)
        ),
    )


def check_shape(layout: PageLayout) -> CheckShape:
    return CheckShape(layout.page_tokens, layout.block_bytes // 8, CHECK_ENTRIES)


def digest_shape(layout: PageLayout) -> DigestShape:
    return DigestShape(
        page_tokens=layout.page_tokens,
        block_words=layout.block_bytes // 8,
        row_words=layout.row_bytes // 4,
        header_words=layout.header_bytes // 4,
        piece=min(PIECE_WORDS, power_of_two(layout.page_tokens * layout.row_bytes // 4)),
    )


def copy_shape(layout: PageLayout, *, sealed: bool) -> CopyShape:
    header_pad = power_of_two(layout.header_words)
    return CopyShape(*digest_shape(layout), header_pad=header_pad, sealed=sealed)


def _tile(layout: PageLayout) -> tuple[int, int, int]:
    """Rows of a page in a tile, pages in a tile, tiles that a page is taken in."""
    rows = min(power_of_two(layout.page_tokens), TILE_TOKENS)
    return rows, TILE_TOKENS // rows, -(-layout.page_tokens // rows)
