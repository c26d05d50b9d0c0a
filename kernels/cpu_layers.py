"""What the phases of a compiled decode step do: projection, attention with its checks, norms.

Owns: what each phase reads and writes, and the header compare in the page loop.
Must not know: requests, grants, tensors; memory comes as addresses.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.cpu_compile import compiled
from kernels.cpu_elementwise import (
    add_rows,
    clear_row,
    exponentials,
    scale_by_weights,
    scale_row,
)
from kernels.cpu_memory import (
    WORD,
    ask_for,
    fetch_add,
    load_acquire,
    load_float,
    load_word,
    store_float,
    store_word,
)
from kernels.cpu_products import (
    FLOAT_BYTES,
    MINUS_INFINITY,
    attend_page,
    product,
    weigh,
)
from kernels.cpu_vector import LANES, dot
from kernels.headers import LOW_32
from kernels.layout import TRAILER_BYTES

PAIRS = 8
"""Rotated pairs of a head that are computed in one chunk: 16 weight rows."""

FLAG_WORDS = 8
"""int64 of each row's flag: how often a compare failed, then layer, logical page, page, both tags,
the place word and the filled word that the first failed compare found."""


class Shape(NamedTuple):
    """The model and the pool in numbers; sizes in bytes are named so."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocabulary: int
    page_tokens: int
    row_bytes: int
    block_bytes: int
    pages: int
    split_pages: int
    scale: float
    epsilon: float


class Weights(NamedTuple):
    """Addresses. layers: of int64 [layers, 14], as WEIGHT_FIELDS lists them and then the scales of
    MATRIX_FIELDS; 0 for none, and for the scales of what is float32.
    """

    layers: int
    norm: int
    head: int
    head_scales: int


WEIGHT_FIELDS = (
    "input_norm", "qkv", "output", "mlp_norm", "gate_up", "down",
    "qkv_bias", "output_bias", "gate_up_bias", "down_bias",
)  # fmt: skip
MATRIX_FIELDS = ("qkv", "output", "gate_up", "down")
INPUT_NORM, QKV, OUTPUT, MLP_NORM, GATE_UP, DOWN = range(6)
QKV_BIAS, OUTPUT_BIAS, GATE_UP_BIAS, DOWN_BIAS = range(6, 10)
QKV_SCALES, OUTPUT_SCALES, GATE_UP_SCALES, DOWN_SCALES = range(10, 14)


class Arena(NamedTuple):
    """Addresses of working memory, float32 unless said otherwise.

    hidden [rows, hidden]; query [rows, heads, head_dim]; gated [rows, mlp]; logits
    [rows, vocabulary]; cosines, sines [rows, head_dim / 2]; sums [splits, heads, head_dim],
    highest, totals [splits, heads]; ones [page_tokens] of 1.0; scratch: `scratch_bytes` for each thread, of
    which the first `inputs_bytes` hold a phase's input rows; counters: COUNTER_BYTES of `kernels.cpu_step` a phase;
    flags: int64 [rows, FLAG_WORDS].
    """

    hidden: int
    query: int
    gated: int
    logits: int
    cosines: int
    sines: int
    sums: int
    highest: int
    totals: int
    ones: int
    scratch: int
    scratch_bytes: int
    inputs_bytes: int
    counters: int
    flags: int


class Plan(NamedTuple):
    """What a step reads and writes; addresses of int64.

    pool: the pool's first byte. tables, tags: [rows, table_pages], page and expected tag of each
    logical page; pages are those that `engine.step_plan.live_table` found to lie in the pool, and
    nothing here looks again. starts: [rows], tokens that stand in the pages already; the step adds one.
    splits: [splits + 1, 2], row and first logical page of each part of a context.
    first_split: [rows + 1].
    checked: 1; a benchmark alone passes 0 to see what the compare costs.
    """

    rows: int
    pool: int
    tables: int
    tags: int
    table_pages: int
    starts: int
    splits: int
    first_split: int
    split_count: int
    checked: int


@compiled
def flag(
    a: Arena, row: int, layer: int, logical: int, page: int, block: int, block_bytes: int
) -> None:
    """Raise a row's flag; the first who does so says what was found."""
    place = a.flags + row * FLAG_WORDS * WORD
    if fetch_add(place, 1) == 0:
        store_word(place + WORD, layer)
        store_word(place + 2 * WORD, logical)
        store_word(place + 3 * WORD, page)
        store_word(place + 4 * WORD, load_word(block))
        store_word(place + 5 * WORD, load_word(block + block_bytes - WORD))
        store_word(place + 6 * WORD, load_word(block + WORD))
        store_word(place + 7 * WORD, load_word(block + 2 * WORD))


@compiled
def flagged(a: Arena, row: int) -> bool:
    return bool(load_acquire(a.flags + row * FLAG_WORDS * WORD) != 0)


@compiled
def sound_block(
    s: Shape, p: Plan, a: Arena, row: int, layer: int, logical: int, checked: int
) -> int:
    """Address of a page's block if it bears what the table says, else 0 with the flag raised."""
    page = load_word(p.tables + (row * p.table_pages + logical) * WORD)
    block = p.pool + (layer * s.pages + page) * s.block_bytes
    if checked == 0:
        return block
    tag = load_word(p.tags + (row * p.table_pages + logical) * WORD)
    owned = load_word(p.starts + row * WORD) - logical * s.page_tokens
    filled = load_word(block + 2 * WORD) & LOW_32
    if (
        load_word(block) != tag
        or load_word(block + s.block_bytes - WORD) != tag
        or load_word(block + WORD) != (layer | (logical << 32))
        or filled < min(owned, s.page_tokens)
        or filled > s.page_tokens
    ):
        flag(a, row, layer, logical, page, block, s.block_bytes)
        return 0
    return block


@compiled
def ask_for_headers(s: Shape, p: Plan, row: int, layer: int, logical: int) -> None:
    """Have the two lines fetched that `sound_block` will look at."""
    page = load_word(p.tables + (row * p.table_pages + logical) * WORD)
    block = p.pool + (layer * s.pages + page) * s.block_bytes
    ask_for(block)
    ask_for(block + s.block_bytes - WORD)


@compiled
def normalise(s: Shape, p: Plan, a: Arena, inputs: int, weight: int) -> None:
    """The rows of `hidden`, each by its own root mean square, into this thread's inputs."""
    width = s.hidden * FLOAT_BYTES
    for row in range(p.rows):
        source = a.hidden + row * width
        squares = dot(source, source, s.hidden)
        factor = (squares / s.hidden + s.epsilon) ** -0.5
        scale_by_weights(source, factor, weight, inputs + row * width, s.hidden)


@compiled
def bias(bias: int, column: int, columns: int, rows: int, out: int, out_stride: int) -> None:
    if bias != 0:
        for row in range(rows):
            place = out + row * out_stride
            add_rows(place, bias + column * FLOAT_BYTES, place, columns)


@compiled
def project(
    s: Shape, p: Plan, a: Arena, w: tuple[int, ...], layer: int, chunk: int, inputs: int, work: int
) -> None:
    """Some pairs of one head of Q, K or V of all rows: product, rotation, and the append of K, V."""
    half = s.head_dim // 2
    parts = half // PAIRS
    head, first = chunk // parts, chunk % parts * PAIRS
    out_stride = 2 * PAIRS * FLOAT_BYTES
    column = head * s.head_dim + first
    for side in range(2):
        place = work + side * PAIRS * FLOAT_BYTES
        product(
            w[QKV], w[QKV_SCALES], column + side * half, PAIRS, inputs, p.rows, s.hidden,
            place, out_stride,
        )  # fmt: skip
    rotated = head < s.heads + s.kv_heads
    for row in range(p.rows):
        target, element = 0, s.heads * s.head_dim
        if head < s.heads:
            target = a.query + (row * element + column) * FLOAT_BYTES
        else:
            start = load_word(p.starts + row * WORD)
            logical = start // s.page_tokens
            block = sound_block(s, p, a, row, layer, logical, p.checked)
            if block == 0:
                continue
            # A row holds the heads of K, then those of V: columns behind Q in their order.
            token = (start % s.page_tokens + 1) * s.row_bytes - TRAILER_BYTES
            target = block + token + (column - element) * FLOAT_BYTES
        for pair in range(PAIRS):
            x = load_float(work + row * out_stride + pair * FLOAT_BYTES)
            y = load_float(work + row * out_stride + (PAIRS + pair) * FLOAT_BYTES)
            if w[QKV_BIAS] != 0:
                x += load_float(w[QKV_BIAS] + (column + pair) * FLOAT_BYTES)
                y += load_float(w[QKV_BIAS] + (column + pair + half) * FLOAT_BYTES)
            if rotated:
                angle = (row * half + first + pair) * FLOAT_BYTES
                cosine, sine = load_float(a.cosines + angle), load_float(a.sines + angle)
                x, y = x * cosine - y * sine, y * cosine + x * sine
            if head < s.heads:
                x, y = x * s.scale, y * s.scale
            store_float(target + pair * FLOAT_BYTES, x)
            store_float(target + (half + pair) * FLOAT_BYTES, y)


@compiled
def attend(s: Shape, p: Plan, a: Arena, layer: int, split: int, scores: int) -> None:
    """One part of one row's context: a running softmax over its pages, each compared first."""
    row = load_word(p.splits + 2 * split * WORD)
    first = load_word(p.splits + (2 * split + 1) * WORD)
    group = s.heads // s.kv_heads
    head_bytes = s.head_dim * FLOAT_BYTES
    sums = a.sums + split * s.heads * head_bytes
    highest = a.highest + split * s.heads * FLOAT_BYTES
    totals = a.totals + split * s.heads * FLOAT_BYTES
    for head in range(s.heads):
        store_float(highest + head * FLOAT_BYTES, MINUS_INFINITY)
        store_float(totals + head * FLOAT_BYTES, 0.0)
        clear_row(sums + head * head_bytes, s.head_dim)
    tokens = load_word(p.starts + row * WORD) + 1
    pages = (tokens + s.page_tokens - 1) // s.page_tokens
    scores_stride = (s.page_tokens + LANES - 1) // LANES * LANES * FLOAT_BYTES
    stop = min(first + s.split_pages, pages)
    for logical in range(first, stop):
        if p.checked != 0 and logical + 1 < stop:
            ask_for_headers(s, p, row, layer, logical + 1)
        block = sound_block(s, p, a, row, layer, logical, p.checked)
        if block == 0:
            continue
        count = min(s.page_tokens, tokens - logical * s.page_tokens)
        ahead = 0
        if logical + 1 < pages:
            table = p.tables + (row * p.table_pages + logical) * WORD
            ahead = (load_word(table + WORD) - load_word(table)) * s.block_bytes
        keys = block + s.row_bytes - TRAILER_BYTES
        for kv_head in range(s.kv_heads):
            head = kv_head * group
            attend_page(
                a.query + (row * s.heads + head) * head_bytes, group, s.head_dim,
                keys + kv_head * head_bytes, s.row_bytes, s.row_bytes // 2, ahead, count,
                scores, scores_stride, a.ones, sums + head * head_bytes,
                highest + head * FLOAT_BYTES, totals + head * FLOAT_BYTES,
            )  # fmt: skip


@compiled
def combine(s: Shape, p: Plan, a: Arena, inputs: int, work: int) -> None:
    """The parts of each row's context as one attention output, in this thread's inputs."""
    head_bytes = s.head_dim * FLOAT_BYTES
    for row in range(p.rows):
        first = load_word(p.first_split + row * WORD)
        count = load_word(p.first_split + (row + 1) * WORD) - first
        padded = (count + LANES - 1) // LANES * LANES
        for head in range(s.heads):
            out = inputs + (row * s.heads + head) * head_bytes
            clear_row(out, s.head_dim)
            if flagged(a, row):
                continue
            top = MINUS_INFINITY
            for part in range(padded):
                value = MINUS_INFINITY
                if part < count:
                    value = load_float(a.highest + ((first + part) * s.heads + head) * FLOAT_BYTES)
                store_float(work + part * FLOAT_BYTES, value)
                top = max(top, value)
            exponentials(work, padded, top)
            total = 0.0
            for part in range(count):
                place = a.totals + ((first + part) * s.heads + head) * FLOAT_BYTES
                total += load_float(place) * load_float(work + part * FLOAT_BYTES)
            values = a.sums + (first * s.heads + head) * head_bytes
            weigh(work, count, values, s.heads * head_bytes, out, s.head_dim)
            scale_row(out, 1.0 / total, s.head_dim)
