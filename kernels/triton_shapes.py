"""Tile sizes of the Triton kernels, and what each kernel is compiled with.

It owns every compile-time constant: functions of the layout and of few small numbers, so that few
kernels are compiled. It must not know tensors or launches.
"""

from __future__ import annotations

from typing import Any

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


def split_tokens(layout: PageLayout) -> int:
    """Tokens of one split, a whole number of spans of pages."""
    _, span, _ = _tile(layout)
    in_span = span * layout.page_tokens
    return -(-SPLIT_TOKENS // in_span) * in_span


def attention_constants(
    layout: PageLayout, *, heads: int, decode: bool, split: bool
) -> dict[str, Any]:
    """What `attention_kernel` is compiled with."""
    page_rows, span, chunks = _tile(layout)
    group = heads // layout.kv_heads
    query_rows = 1 if decode else QUERY_ROWS
    group_pad = max(power_of_two(group), DOT_MIN // query_rows)
    itemsize = layout.dtype.itemsize
    return {
        "kv_heads": layout.kv_heads,
        "group": group,
        "group_pad": group_pad,
        "head_dim": layout.head_dim,
        "dim_pad": power_of_two(layout.head_dim),
        "page_tokens": layout.page_tokens,
        "block_words": layout.block_bytes // 8,
        "block_elements": layout.block_bytes // itemsize,
        "row_elements": layout.row_bytes // itemsize,
        "header_elements": layout.header_bytes // itemsize,
        "query_rows": query_rows,
        "page_rows": page_rows,
        "tile_span": span,
        "split_tiles": split_tokens(layout) // (span * layout.page_tokens) * chunks,
        "decode": decode,
        "split": split,
        "widened": INTERPRETED and layout.dtype == torch.bfloat16,
        "checked": True,
    }


def join_constants(layout: PageLayout, *, heads: int) -> dict[str, Any]:
    """What `join_kernel` is compiled with."""
    return {
        "heads": heads,
        "head_dim": layout.head_dim,
        "dim_pad": power_of_two(layout.head_dim),
        "split_tokens": split_tokens(layout),
    }


def write_constants(layout: PageLayout, *, touched: int, rows: int) -> dict[str, Any]:
    """What `write_kernel` is compiled with; powers of two, so that few kernels are compiled."""
    itemsize = layout.dtype.itemsize
    half = layout.half_row_bytes // itemsize
    half_pad = power_of_two(half)
    rows_pad = min(power_of_two(min(rows, layout.page_tokens)), max(1, 4096 // half_pad))
    return {
        "half": half,
        "half_pad": half_pad,
        "page_tokens": layout.page_tokens,
        "block_words": layout.block_bytes // 8,
        "block_elements": layout.block_bytes // itemsize,
        "row_elements": layout.row_bytes // itemsize,
        "header_elements": layout.header_bytes // itemsize,
        "touched_pad": power_of_two(touched),
        "rows_pad": rows_pad,
    }


def check_constants(layout: PageLayout) -> dict[str, Any]:
    """What `check_kernel` is compiled with."""
    return {
        "page_tokens": layout.page_tokens,
        "block_words": layout.block_bytes // 8,
        "entries": CHECK_ENTRIES,
    }


def digest_constants(layout: PageLayout) -> dict[str, Any]:
    """What `digest_kernel` is compiled with."""
    words = layout.page_tokens * layout.row_bytes // 4
    return {
        "page_tokens": layout.page_tokens,
        "block_words": layout.block_bytes // 8,
        "row_words": layout.row_bytes // 4,
        "header_words": layout.header_bytes // 4,
        "piece": min(PIECE_WORDS, power_of_two(words)),
    }


def copy_constants(layout: PageLayout, *, sealed: bool) -> dict[str, Any]:
    """What `copy_kernel` is compiled with."""
    return {
        **digest_constants(layout),
        "header_pad": power_of_two(layout.header_words),
        "sealed": sealed,
    }


def _tile(layout: PageLayout) -> tuple[int, int, int]:
    """Rows of a page in a tile, pages in a tile, tiles that a page is taken in."""
    rows = min(power_of_two(layout.page_tokens), TILE_TOKENS)
    return rows, TILE_TOKENS // rows, -(-layout.page_tokens // rows)
