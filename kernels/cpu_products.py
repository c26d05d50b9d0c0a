"""Matrix products with few rows and attention over one page, out of the tiles of vector code.

Owns: how rows and columns are cut into tiles, and the running softmax.
Must not know: layers, requests, headers.

Every weight row is read from memory once, whatever the number of activation rows.
"""

from __future__ import annotations

from kernels.cpu_compile import compiled
from kernels.cpu_elementwise import exponentials, greatest, scale_row
from kernels.cpu_memory import load_float, store_float
from kernels.cpu_vector import COLUMNS, LANES, dot, dot_tile, weigh_tile
from kernels.int8 import GROUP

FLOAT_BYTES = 4
MINUS_INFINITY = float("-inf")
# Values of a head that are weighed at a time; a head has a multiple of 16 elements.
_WIDE = 64 // LANES
_NARROW = 16 // LANES

_dot_1_1 = dot_tile(1, 1)
_byte_1_1 = dot_tile(1, 1, scaled=True)
_byte_1_n = dot_tile(1, COLUMNS, scaled=True)
_byte_2_n = dot_tile(2, COLUMNS, scaled=True)
_byte_3_n = dot_tile(3, COLUMNS, scaled=True)
_byte_4_n = dot_tile(4, COLUMNS, scaled=True)
_dot_1_n = dot_tile(1, COLUMNS)
_dot_2_n = dot_tile(2, COLUMNS)
_dot_3_n = dot_tile(3, COLUMNS)
_dot_4_n = dot_tile(4, COLUMNS)
_weigh_wide_1 = weigh_tile(1, _WIDE)
_weigh_wide_2 = weigh_tile(2, _WIDE)
_weigh_wide_3 = weigh_tile(3, _WIDE)
_weigh_narrow_1 = weigh_tile(1, _NARROW)


@compiled
def _tiles(
    w: int, w_stride: int, x: int, x_stride: int, rows: int, length: int, ahead: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    """COLUMNS weights against any number of rows."""
    row = 0
    while row + 4 <= rows:
        place = out + row * out_stride
        _dot_4_n(w, w_stride, 0, x + row * x_stride, x_stride, length, ahead, place, out_stride)
        row += 4
    inputs, place = x + row * x_stride, out + row * out_stride
    if rows - row == 3:
        _dot_3_n(w, w_stride, 0, inputs, x_stride, length, ahead, place, out_stride)
    elif rows - row == 2:
        _dot_2_n(w, w_stride, 0, inputs, x_stride, length, ahead, place, out_stride)
    elif rows - row == 1:
        _dot_1_n(w, w_stride, 0, inputs, x_stride, length, ahead, place, out_stride)


@compiled
def _byte_tiles(
    w: int, w_stride: int, scales: int, x: int, x_stride: int, rows: int, length: int, ahead: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    """As `_tiles`, for weights of int8."""
    row = 0
    while row + 4 <= rows:
        place, inputs = out + row * out_stride, x + row * x_stride
        _byte_4_n(w, w_stride, scales, inputs, x_stride, length, ahead, place, out_stride)
        row += 4
    inputs, place = x + row * x_stride, out + row * out_stride
    if rows - row == 3:
        _byte_3_n(w, w_stride, scales, inputs, x_stride, length, ahead, place, out_stride)
    elif rows - row == 2:
        _byte_2_n(w, w_stride, scales, inputs, x_stride, length, ahead, place, out_stride)
    elif rows - row == 1:
        _byte_1_n(w, w_stride, scales, inputs, x_stride, length, ahead, place, out_stride)


@compiled
def product(
    w: int, scales: int, first: int, columns: int, x: int, rows: int, length: int, out: int,
    out_stride: int,
) -> None:  # fmt: skip
    """`out[row, column]` is the dot product of activation `row` and weight row `first + column`.

    w: weight rows of `length` float32 or, where `scales` is not 0, of `length` int8, whose groups
    have their float32 in `scales` (`kernels.int8.Int8Matrix`); x: `rows` of `length` float32.
    All rows stand one behind the other; `out_stride` is in bytes.
    """
    x_stride = length * FLOAT_BYTES
    stride = x_stride if scales == 0 else length
    w += first * stride
    ahead = COLUMNS * x_stride
    scale_stride = (length + GROUP - 1) // GROUP * FLOAT_BYTES
    scale = scales + first * scale_stride
    column = 0
    while column + COLUMNS <= columns:
        place = out + column * FLOAT_BYTES
        if scales == 0:
            _tiles(w, stride, x, x_stride, rows, length, ahead, place, out_stride)
        else:
            _byte_tiles(w, stride, scale, x, x_stride, rows, length, ahead, place, out_stride)
        w += COLUMNS * stride
        scale += COLUMNS * scale_stride
        column += COLUMNS
    while column < columns:
        for row in range(rows):
            place = out + row * out_stride + column * FLOAT_BYTES
            if scales == 0:
                _dot_1_1(w, 0, 0, x + row * x_stride, 0, length, 0, place, 0)
            else:
                _byte_1_1(w, 0, scale, x + row * x_stride, 0, length, 0, place, 0)
        w += stride
        scale += scale_stride
        column += 1


@compiled
def weigh(p: int, count: int, values: int, stride: int, out: int, head_dim: int) -> None:
    """`out[d] += sum over t of p[t] * values[t][d]` for one head."""
    done = 0
    while done + 64 <= head_dim:
        offset = done * FLOAT_BYTES
        _weigh_wide_1(p, 0, values + offset, stride, count, 0, out + offset, 0)
        done += 64
    while done < head_dim:
        offset = done * FLOAT_BYTES
        _weigh_narrow_1(p, 0, values + offset, stride, count, 0, out + offset, 0)
        done += 16


@compiled
def _weigh_heads(
    heads: int, p: int, p_stride: int, count: int, values: int, stride: int, ahead: int, out: int,
    head_dim: int,
) -> None:  # fmt: skip
    """As `weigh` for one, two or three heads that share their values; the same sums."""
    out_stride = head_dim * FLOAT_BYTES
    done = 0
    while done + 64 <= head_dim:
        here, place = values + done * FLOAT_BYTES, out + done * FLOAT_BYTES
        if heads == 3:
            _weigh_wide_3(p, p_stride, here, stride, count, ahead, place, out_stride)
        elif heads == 2:
            _weigh_wide_2(p, p_stride, here, stride, count, ahead, place, out_stride)
        else:
            _weigh_wide_1(p, p_stride, here, stride, count, ahead, place, out_stride)
        done += 64
    while done < head_dim:
        offset = done * FLOAT_BYTES
        for head in range(heads):
            place, own = out + offset + head * out_stride, p + head * p_stride
            _weigh_narrow_1(own, 0, values + offset, stride, count, ahead, place, 0)
        done += 16


@compiled
def page_scores(
    queries: int, group: int, head_dim: int, keys: int, stride: int, ahead: int, count: int,
    scores: int, scores_stride: int,
) -> None:  # fmt: skip
    """Scores of `group` queries against the `count` keys of one page and KV head.

    What stands `ahead` bytes behind the keys is asked for on the way.
    What stands behind the last score, up to the next multiple of LANES, is minus infinity.
    """
    step = head_dim * FLOAT_BYTES
    key = 0
    while key + COLUMNS <= count:
        place = scores + key * FLOAT_BYTES
        here = keys + key * stride
        _tiles(here, stride, queries, step, group, head_dim, ahead, place, scores_stride)
        key += COLUMNS
    while key < count:
        for head in range(group):
            place = scores + head * scores_stride + key * FLOAT_BYTES
            _dot_1_1(keys + key * stride, 0, 0, queries + head * step, 0, head_dim, 0, place, 0)
        key += 1
    padded = (count + LANES - 1) // LANES * LANES
    for head in range(group):
        for behind in range(count, padded):
            store_float(scores + head * scores_stride + behind * FLOAT_BYTES, MINUS_INFINITY)


@compiled
def attend_page(
    queries: int,
    group: int,
    head_dim: int,
    keys: int,
    stride: int,
    values_offset: int,
    ahead: int,
    count: int,
    scores: int,
    scores_stride: int,
    ones: int,
    sums: int,
    highest: int,
    totals: int,
) -> None:
    """Take one page of one KV head into the running softmax of `group` query heads.

    ahead: bytes to the same head of the page that comes next, which is asked for on the way.
    sums: float32 [group, head_dim], weighted values; highest, totals: float32 [group], the
    greatest score and the sum of exponentials, both as of the pages before.
    """
    page_scores(queries, group, head_dim, keys, stride, ahead, count, scores, scores_stride)
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
        total = dot(place, ones, padded)
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
    while head < group:
        taken = min(3, group - head)
        place = scores + head * scores_stride
        _weigh_heads(
            taken, place, scores_stride, count, values, stride, ahead, sums + head * row, head_dim
        )
        head += taken
