"""Paged attention in Triton: one kernel for decode and prefill, and one that joins splits.

It owns the device code. It must not know how many programs are launched or for whom.

The algorithm is attention with a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022)
over tiles of whole pages, with the split over the context of Dao's Flash-Decoding (2023).
A program serves one sequence, one KV head with the query heads of its group, and a block of query
rows. A split covers a fixed number of tokens, so the order of a sequence's sums is a function of
its own length alone, and its result does not depend on what else is in the batch.

In each turn of the page loop a program takes the page numbers of its tile, compares the headers of
those pages, and loads the rows of those that passed; a page that failed has no row.
"""

from __future__ import annotations

import triton.language as tl

from kernels.triton_common import (
    LENGTH,
    PAGE,
    any_bits,
    block_start,
    header_fault,
    jit,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def tile_pages(
    words: tl.tensor,
    pages: tl.tensor,
    tags: tl.tensor,
    table: tl.tensor,
    logical: tl.tensor,
    tokens: tl.tensor,
    layer: tl.tensor,
    pool_pages: tl.tensor,
    page_tokens: tl.constexpr,
    block_words: tl.constexpr,
    checked: tl.constexpr,
) -> tl.tensor:
    """First words and faults of the pages with these logical numbers; none behind the last live one.

    table: where the sequence's row of the block table begins.
    """
    needed = tl.minimum(tl.maximum(tokens - logical * page_tokens, 0), page_tokens)
    live = needed > 0
    page = tl.load(pages + table + logical, mask=live, other=-1)
    inside = (page >= 0) & (page < pool_pages)
    block = block_start(tl.where(inside, page, 0), layer, pool_pages, block_words)
    if checked:
        tag = tl.load(tags + table + logical, mask=live, other=0)
        fault = header_fault(
            words, block, inside, tag, layer, logical, needed, page_tokens, block_words
        )
    else:
        fault = tl.where(inside, 0, PAGE)
    return block, tl.where(live, fault, 0)


@jit
def attention_kernel(
    queries: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    partial_peak: tl.tensor,
    partial_sum: tl.tensor,
    words: tl.tensor,
    elements: tl.tensor,
    pages: tl.tensor,
    tags: tl.tensor,
    lengths: tl.tensor,
    row_counts: tl.tensor,
    first_rows: tl.tensor,
    flags: tl.tensor,
    layer: tl.tensor,
    pool_pages: tl.tensor,
    width: tl.tensor,
    query_stride: tl.tensor,
    row_total: tl.tensor,
    rows_max: tl.tensor,
    scale: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_pad: tl.constexpr,
    head_dim: tl.constexpr,
    dim_pad: tl.constexpr,
    page_tokens: tl.constexpr,
    block_words: tl.constexpr,
    block_elements: tl.constexpr,
    row_elements: tl.constexpr,
    header_elements: tl.constexpr,
    query_rows: tl.constexpr,
    page_rows: tl.constexpr,
    tile_span: tl.constexpr,
    split_tiles: tl.constexpr,
    decode: tl.constexpr,
    split: tl.constexpr,
    widened: tl.constexpr,
    checked: tl.constexpr,
) -> None:
    """Attention of `query_rows` query rows of one sequence and KV head.

    Grid: (sequences, KV heads, splits or blocks of query rows).
    page_rows, tile_span: rows of a page in a tile, pages in a tile; one of pages longer than a
    tile is taken in pieces. queries and output: `[row_total, kv_heads * group, head_dim]`.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    tokens = tl.load(lengths + sequence)
    room = width * page_tokens
    fits = (tokens >= 0) & (tokens <= room)
    if decode:
        count = tl.where(tokens > 0, 1, 0)
        first_row = sequence
        block_first = 0
        written = 1
    else:
        count = tl.load(row_counts + sequence)
        first_row = tl.load(first_rows + sequence)
        fits &= (count >= 0) & (count <= tokens) & (count <= rows_max)
        fits &= (first_row >= 0) & (first_row <= row_total - count)
        block_first = part * query_rows
        # Rows of a sequence whose lengths are wrong may be anybody's: they are left alone.
        written = tl.where(fits, count, 0)
    live = tl.where(fits & (count > block_first), tokens, 0)
    start = tokens - count

    # Row m of a tile is query row m // group_pad of the block, query head m % group_pad of the group.
    row = tl.arange(0, query_rows * group_pad)
    query_row = block_first + row // group_pad
    head = kv_head * group + row % group_pad
    column = tl.arange(0, dim_pad)
    wanted = (query_row < written) & (row % group_pad < group)
    place = (first_row + query_row).to(tl.int64)
    query = tl.load(
        queries + (place * query_stride + head * head_dim)[:, None] + column[None, :],
        mask=wanted[:, None] & (column < head_dim)[None, :],
        other=0.0,
    )
    if widened:
        query = query.to(tl.float32)
    seen = start + query_row

    chunks: tl.constexpr = (page_tokens + page_rows - 1) // page_rows
    tile_tokens: tl.constexpr = tile_span * page_rows
    page_in_tile = tl.arange(0, tile_span)
    row_in_page = tl.arange(0, page_rows)
    tiles = ((live + page_tokens - 1) // page_tokens + tile_span - 1) // tile_span * chunks
    # The last token that a row of this block sees; what lies behind is checked and not read.
    reach = tl.minimum(tokens, start + block_first + query_rows)
    if decode:
        first_tile = part * split_tiles
        last_tile = tl.minimum(first_tile + split_tiles, tiles)
    else:
        first_tile = 0
        seen_spans = (tl.maximum(reach, 0) + page_tokens * tile_span - 1) // (
            page_tokens * tile_span
        )
        last_tile = tl.minimum(seen_spans * chunks, tiles)
    faults = tl.zeros([tile_span], dtype=tl.int32)
    peak = tl.full([query_rows * group_pad], float("-inf"), dtype=tl.float32)
    total = tl.zeros([query_rows * group_pad], dtype=tl.float32)
    result = tl.zeros([query_rows * group_pad, dim_pad], dtype=tl.float32)
    for tile in range(first_tile, last_tile):
        logical = (tile // chunks) * tile_span + page_in_tile
        row_of_page = (tile % chunks) * page_rows + row_in_page
        block, fault = tile_pages(
            words,
            pages,
            tags,
            sequence.to(tl.int64) * width,
            logical,
            live,
            layer,
            pool_pages,
            page_tokens,
            block_words,
            checked,
        )
        faults |= fault
        token = tl.reshape(logical[:, None] * page_tokens + row_of_page[None, :], [tile_tokens])
        usable = (fault == 0)[:, None] & (row_of_page < page_tokens)[None, :]
        usable = tl.reshape(usable, [tile_tokens]) & (token < reach)
        offset = block[:, None] * (block_elements // block_words) + header_elements
        offset = tl.reshape(offset + row_of_page[None, :] * row_elements, [tile_tokens])
        # A head begins at a multiple of 32 bytes; the reshape has hidden that from the compiler.
        offset = tl.multiple_of(offset + kv_head * head_dim, 16)
        keys = tl.load(
            elements + offset[:, None] + column[None, :],
            mask=usable[:, None] & (column < head_dim)[None, :],
            other=0.0,
        )
        values = tl.load(
            elements + offset[:, None] + (row_elements // 2) + column[None, :],
            mask=usable[:, None] & (column < head_dim)[None, :],
            other=0.0,
        )
        if widened:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
        visible = usable[None, :] & (token[None, :] <= seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        result = result * shrink[:, None] + tl.dot(
            weights.to(values.dtype), values, input_precision="ieee"
        )
        peak = higher
    if not decode:
        # Pages that only later rows see are compared too: a sequence is sound as a whole or not.
        for tile in range(last_tile, tiles):
            block, fault = tile_pages(
                words,
                pages,
                tags,
                sequence.to(tl.int64) * width,
                (tile // chunks) * tile_span + page_in_tile,
                live,
                layer,
                pool_pages,
                page_tokens,
                block_words,
                checked,
            )
            faults |= fault

    bits = any_bits(faults) | tl.where(fits, 0, LENGTH)
    tl.atomic_or(flags + sequence, bits, mask=bits != 0)
    raised = tl.load(flags + sequence) | bits
    sound = tl.where((raised == 0) & (live > 0), 1, 0)
    inner = column < head_dim
    if split:
        slot = (sequence.to(tl.int64) * tl.num_programs(2) + part) * (kv_heads * group) + head
        tl.store(partial_peak + slot, peak, mask=row < group)
        tl.store(partial_sum + slot, total, mask=row < group)
        tl.store(
            partial + slot[:, None] * head_dim + column[None, :],
            result,
            mask=(row < group)[:, None] & inner[None, :],
        )
    else:
        # A divisor of 0 stands only where nothing was seen, in rows that come out as zeros.
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        result = tl.where((sound != 0), result, 0.0)
        tl.store(
            output + (place * (kv_heads * group) + head)[:, None] * head_dim + column[None, :],
            result.to(output.dtype.element_ty),
            mask=wanted[:, None] & inner[None, :],
        )


@jit
def join_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    partial_peak: tl.tensor,
    partial_sum: tl.tensor,
    lengths: tl.tensor,
    flags: tl.tensor,
    splits: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    dim_pad: tl.constexpr,
    split_tokens: tl.constexpr,
) -> None:
    """Join the splits of one sequence and query head, in order; zeros for a flagged sequence.

    Grid: (sequences, heads).
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, dim_pad)
    inner = column < head_dim
    tokens = tl.load(lengths + sequence)
    raised = tl.load(flags + sequence)
    live = tl.where((raised == 0) & (tokens > 0), (tokens + split_tokens - 1) // split_tokens, 0)
    peak = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    result = tl.zeros([dim_pad], dtype=tl.float32)
    for part in range(tl.minimum(live, splits)):
        slot = (sequence.to(tl.int64) * splits + part) * heads + head
        its_peak = tl.load(partial_peak + slot)
        higher = tl.maximum(peak, its_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        grow = tl.exp2(its_peak - base)
        values = tl.load(partial + slot * head_dim + column, mask=inner, other=0.0)
        total = total * shrink + tl.load(partial_sum + slot) * grow
        result = result * shrink + values * grow
        peak = higher
    result = result / tl.where(total == 0.0, 1.0, total)
    place = output + (sequence.to(tl.int64) * heads + head) * head_dim + column
    tl.store(place, result.to(output.dtype.element_ty), mask=inner)
