"""Weighing and copying words on CPUs: the data part of the digest `wsum32`, in one pass.

Owns: the arithmetic of the weighted sum, and the mixing that seals it.
Must not know: pages, requests; addresses come as numbers, counts of words are multiples of 16.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, types, uint64

from kernels.cpu_compile import compiled, intrinsic
from kernels.cpu_vector import INT32, INT64, Builder, Value, loop, pointer, times

WORDS = 16
"""32-bit words taken at a time: one cache line."""

_NARROW = ir.VectorType(INT32, WORDS)
_WIDE = ir.VectorType(INT64, WORDS)


def _weigher(*, copies: bool) -> Any:
    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        source, target, count, first = args
        steps = builder.sdiv(count, ir.Constant(INT64, WORDS))
        start = builder.insert_element(
            ir.Constant(_NARROW, ir.Undefined),
            builder.trunc(builder.add(first, ir.Constant(INT64, 1)), INT32),
            ir.Constant(INT32, 0),
        )
        start = builder.shuffle_vector(
            start, ir.Constant(_NARROW, ir.Undefined), ir.Constant(_NARROW, [0] * WORDS)
        )
        start = builder.add(start, ir.Constant(_NARROW, list(range(WORDS))))

        def body(index: Value, carried: Any) -> list[Value]:
            total, weights = carried
            offset = times(builder, index, 4 * WORDS)
            place = pointer(builder, builder.add(source, offset), _NARROW)
            words = builder.load(place, align=4)
            if copies:
                place = pointer(builder, builder.add(target, offset), _NARROW)
                builder.store(words, place, align=4)
            # Weights stay below 2**31, so a product of two signed words is exact in 64 bits.
            product = builder.mul(builder.sext(words, _WIDE), builder.sext(weights, _WIDE))
            return [
                builder.add(total, product),
                builder.add(weights, ir.Constant(_NARROW, [WORDS] * WORDS)),
            ]

        zero = ir.Constant(_WIDE, [0] * WORDS)
        total, _ = loop(builder, steps, [zero, start], body)
        result = builder.extract_element(total, ir.Constant(INT32, 0))
        for lane in range(1, WORDS):
            result = builder.add(result, builder.extract_element(total, ir.Constant(INT32, lane)))
        return result

    @intrinsic
    def weigher(_context: Any, source: Any, target: Any, count: Any, first: Any) -> Any:
        return types.int64(source, target, count, first), generate

    return weigher


copy_and_weigh = _weigher(copies=True)
"""(source, target, count, first): copy words; the sum of `word[i] * (first + i + 1)` mod 2**64."""

weigh_words = _weigher(copies=False)
"""As `copy_and_weigh`, without the copy; the target is not looked at."""


@compiled
def mix(value: Any) -> Any:
    """`kernels.digest.mix` on an unsigned number."""
    state = uint64(value) + uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> uint64(27))) * uint64(0x94D049BB133111EB)
    return state ^ (state >> uint64(31))


@compiled
def seal(total: int, tag: int, place: int, filled: int) -> Any:
    """`kernels.digest.seal` for one block, in two's complement; `place` is layer and position as in the header."""
    state = mix(mix(tag) ^ uint64(place))
    state = mix(state ^ uint64(filled))
    state = mix(state ^ uint64(total))
    return int64(1) if state == uint64(0) else int64(state)
