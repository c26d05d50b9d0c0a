"""Attention over paged KV rows, in plain torch: the reference of every faster kernel.

It owns the arithmetic for one sequence at a time, so that no other sequence of a batch can
change its result. It must not read rows that its caller did not name, and does not check
headers: the caller compares them before the first load and after the last.

Rows are `[R, 2, kv_heads, head_dim]`, K then V. Query head `h` uses KV head
`h // (heads / kv_heads)`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def gap_rows(tokens: int, page_tokens: int) -> Tensor:
    """int64: the gap rows among the view rows of `tokens` tokens, one between two pages."""
    return page_tokens + torch.arange((tokens - 1) // page_tokens) * (page_tokens + 1)


def view_rows(tokens: int, page_tokens: int) -> int:
    """Rows of a view over a contiguous run of pages that ends with the last valid token."""
    return tokens + (tokens - 1) // page_tokens


def decode_attention(query: Tensor, rows: Tensor, gaps: Tensor) -> Tensor:
    """One query over all rows; `[heads, head_dim]` in and out.

    rows: `[R, 2, kv_heads, head_dim]`, any row stride, gap rows included.
    gaps: int64, the gap rows. The K half of a gap row may hold anything, its V half must be
        finite: headers and trailers are zero there.
    """
    heads, head_dim = query.shape
    kv_heads = rows.shape[2]
    keys = rows[:, 0].permute(1, 2, 0)
    values = rows[:, 1].permute(1, 0, 2)
    grouped = (query * head_dim**-0.5).view(kv_heads, heads // kv_heads, head_dim)
    scores = torch.bmm(grouped, keys)
    # Header words read as floats may be NaN, so their scores are overwritten, not added to.
    scores.index_fill_(2, gaps, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.bmm(weights, values).view(heads, head_dim)


def gather_with_gaps(layer_rows: Tensor, index: Tensor, gaps: Tensor) -> Tensor:
    """Scattered rows arranged as the view of a contiguous run would be, gap rows zeroed.

    layer_rows: `[rows of one layer, 2, kv_heads, head_dim]`.
    index: int64 `[R]`, where each row lies; at gap rows any row of the same sequence.
    """
    rows = layer_rows.index_select(0, index)
    rows.index_fill_(0, gaps, 0)
    return rows


def chunk_mask(start: int, count: int) -> Tensor | None:
    """Bool `[count, start + count]`: query `i` sees rows up to `start + i`; None if start is 0."""
    if start == 0:
        return None
    return torch.ones((count, start + count), dtype=torch.bool).tril(start)


def chunk_attention(queries: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of a chunk; `[C, heads, head_dim]` in and out.

    rows: `[start + C, 2, kv_heads, head_dim]`, the rows of the sequence without gap rows.
    mask: as `chunk_mask` makes it.
    """
    result = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        rows[:, 0].transpose(0, 1)[None],
        rows[:, 1].transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)
