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
    step_rows,
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
    shape: tl.constexpr,
) -> tl.tensor:
    """First words and faults of the pages with these logical numbers; none behind the last live one.

    table: where the sequence's row of the block table begins.
    """
    needed = tl.minimum(tl.maximum(tokens - logical * shape.page_tokens, 0), shape.page_tokens)
    live = needed > 0
    page = tl.load(pages + table + logical, mask=live, other=-1)
    inside = (page >= 0) & (page < pool_pages)
    block = block_start(tl.where(inside, page, 0), layer, pool_pages, shape.block_words)
    if shape.checked:
        tag = tl.load(tags + table + logical, mask=live, other=0)
        fault = header_fault(words, block, inside, tag, layer, logical, needed, shape)
    else:
        fault = tl.where(inside, 0, PAGE)
    return block, tl.where(live, fault, 0)


@jit
def faults_between(
    first: tl.tensor,
    stop: tl.tensor,
    words: tl.tensor,
    pages: tl.tensor,
    tags: tl.tensor,
    table: tl.tensor,
    tokens: tl.tensor,
    layer: tl.tensor,
    pool_pages: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """The faults of the pages of some tiles, without a look at their rows."""
    chunks: tl.constexpr = (shape.page_tokens + shape.page_rows - 1) // shape.page_rows
    faults = tl.arange(0, shape.tile_span) * 0
    for tile in range(first, stop):
        logical = (tile // chunks) * shape.tile_span + tl.arange(0, shape.tile_span)
        _, fault = tile_pages(words, pages, tags, table, logical, tokens, layer, pool_pages, shape)
        faults |= fault
    return faults


@jit
def attend_tile(
    tile: tl.tensor,
    query: tl.tensor,
    seen: tl.tensor,
    reach: tl.tensor,
    words: tl.tensor,
    elements: tl.tensor,
    pages: tl.tensor,
    tags: tl.tensor,
    table: tl.tensor,
    tokens: tl.tensor,
    layer: tl.tensor,
    pool_pages: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    result: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Take the rows of a tile of pages into the running softmax; faulty pages have none.

    seen: the last token that each query row sees; reach: tokens that any of them sees.
    """
    chunks: tl.constexpr = (shape.page_tokens + shape.page_rows - 1) // shape.page_rows
    tile_tokens: tl.constexpr = shape.tile_span * shape.page_rows
    logical = (tile // chunks) * shape.tile_span + tl.arange(0, shape.tile_span)
    row_of_page = (tile % chunks) * shape.page_rows + tl.arange(0, shape.page_rows)
    block, fault = tile_pages(words, pages, tags, table, logical, tokens, layer, pool_pages, shape)
    token = tl.reshape(logical[:, None] * shape.page_tokens + row_of_page[None, :], [tile_tokens])
    usable = (fault == 0)[:, None] & (row_of_page < shape.page_tokens)[None, :]
    usable = tl.reshape(usable, [tile_tokens]) & (token < reach)
    offset = block[:, None] * shape.word_elements + shape.header_elements
    offset = tl.reshape(offset + row_of_page[None, :] * shape.row_elements, [tile_tokens])
    # A head begins at a multiple of 32 bytes; the reshape has hidden that from the compiler.
    offset = tl.multiple_of(offset + kv_head * shape.head_dim, 16)
    column = tl.arange(0, shape.dim_pad)
    mask = usable[:, None] & (column < shape.head_dim)[None, :]
    place = elements + offset[:, None] + column[None, :]
    keys = tl.load(place, mask=mask, other=0.0)
    values = tl.load(place + shape.row_elements // 2, mask=mask, other=0.0)
    if shape.widened:
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
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return fault, higher, total, result * shrink[:, None] + added


@jit
def tile_range(
    part: tl.tensor, live: tl.tensor, reach: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """The tiles whose rows a program reads, first and stop, and how many tiles are live."""
    chunks: tl.constexpr = (shape.page_tokens + shape.page_rows - 1) // shape.page_rows
    span_tokens: tl.constexpr = shape.tile_span * shape.page_tokens
    tiles = (live + span_tokens - 1) // span_tokens * chunks
    if shape.decode:
        first = part * shape.split_tiles
        stop = tl.minimum(first + shape.split_tiles, tiles)
    else:
        first = 0
        stop = tl.minimum((tl.maximum(reach, 0) + span_tokens - 1) // span_tokens * chunks, tiles)
    return first, stop, tiles


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
    shape: tl.constexpr,
) -> None:
    """Attention of a block of query rows of one sequence and KV head.

    Grid: (sequences, KV heads, splits or blocks of rows). queries: `[row_total, heads, head_dim]`.
    """
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    room = width * shape.page_tokens
    if shape.decode:
        tokens = tl.load(lengths + sequence)
        fits = (tokens >= 0) & (tokens <= room)
        count, first_row, block_first, written = tl.where(tokens > 0, 1, 0), sequence, 0, 1
    else:
        tokens, count, first_row, fits = step_rows(
            sequence, lengths, row_counts, first_rows, room, row_total, rows_max
        )
        block_first = part * shape.query_rows
        # Rows of a sequence whose lengths are wrong may be anybody's: they are left alone.
        written = tl.where(fits, count, 0)
    live = tl.where(fits & (count > block_first), tokens, 0)
    start = tokens - count

    # Row m is query row m // group_pad of the block, query head m % group_pad of the group.
    rows: tl.constexpr = shape.query_rows * shape.group_pad
    heads: tl.constexpr = shape.kv_heads * shape.group
    dim: tl.constexpr = shape.dim_pad
    row, column = tl.arange(0, rows), tl.arange(0, dim)
    query_row = block_first + row // shape.group_pad
    head = kv_head * shape.group + row % shape.group_pad
    wanted = (query_row < written) & (row % shape.group_pad < shape.group)
    wanted = wanted[:, None] & (column < shape.head_dim)[None, :]
    place = (first_row + query_row).to(tl.int64)
    source = place * query_stride + head * shape.head_dim
    query = tl.load(queries + source[:, None] + column[None, :], mask=wanted, other=0.0)
    if shape.widened:
        query = query.to(tl.float32)

    # What lies behind `reach` is compared and not read.
    reach = tl.minimum(tokens, start + block_first + shape.query_rows)
    first_tile, last_tile, tiles = tile_range(part, live, reach, shape)
    table = sequence.to(tl.int64) * width
    faults = tl.arange(0, shape.tile_span) * 0
    peak, total = tl.full([rows], float("-inf"), tl.float32), tl.zeros([rows], tl.float32)
    result = tl.zeros([rows, dim], dtype=tl.float32)
    for tile in range(first_tile, last_tile):
        fault, peak, total, result = attend_tile(
            tile, query, start + query_row, reach, words, elements, pages, tags, table, live,
            layer, pool_pages, kv_head, scale, peak, total, result, shape,
        )  # fmt: skip
        faults |= fault
    if not shape.decode:
        # Pages that only later rows see are compared too: a sequence is sound as a whole or not.
        faults |= faults_between(
            last_tile, tiles, words, pages, tags, table, live, layer, pool_pages, shape
        )
    bits = any_bits(faults) | tl.where(fits, 0, LENGTH)
    tl.atomic_or(flags + sequence, bits, mask=bits != 0)
    if shape.split:
        slot = (sequence.to(tl.int64) * tl.num_programs(2) + part) * heads + head
        tl.store(partial_peak + slot, peak, mask=row < shape.group)
        tl.store(partial_sum + slot, total, mask=row < shape.group)
        into = partial + slot[:, None] * shape.head_dim + column[None, :]
        tl.store(into, result, mask=wanted)
    else:
        sound = ((tl.load(flags + sequence) | bits) == 0) & (live > 0)
        # A sum of 0 stands only where nothing was seen, in rows that come out as zeros.
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        into = output + (place * heads + head)[:, None] * shape.head_dim + column[None, :]
        tl.store(into, tl.where(sound, result, 0.0).to(output.dtype.element_ty), mask=wanted)


@jit
def join_kernel(
    output: tl.tensor,
    partial: tl.tensor,
    partial_peak: tl.tensor,
    partial_sum: tl.tensor,
    lengths: tl.tensor,
    flags: tl.tensor,
    splits: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Join the splits of one sequence and query head, in order; zeros for a flagged sequence.

    Grid: (sequences, heads).
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    dim: tl.constexpr = shape.dim_pad
    column = tl.arange(0, dim)
    inner = column < shape.head_dim
    tokens = tl.load(lengths + sequence)
    live = tl.where((tl.load(flags + sequence) == 0) & (tokens > 0), tokens, 0)
    parts = tl.minimum((live + shape.split_tokens - 1) // shape.split_tokens, splits)
    peak = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    result = tl.zeros([dim], dtype=tl.float32)
    for part in range(parts):
        slot = (sequence.to(tl.int64) * splits + part) * shape.heads + head
        its_peak = tl.load(partial_peak + slot)
        higher = tl.maximum(peak, its_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, grow = tl.exp2(peak - base), tl.exp2(its_peak - base)
        values = tl.load(partial + slot * shape.head_dim + column, mask=inner, other=0.0)
        total = total * shrink + tl.load(partial_sum + slot) * grow
        result = result * shrink + values * grow
        peak = higher
    result = result / tl.where(total == 0.0, 1.0, total)
    into = output + (sequence.to(tl.int64) * shape.heads + head) * shape.head_dim + column
    tl.store(into, result.to(output.dtype.element_ty), mask=inner)
