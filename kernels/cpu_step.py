"""One decode step as one compiled walk over its phases, for any number of threads.

Owns: the order of phases, who does which chunk, and how threads wait for each other.
Must not know: requests, grants, tensors; memory comes as addresses.

A step is a list of phases, and a phase a number of chunks that do not touch each other's results.
Every thread walks the whole list: it takes chunks of a phase from a counter that all share until
there are none, waits until all have been done, and goes on.
A thread that comes late finds nothing left to do and holds up nobody.
Who does a chunk changes no bit of it, and neither do the other rows of the step.
"""

from __future__ import annotations

from numba import types

from kernels.cpu_compile import compiled
from kernels.cpu_elementwise import add_rows, gate_silu
from kernels.cpu_layers import (
    DOWN,
    DOWN_BIAS,
    DOWN_SCALES,
    GATE_UP,
    GATE_UP_BIAS,
    GATE_UP_SCALES,
    INPUT_NORM,
    MLP_NORM,
    OUTPUT,
    OUTPUT_BIAS,
    OUTPUT_SCALES,
    PAIRS,
    Arena,
    Plan,
    Shape,
    Weights,
    ask_for_headers,
    attend,
    bias,
    combine,
    flagged,
    normalise,
    project,
    sound_block,
)
from kernels.cpu_memory import WORD, fetch_add, load_acquire, load_word, store_word
from kernels.cpu_products import FLOAT_BYTES, product

COUNTER_BYTES = 128
"""Each phase's two counters have cache lines of their own."""

PHASES_OF_LAYER = 5
PHASES_BEHIND = 3
PROJECT, ATTEND, MIX, GATE, FOLD, HEAD, RECHECK, NOTE = range(8)

ROWS_OF_OUTPUT = 16
ROWS_OF_MLP = 32
ROWS_OF_HEAD = 128

AHEAD_PAGES = 8
"""Pages whose headers are on their way while one is looked at again."""

SPINS_MAX = 4000
"""Looks at a counter before the processor is offered to others."""

_yield_processor = types.ExternalFunction("sched_yield", types.intc())


@compiled
def _wait(counter: int, count: int) -> None:
    spins = 0
    while load_acquire(counter) < count:
        spins += 1
        if spins > SPINS_MAX:
            _yield_processor()


@compiled
def _residual(
    w: int,
    w_scales: int,
    w_bias: int,
    length: int,
    s: Shape,
    p: Plan,
    a: Arena,
    inputs: int,
    chunk: int,
    work: int,
) -> None:
    """Some columns of a product of all rows, added to `hidden`."""
    out_stride = ROWS_OF_OUTPUT * FLOAT_BYTES
    column = chunk * ROWS_OF_OUTPUT
    product(w, w_scales, column, ROWS_OF_OUTPUT, inputs, p.rows, length, work, out_stride)
    bias(w_bias, column, ROWS_OF_OUTPUT, p.rows, work, out_stride)
    for row in range(p.rows):
        place = a.hidden + (row * s.hidden + column) * FLOAT_BYTES
        add_rows(place, work + row * out_stride, place, ROWS_OF_OUTPUT)


@compiled
def _gate(
    w: tuple[int, ...], s: Shape, p: Plan, a: Arena, inputs: int, chunk: int, work: int
) -> None:
    """Some columns of the gated half of the MLP."""
    out_stride = 2 * ROWS_OF_MLP * FLOAT_BYTES
    column = chunk * ROWS_OF_MLP
    for side in range(2):
        first = column + side * s.mlp
        place = work + side * ROWS_OF_MLP * FLOAT_BYTES
        product(
            w[GATE_UP], w[GATE_UP_SCALES], first, ROWS_OF_MLP, inputs, p.rows, s.hidden,
            place, out_stride,
        )  # fmt: skip
        bias(w[GATE_UP_BIAS], first, ROWS_OF_MLP, p.rows, place, out_stride)
    for row in range(p.rows):
        place = work + row * out_stride
        target = a.gated + (row * s.mlp + column) * FLOAT_BYTES
        gate_silu(place, place + ROWS_OF_MLP * FLOAT_BYTES, target, ROWS_OF_MLP)


@compiled
def _logits(w: Weights, s: Shape, p: Plan, a: Arena, inputs: int, chunk: int) -> None:
    column = chunk * ROWS_OF_HEAD
    columns = min(ROWS_OF_HEAD, s.vocabulary - column)
    place = a.logits + column * FLOAT_BYTES
    product(
        w.head, w.head_scales, column, columns, inputs, p.rows, s.hidden,
        place, s.vocabulary * FLOAT_BYTES,
    )  # fmt: skip


@compiled
def _recheck(s: Shape, p: Plan, a: Arena, chunk: int) -> None:
    """All pages of one row in one layer once more, behind the last load of the step."""
    row, layer = chunk // s.layers, chunk % s.layers
    if p.checked != 0 and not flagged(a, row):
        start = load_word(p.starts + row * WORD)
        pages = start // s.page_tokens + 1
        for logical in range(min(AHEAD_PAGES, pages)):
            ask_for_headers(s, p, row, layer, logical)
        for logical in range(pages):
            if logical + AHEAD_PAGES < pages:
                ask_for_headers(s, p, row, layer, logical + AHEAD_PAGES)
            if sound_block(s, p, a, row, layer, logical, p.checked) == 0:
                return


@compiled
def _chunks(kind: int, s: Shape, p: Plan) -> int:
    if kind == PROJECT:
        return (s.heads + 2 * s.kv_heads) * (s.head_dim // 2 // PAIRS)
    if kind == ATTEND:
        return p.split_count
    if kind in (MIX, FOLD):
        return s.hidden // ROWS_OF_OUTPUT
    if kind == GATE:
        return s.mlp // ROWS_OF_MLP
    if kind == HEAD:
        return (s.vocabulary + ROWS_OF_HEAD - 1) // ROWS_OF_HEAD
    if kind == RECHECK:
        return p.rows * s.layers
    return p.rows


@compiled
def _weights_of(layers: int, layer: int) -> tuple[int, ...]:
    """The fourteen addresses of a layer."""
    base = layers + layer * 14 * WORD
    return (
        load_word(base), load_word(base + 8), load_word(base + 16), load_word(base + 24),
        load_word(base + 32), load_word(base + 40), load_word(base + 48), load_word(base + 56),
        load_word(base + 64), load_word(base + 72), load_word(base + 80), load_word(base + 88),
        load_word(base + 96), load_word(base + 104),
    )  # fmt: skip


@compiled
def _note_written(s: Shape, p: Plan, a: Arena, row: int) -> None:
    """Say in the headers of a sound row's last page that it holds one token more."""
    if flagged(a, row):
        return
    start = load_word(p.starts + row * WORD)
    logical = start // s.page_tokens
    page = load_word(p.tables + (row * p.table_pages + logical) * WORD)
    for layer in range(s.layers):
        block = p.pool + (layer * s.pages + page) * s.block_bytes
        # The algorithm's place is cleared with the digest: an appended page bears none.
        store_word(block + 2 * WORD, start % s.page_tokens + 1)
        store_word(block + 3 * WORD, 0)


@compiled
def take_part(s: Shape, weights: Weights, p: Plan, a: Arena, thread: int) -> None:
    """Do this thread's part of a step; every thread of a step calls it with a number of its own.

    The counters and flags must be zero before the first does, and nobody may touch the arena
    before the last has come back.
    """
    inputs = a.scratch + thread * a.scratch_bytes
    work = inputs + a.inputs_bytes
    last = s.layers * PHASES_OF_LAYER
    for phase in range(last + PHASES_BEHIND):
        kind, layer = phase % PHASES_OF_LAYER, phase // PHASES_OF_LAYER
        if phase >= last:
            kind, layer = HEAD + phase - last, s.layers - 1
        counter = a.counters + phase * COUNTER_BYTES
        done = counter + COUNTER_BYTES // 2
        count = _chunks(kind, s, p)
        w = _weights_of(weights.layers, layer)
        prepared = False
        while True:
            chunk = fetch_add(counter, 1)
            if chunk >= count:
                break
            if not prepared:
                prepared = True
                if kind == PROJECT:
                    normalise(s, p, a, inputs, w[INPUT_NORM])
                elif kind == MIX:
                    combine(s, p, a, inputs, work)
                elif kind == GATE:
                    normalise(s, p, a, inputs, w[MLP_NORM])
                elif kind == HEAD:
                    normalise(s, p, a, inputs, weights.norm)
            if kind == PROJECT:
                project(s, p, a, w, layer, chunk, inputs, work)
            elif kind == ATTEND:
                attend(s, p, a, layer, chunk, work)
            elif kind == MIX:
                length = s.heads * s.head_dim
                w_bias, scales = w[OUTPUT_BIAS], w[OUTPUT_SCALES]
                _residual(w[OUTPUT], scales, w_bias, length, s, p, a, inputs, chunk, work)
            elif kind == GATE:
                _gate(w, s, p, a, inputs, chunk, work)
            elif kind == FOLD:
                w_bias, scales = w[DOWN_BIAS], w[DOWN_SCALES]
                _residual(w[DOWN], scales, w_bias, s.mlp, s, p, a, a.gated, chunk, work)
            elif kind == HEAD:
                _logits(weights, s, p, a, inputs, chunk)
            elif kind == RECHECK:
                _recheck(s, p, a, chunk)
            else:
                _note_written(s, p, a, chunk)
            fetch_add(done, 1)
        _wait(done, count)
