"""Writing, checking, digesting and copying pages in Triton.

It owns the device code. It must not know how many programs are launched or for whom.

The digest is `wsum32` of `kernels.digest`, in the same 64-bit integers, so it is equal to the host's
to the bit. A copy reads its source once: the words go to the target and into the sum.
"""

from __future__ import annotations

import triton.language as tl

from kernels.triton_common import (
    DIGEST,
    FILLED,
    HEAD_TAG,
    LENGTH,
    LOW_32,
    PAGE,
    any_bits,
    block_start,
    header_fault,
    jit,
    sealed_digest,
    step_rows,
)


@jit
def write_kernel(
    keys: tl.tensor,
    values: tl.tensor,
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
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    row_total: tl.tensor,
    rows_max: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Store the rows of one sequence that fall into one of the pages that it appends to.

    Grid: (sequences, most pages that a sequence touches). Every program compares all pages that
    its sequence touches, so a sequence is written as a whole or not at all.
    keys, values: `[row_total, half]`.
    """
    sequence = tl.program_id(0)
    touched = tl.program_id(1)
    tokens, count, first_row, fits = step_rows(
        sequence, lengths, row_counts, first_rows, width * shape.page_tokens, row_total, rows_max
    )
    before = tl.load(flags + sequence)
    start = tokens - count
    count = tl.where(fits, count, 0)
    stop = start + count

    table = sequence.to(tl.int64) * width
    first_page = tl.where(count > 0, start // shape.page_tokens, 0)
    end_page = tl.where(count > 0, (stop + shape.page_tokens - 1) // shape.page_tokens, 0)
    logical = first_page + tl.arange(0, shape.touched_pad)
    wanted = logical < end_page
    page = tl.load(pages + table + logical, mask=wanted, other=-1)
    tag = tl.load(tags + table + logical, mask=wanted, other=0)
    inside = (page >= 0) & (page < pool_pages)
    block = block_start(tl.where(inside, page, 0), layer, pool_pages, shape.block_words)
    needed = tl.minimum(tl.maximum(start - logical * shape.page_tokens, 0), shape.page_tokens)
    fault = header_fault(words, block, inside, tag, layer, logical, needed, shape)
    bits = any_bits(tl.where(wanted, fault, 0)) | tl.where(fits, 0, LENGTH)
    tl.atomic_or(flags + sequence, bits, mask=bits != 0)

    mine = first_page + touched
    writes = ((bits | before) == 0) & (mine < end_page)
    own_page = tl.load(pages + table + mine, mask=writes, other=0)
    own_block = block_start(own_page, layer, pool_pages, shape.block_words)
    # The tokens of this page that the step brings, and the row of the first of them.
    low = tl.maximum(start, mine * shape.page_tokens)
    high = tl.where(writes, tl.minimum(stop, (mine + 1) * shape.page_tokens), low)
    base = own_block * shape.word_elements + shape.header_elements
    column = tl.arange(0, shape.half_pad)
    for first in range(0, high - low, shape.rows_pad):
        token = low + first + tl.arange(0, shape.rows_pad)
        source = (first_row + token - start).to(tl.int64)
        target = base + (token - mine * shape.page_tokens) * shape.row_elements
        mask = (token < high)[:, None] & (column < shape.half)[None, :]
        key = tl.load(keys + (source * key_stride)[:, None] + column[None, :], mask=mask)
        tl.store(elements + target[:, None] + column[None, :], key, mask=mask)
        value = tl.load(values + (source * value_stride)[:, None] + column[None, :], mask=mask)
        tl.store(elements + target[:, None] + shape.half + column[None, :], value, mask=mask)
    filled = (high - mine * shape.page_tokens).to(tl.int64)
    tl.store(words + own_block + 2, filled, mask=writes)
    tl.store(words + own_block + 3, filled * 0, mask=writes)


@jit
def check_kernel(
    words: tl.tensor,
    pages: tl.tensor,
    tags: tl.tensor,
    positions: tl.tensor,
    counts: tl.tensor,
    flags: tl.tensor,
    total: tl.tensor,
    pool_pages: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Compare the headers of `entries` pages in one layer. Grid: (pieces of the list, layers)."""
    entry = tl.program_id(0) * shape.entries + tl.arange(0, shape.entries)
    layer = tl.program_id(1)
    wanted = entry < total
    page = tl.load(pages + entry, mask=wanted, other=-1)
    tag = tl.load(tags + entry, mask=wanted, other=0)
    position = tl.load(positions + entry, mask=wanted, other=0)
    needed = tl.load(counts + entry, mask=wanted, other=0)
    fits = (needed >= 0) & (needed <= shape.page_tokens)
    inside = (page >= 0) & (page < pool_pages) & fits
    block = block_start(tl.where(inside, page, 0), layer, pool_pages, shape.block_words)
    fault = header_fault(words, block, inside, tag, layer, position, needed, shape)
    fault = tl.where(fits, fault, LENGTH)
    tl.atomic_or(flags + entry, fault, mask=wanted & (fault != 0))


@jit
def digest_kernel(
    data: tl.tensor,
    pages: tl.tensor,
    tags: tl.tensor,
    positions: tl.tensor,
    counts: tl.tensor,
    flags: tl.tensor,
    digests: tl.tensor,
    total: tl.tensor,
    pool_pages: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """The digest of one block. Grid: (pages, layers). data: the pool as int32."""
    entry = tl.program_id(0)
    layer = tl.program_id(1)
    page = tl.load(pages + entry)
    filled = tl.load(counts + entry)
    fault = tl.where((filled >= 0) & (filled <= shape.page_tokens), 0, LENGTH)
    fault = tl.where((page >= 0) & (page < pool_pages), fault, PAGE)
    sound = fault == 0
    block = block_start(tl.where(sound, page, 0), layer, pool_pages, shape.block_words)
    start = data + block * 2 + shape.header_words
    valid = tl.where(sound, filled * shape.row_words, 0)
    lane = tl.arange(0, shape.piece)
    sums = lane.to(tl.int64) * 0
    for first in range(0, valid, shape.piece):
        index = first + lane
        values = tl.load(start + index, mask=index < valid, other=0)
        sums += values.to(tl.int64) * (index + 1).to(tl.int64)
    found = sealed_digest(
        tl.sum(sums, axis=0), tl.load(tags + entry), layer, tl.load(positions + entry), filled
    )
    tl.store(digests + layer.to(tl.int64) * total + entry, tl.where(sound, found, 0))
    tl.atomic_or(flags + entry, fault, mask=fault != 0)


@jit
def named_again(
    targets: tl.tensor, total: tl.tensor, wanted: tl.tensor, lanes: tl.constexpr
) -> tl.tensor:
    """How many entries of a list of targets are `wanted`; 1 is the entry itself."""
    found = tl.zeros([lanes], dtype=tl.int32)
    for first in range(0, total, lanes):
        index = first + tl.arange(0, lanes)
        other = tl.load(targets + index, mask=index < total, other=-1)
        found += tl.where(other == wanted, 1, 0)
    return tl.sum(found, axis=0)


@jit
def copy_kernel(
    source: tl.tensor,
    source_words: tl.tensor,
    target: tl.tensor,
    target_words: tl.tensor,
    pages: tl.tensor,
    tags: tl.tensor,
    positions: tl.tensor,
    counts: tl.tensor,
    target_pages: tl.tensor,
    target_tags: tl.tensor,
    flags: tl.tensor,
    digests: tl.tensor,
    total: tl.tensor,
    source_total: tl.tensor,
    target_total: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Copy one block, sum it on the way, and seal the copy under another tag.

    Grid: (pages, layers). source, target: the buffers as int32; row_words and header_words count
    words of 32 bits, block_words those of 64.
    """
    entry = tl.program_id(0)
    layer = tl.program_id(1)
    page = tl.load(pages + entry)
    tag = tl.load(tags + entry)
    position = tl.load(positions + entry)
    filled = tl.load(counts + entry)
    aim = tl.load(target_pages + entry)
    new_tag = tl.load(target_tags + entry)

    aimed = (aim >= 0) & (aim < target_total)
    aimed &= named_again(target_pages, total, aim, 128) == 1
    fits = (filled >= 0) & (filled <= shape.page_tokens)
    inside = (page >= 0) & (page < source_total) & fits & aimed
    block = block_start(tl.where(inside, page, 0), layer, source_total, shape.block_words)
    fault = header_fault(source_words, block, inside, tag, layer, position, filled, shape)
    fault = tl.where(fits | (aimed == 0), fault, LENGTH)
    fault |= tl.where(aimed & (new_tag == 0), HEAD_TAG, 0)
    note = tl.load(source_words + block + 2, mask=inside, other=0)
    bears = tl.load(source_words + block + 3, mask=inside, other=0)
    if shape.sealed:
        fault |= tl.where(inside & ((note & LOW_32) != filled), FILLED, 0)
        fault |= tl.where(inside & (((note >> 32) & LOW_32) != 1), DIGEST, 0)

    # Without a right header nothing is loaded; the target's rows are zeroed then.
    valid = tl.where(fault == 0, filled * shape.row_words, 0)
    target_block = block_start(tl.where(aimed, aim, 0), layer, target_total, shape.block_words)
    start = source + block * 2 + shape.header_words
    place = target + target_block * 2 + shape.header_words
    all_words = tl.where(aimed, shape.page_tokens * shape.row_words, 0)
    lane = tl.arange(0, shape.piece)
    sums = lane.to(tl.int64) * 0
    for first in range(0, all_words, shape.piece):
        index = first + lane
        values = tl.load(start + index, mask=index < valid, other=0)
        tl.store(place + index, values, mask=index < all_words)
        sums += values.to(tl.int64) * (index + 1).to(tl.int64)
    data = tl.sum(sums, axis=0)
    if shape.sealed:
        found = sealed_digest(data, tag, layer, position, filled)
        fault |= tl.where(inside & (found != bears), DIGEST, 0)
    sound = fault == 0
    digest = tl.where(sound, sealed_digest(data, new_tag, layer, position, filled), 0)
    tl.store(digests + layer.to(tl.int64) * total + entry, digest)
    tl.atomic_or(flags + entry, fault, mask=fault != 0)

    word = tl.arange(0, shape.header_pad)
    where = layer.to(tl.int64) | (position.to(tl.int64) << 32)
    content = tl.where(word == 0, new_tag, 0)
    content = tl.where(word == 1, where, content)
    content = tl.where(word == 2, filled.to(tl.int64) | (1 << 32), content)
    content = tl.where(word == 3, digest, content)
    content = tl.where(sound, content, 0)
    mask = (word < shape.header_words // 2) & aimed
    tl.store(target_words + target_block + word, content, mask=mask)
    word = tl.arange(0, 8)
    content = tl.where(sound & (word == 7), new_tag, 0)
    last = target_words + target_block + (shape.block_words - 8) + word
    tl.store(last, content, mask=(word < 8) & aimed)
