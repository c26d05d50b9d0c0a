"""Elementwise vector code for CPUs: exponentials, gates, scalings, sums and maxima of rows.

Owns: the arithmetic of each element.
Must not know: layers, pages, requests; addresses come as numbers, counts are multiples of LANES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu_compile import intrinsic
from kernels.cpu_vector import (
    INT32,
    INT64,
    LANES,
    VECTOR,
    Builder,
    Value,
    call,
    fma,
    fold,
    load,
    loop,
    splat,
    store,
    times,
)

# Cephes' coefficients of exp on [-ln2/2, ln2/2] in single precision (Moshier 1987).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOWEST, _HIGHEST, _LOG2_E, _LN2_HIGH, _LN2_LOW = (
    (-87.3, 88.3, 1.44269504088896341, 0.693359375, -2.12194440e-4)
)  # fmt: skip


def _vector(value: float) -> Value:
    return ir.Constant(VECTOR, [value] * LANES)


def _exponential(builder: Builder, x: Value) -> Value:
    # What is no number stays none: it must show in the logits.
    below = builder.fcmp_ordered("<", x, _vector(_LOWEST))
    x = builder.select(below, _vector(_LOWEST), x)
    above = builder.fcmp_ordered(">", x, _vector(_HIGHEST))
    x = builder.select(above, _vector(_HIGHEST), x)
    whole = call(builder, "rint", VECTOR, (builder.fmul(x, _vector(_LOG2_E)),))
    rest = fma(builder, whole, _vector(-_LN2_HIGH), x)
    rest = fma(builder, whole, _vector(-_LN2_LOW), rest)
    series = _vector(_EXP[0])
    for coefficient in _EXP[1:]:
        series = fma(builder, series, rest, _vector(coefficient))
    series = fma(builder, builder.fmul(series, rest), rest, rest)
    series = builder.fadd(series, _vector(1.0))
    integers = ir.VectorType(INT32, LANES)
    exponent = builder.add(builder.fptosi(whole, integers), ir.Constant(integers, [127] * LANES))
    shifted = builder.shl(exponent, ir.Constant(integers, [23] * LANES))
    return builder.fmul(series, builder.bitcast(shifted, VECTOR))


def _each(
    builder: Builder,
    count: Value,
    body: Callable[..., Value],
    out: Value,
    bases: Sequence[Value],
) -> Value:
    """`out[i] = body(base[i], ...)` for vectors of LANES elements."""

    def inside(index: Value, _: Sequence[Value]) -> list[Value]:
        offset = times(builder, index, 4 * LANES)
        values = [load(builder, builder.add(base, offset)) for base in bases]
        store(builder, body(*values), builder.add(out, offset))
        return []

    loop(builder, builder.sdiv(count, ir.Constant(INT64, LANES)), [], inside)
    return ir.Constant(INT64, 0)


@intrinsic
def exponentials(_context: Any, x: Any, count: Any, _shift: Any) -> Any:
    """`x[i] = exp(x[i] - shift)` in place for `count` float32 at `x`."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        x, count, shift = args
        by = splat(builder, shift)
        return _each(builder, count, lambda v: _exponential(builder, builder.fsub(v, by)), x, (x,))

    return types.int64(x, count, types.float32), generate


@intrinsic
def gate_silu(_context: Any, gate: Any, up: Any, out: Any, count: Any) -> Any:
    """`out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]` for `count` float32."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        gate, up, out, count = args

        def body(value: Value, other: Value) -> Value:
            below = builder.fadd(_exponential(builder, builder.fneg(value)), _vector(1.0))
            return builder.fmul(builder.fdiv(value, below), other)

        return _each(builder, count, body, out, (gate, up))

    return types.int64(gate, up, out, count), generate


@intrinsic
def add_rows(_context: Any, x: Any, y: Any, out: Any, count: Any) -> Any:
    """`out[i] = x[i] + y[i]` for `count` float32."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        x, y, out, count = args
        return _each(builder, count, builder.fadd, out, (x, y))

    return types.int64(x, y, out, count), generate


@intrinsic
def scale_row(_context: Any, x: Any, _factor: Any, count: Any) -> Any:
    """`x[i] = x[i] * factor` in place for `count` float32."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        x, factor, count = args
        by = splat(builder, factor)
        return _each(builder, count, lambda v: builder.fmul(v, by), x, (x,))

    return types.int64(x, types.float32, count), generate


@intrinsic
def clear_row(_context: Any, x: Any, count: Any) -> Any:
    """`x[i] = 0` for `count` float32, whatever stood there."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        x, count = args
        return _each(builder, count, lambda: _vector(0.0), x, ())

    return types.int64(x, count), generate


@intrinsic
def scale_by_weights(_context: Any, x: Any, _factor: Any, weight: Any, out: Any, count: Any) -> Any:
    """`out[i] = weight[i] * (x[i] * factor)` for `count` float32."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        x, factor, weight, out, count = args
        by = splat(builder, factor)

        def body(value: Value, weight: Value) -> Value:
            return builder.fmul(weight, builder.fmul(value, by))

        return _each(builder, count, body, out, (x, weight))

    return types.int64(x, types.float32, weight, out, count), generate


@intrinsic
def greatest(_context: Any, x: Any, count: Any) -> Any:
    """The greatest of `count` float32 at `x`; minus infinity for none."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        x, count = args

        def body(index: Value, values: Sequence[Value]) -> list[Value]:
            loaded = load(builder, builder.add(x, times(builder, index, 4 * LANES)))
            return [call(builder, "maxnum", VECTOR, (values[0], loaded))]

        steps = builder.sdiv(count, ir.Constant(INT64, LANES))
        (best,) = loop(builder, steps, [_vector(float("-inf"))], body)

        def larger(a: Value, b: Value) -> Value:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return fold(builder, best, larger)

    return types.float32(x, count), generate
