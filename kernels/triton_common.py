"""What the Triton kernels share: the header check of pages, and the digest's mixing.

It owns the device code of both. It must not know what a kernel does with a page that passed.

Kernels are compiled for a GPU, or run by Triton's interpreter where TRITON_INTERPRET=1 was set
before Triton was imported. Two things follow from the interpreter: masks are made from values
by `tl.where`, and products of bfloat16 are taken in float32, which the interpreter gets wrong
otherwise (the products themselves are exact either way).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from kernels.tables import Fault

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""`triton.jit`, typed."""

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in the interpreter, on tensors of the CPU."""

HEAD_TAG = tl.constexpr(int(Fault.HEAD_TAG))
TAIL_TAG = tl.constexpr(int(Fault.TAIL_TAG))
LAYER = tl.constexpr(int(Fault.LAYER))
POSITION = tl.constexpr(int(Fault.POSITION))
FILLED = tl.constexpr(int(Fault.FILLED))
PAGE = tl.constexpr(int(Fault.PAGE))
LENGTH = tl.constexpr(int(Fault.LENGTH))
DIGEST = tl.constexpr(int(Fault.DIGEST))
LOW_32 = tl.constexpr(0xFFFFFFFF)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


@jit
def block_start(
    page: tl.tensor, layer: tl.tensor, pool_pages: tl.tensor, block_words: tl.constexpr
) -> tl.tensor:
    """The first word of a block, in 64 bits: pools outgrow 32."""
    # A layer of 1 reaches this as a constant, which has no method `to`.
    return (tl.cast(layer, tl.int64) * pool_pages + page.to(tl.int64)) * block_words


@jit
def header_fault(
    words: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
    tag: tl.tensor,
    layer: tl.tensor,
    position: tl.tensor,
    needed: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Fault bits of blocks that start at word `block`; where `inside` is false nothing is read.

    All but `words` and `layer` are equally shaped; `needed` is the number of tokens to be read.
    shape: any of `triton_shapes`, as everywhere in device code.
    """
    head = tl.load(words + block, mask=inside, other=0)
    place = tl.load(words + block + 1, mask=inside, other=0)
    filled = tl.load(words + block + 2, mask=inside, other=0) & LOW_32
    tail = tl.load(words + block + (shape.block_words - 1), mask=inside, other=0)
    found_layer = place & LOW_32
    found_position = (place >> 32) & LOW_32
    fault = tl.where((head != tag) | (tag == 0), HEAD_TAG, 0)
    fault |= tl.where(tail != tag, TAIL_TAG, 0)
    fault |= tl.where(found_layer != layer, LAYER, 0)
    fault |= tl.where(found_position != position, POSITION, 0)
    fault |= tl.where((filled < needed) | (filled > shape.page_tokens), FILLED, 0)
    return tl.where(inside, fault, PAGE)


@jit
def any_bits(fault: tl.tensor) -> tl.tensor:
    """The bits that are raised anywhere in a block of faults, as one number."""
    bits = tl.max(fault & HEAD_TAG, axis=0)
    bits |= tl.max(fault & TAIL_TAG, axis=0)
    bits |= tl.max(fault & LAYER, axis=0)
    bits |= tl.max(fault & POSITION, axis=0)
    bits |= tl.max(fault & FILLED, axis=0)
    bits |= tl.max(fault & PAGE, axis=0)
    return bits


@jit
def mix(value: tl.tensor) -> tl.tensor:
    """The splitmix64 step on uint64."""
    value = value + GAMMA
    value = (value ^ (value >> 30)) * MULTIPLY_1
    value = (value ^ (value >> 27)) * MULTIPLY_2
    return value ^ (value >> 31)


@jit
def sealed_digest(
    data: tl.tensor, tag: tl.tensor, layer: tl.tensor, position: tl.tensor, filled: tl.tensor
) -> tl.tensor:
    """int64: the digest of one block, never 0; all arguments are scalars, int64 or narrower."""
    place = layer.to(tl.int64) | (position.to(tl.int64) << 32)
    state = mix(tag.to(tl.uint64, bitcast=True))
    state = mix(state ^ place.to(tl.uint64, bitcast=True))
    state = mix(state ^ filled.to(tl.int64).to(tl.uint64, bitcast=True))
    state = mix(state ^ data.to(tl.uint64, bitcast=True))
    return tl.where(state == 0, 1, state).to(tl.int64, bitcast=True)


@jit
def step_rows(
    sequence: tl.tensor,
    lengths: tl.tensor,
    row_counts: tl.tensor,
    first_rows: tl.tensor,
    room: tl.tensor,
    row_total: tl.tensor,
    rows_max: tl.tensor,
) -> tl.tensor:
    """Tokens, rows and first row of a sequence, and whether they fit table and tensors."""
    tokens = tl.load(lengths + sequence)
    count = tl.load(row_counts + sequence)
    first_row = tl.load(first_rows + sequence)
    fits = (tokens >= 0) & (tokens <= room)
    fits &= (count >= 0) & (count <= tokens) & (count <= rows_max)
    fits &= (first_row >= 0) & (first_row <= row_total - count)
    return tokens, count, first_row, fits
