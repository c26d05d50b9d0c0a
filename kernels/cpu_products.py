"""Matrix products with few rows and attention over one page, out of the tiles of vector code.

Owns: how rows and columns are cut into tiles, and the running softmax.
Must not know: layers, requests, headers.

Every weight row is read from memory once, whatever the number of activation rows.
"""

from __future__ import annotations

from kernels.cpu_compile import compiled
from kernels.cpu_elementwise import exponentials, greatest, scale_row
from kernels.cpu_memory import load_float, store_float
from kernels.cpu_vector import COLUMNS, LANES, dot_tile, weigh_tile

FLOAT_BYTES = 4
MINUS_INFINITY = float("-inf")
# Values of a head that are weighed at a time; a head has a multiple of 16 elements.
_WIDE = 64 // LANES
_NARROW = 16 // LANES

dot_1_1 = dot_tile(1, 1)
_dot_2_1 = dot_tile(2, 1)
_dot_4_1 = dot_tile(4, 1)
_dot_1_n = dot_tile(1, COLUMNS)
_dot_2_n = dot_tile(2, COLUMNS)
_dot_4_n = dot_tile(4, COLUMNS)
_weigh_wide_1 = weigh_tile(1, _WIDE)
_weigh_wide_2 = weigh_tile(2, _WIDE)
_weigh_narrow_1 = weigh_tile(1, _NARROW)


@compiled
def product(
    w: int,
    w_stride: int,
    columns: int,
    x: int,
    x_stride: int,
    rows: int,
    length: int,
    out: int,
    out_stride: int,
) -> None:
    """`out[row, column]` is the dot product of activation `row` and weight `column`.

    Strides are in bytes; `columns` weights and `rows` activations of `length` float32 each.
    """
    ahead = COLUMNS * w_stride
    column = 0
    while column + COLUMNS <= columns:
        row = 0
        target = out + column * FLOAT_BYTES
        while row + 4 <= rows:
            sums = _dot_4_n(w, w_stride, x + row * x_stride, x_stride, length, ahead)
            for i in range(4):
                for j in range(COLUMNS):
                    place = target + (row + i) * out_stride + j * FLOAT_BYTES
                    store_float(place, sums[i * COLUMNS + j])
            row += 4
        if row + 2 <= rows:
            pair = _dot_2_n(w, w_stride, x + row * x_stride, x_stride, length, ahead)
            for i in range(2):
                for j in range(COLUMNS):
                    place = target + (row + i) * out_stride + j * FLOAT_BYTES
                    store_float(place, pair[i * COLUMNS + j])
            row += 2
        if row < rows:
            single = _dot_1_n(w, w_stride, x + row * x_stride, x_stride, length, ahead)
            for j in range(COLUMNS):
                store_float(target + row * out_stride + j * FLOAT_BYTES, single[j])
        w += COLUMNS * w_stride
        column += COLUMNS
    while column < columns:
        for row in range(rows):
            last = dot_1_1(w, w_stride, x + row * x_stride, x_stride, length, 0)
            store_float(out + row * out_stride + column * FLOAT_BYTES, last[0])
        w += w_stride
        column += 1


@compiled
def weigh(p: int, count: int, values: int, stride: int, out: int, head_dim: int) -> None:
    """`out[d] += sum over t of p[t] * values[t][d]` for one head."""
    done = 0
    while done + 64 <= head_dim:
        offset = done * FLOAT_BYTES
        _weigh_wide_1(p, 0, values + offset, stride, count, out + offset, 0)
        done += 64
    while done < head_dim:
        offset = done * FLOAT_BYTES
        _weigh_narrow_1(p, 0, values + offset, stride, count, out + offset, 0)
        done += 16


@compiled
def _weigh_two(
    p: int, p_stride: int, count: int, values: int, stride: int, out: int, head_dim: int
) -> None:
    """As `weigh` for two heads that share their values; the same sums."""
    out_stride = head_dim * FLOAT_BYTES
    done = 0
    while done + 64 <= head_dim:
        offset = done * FLOAT_BYTES
        _weigh_wide_2(p, p_stride, values + offset, stride, count, out + offset, out_stride)
        done += 64
    while done < head_dim:
        offset = done * FLOAT_BYTES
        for head in range(2):
            place = out + offset + head * out_stride
            _weigh_narrow_1(p + head * p_stride, 0, values + offset, stride, count, place, 0)
        done += 16


@compiled
def page_scores(
    queries: int,
    group: int,
    head_dim: int,
    keys: int,
    stride: int,
    count: int,
    scores: int,
    scores_stride: int,
) -> None:
    """Scores of `group` queries against the `count` keys of one page and KV head.

    What stands behind the last score, up to the next multiple of LANES, is minus infinity.
    """
    step = head_dim * FLOAT_BYTES
    head = 0
    while head < group:
        query = queries + head * step
        target = scores + head * scores_stride
        taken = 4 if group - head >= 4 else (2 if group - head >= 2 else 1)
        key = 0
        while key + COLUMNS <= count:
            place = keys + key * stride
            if taken == 4:
                four = _dot_4_n(place, stride, query, step, head_dim, 0)
                for i in range(4):
                    for j in range(COLUMNS):
                        at = target + i * scores_stride + (key + j) * FLOAT_BYTES
                        store_float(at, four[i * COLUMNS + j])
            elif taken == 2:
                two = _dot_2_n(place, stride, query, step, head_dim, 0)
                for i in range(2):
                    for j in range(COLUMNS):
                        at = target + i * scores_stride + (key + j) * FLOAT_BYTES
                        store_float(at, two[i * COLUMNS + j])
            else:
                one = _dot_1_n(place, stride, query, step, head_dim, 0)
                for j in range(COLUMNS):
                    store_float(target + (key + j) * FLOAT_BYTES, one[j])
            key += COLUMNS
        while key < count:
            for i in range(taken):
                last = dot_1_1(keys + key * stride, 0, query + i * step, 0, head_dim, 0)
                store_float(target + i * scores_stride + key * FLOAT_BYTES, last[0])
            key += 1
        padded = (count + LANES - 1) // LANES * LANES
        for i in range(taken):
            for behind in range(count, padded):
                store_float(target + i * scores_stride + behind * FLOAT_BYTES, MINUS_INFINITY)
        head += taken


@compiled
def attend_page(
    queries: int,
    group: int,
    head_dim: int,
    keys: int,
    stride: int,
    values_offset: int,
    count: int,
    scores: int,
    scores_stride: int,
    ones: int,
    sums: int,
    highest: int,
    totals: int,
) -> None:
    """Take one page of one KV head into the running softmax of `group` query heads.

    sums: float32 [group, head_dim], weighted values; highest, totals: float32 [group], the
    greatest score and the sum of exponentials, both as of the pages before.
    """
    page_scores(queries, group, head_dim, keys, stride, count, scores, scores_stride)
    padded = (count + LANES - 1) // LANES * LANES
    row = head_dim * FLOAT_BYTES
    for head in range(group):
        place = scores + head * scores_stride
        before = load_float(highest + head * FLOAT_BYTES)
        top = max(before, greatest(place, padded))
        exponentials(place, padded, top)
        # What stood behind the last score must add nothing.
        for behind in range(count, padded):
            store_float(place + behind * FLOAT_BYTES, 0.0)
        total = dot_1_1(place, 0, ones, 0, padded, 0)[0]
        if top > before:
            shrink = scores + group * scores_stride
            store_float(shrink, before)
            exponentials(shrink, LANES, top)
            factor = load_float(shrink)
            if before == MINUS_INFINITY:
                factor *= 0
            scale_row(sums + head * row, factor, head_dim)
            total += load_float(totals + head * FLOAT_BYTES) * factor
            store_float(highest + head * FLOAT_BYTES, top)
        else:
            total += load_float(totals + head * FLOAT_BYTES)
        store_float(totals + head * FLOAT_BYTES, total)
    head = 0
    values = keys + values_offset
    while head + 2 <= group:
        place = scores + head * scores_stride
        _weigh_two(place, scores_stride, count, values, stride, sums + head * row, head_dim)
        head += 2
    if head < group:
        weigh(scores + head * scores_stride, count, values, stride, sums + head * row, head_dim)
