"""Vector code for CPUs: the few inner loops of a decode step, written out as LLVM instructions.

Owns: the order of every floating-point operation of a dot product, a weighted sum, an exponential.
Must not know: layers, pages, requests; addresses and strides come as numbers, in bytes.

The order is fixed here and not left to a compiler: one row's result has the same bits whether
it is computed alone or beside others, because every tile, however many rows it has, adds the
same numbers in the same order into lanes of its own and folds the lanes by the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types

from kernels.cpu_compile import intrinsic
from kernels.int8 import GROUP

Builder = Any
Value = Any
Tile = Any
"""A function of addresses, strides and counts, for compiled code to call."""

FLOAT, INT8, INT32, INT64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _lanes() -> int:
    """How many float32 a vector register of this machine holds, 8 at least."""
    return 16 if binding.get_host_cpu_features().get("avx512f", False) else 8


LANES = _lanes()
"""Float32 values computed at a time; lengths must be multiples of it."""

COLUMNS = 4 if LANES == 16 else 2
"""Weight rows in a tile of a matrix product, as many as the registers of the machine carry."""

UNROLLED = 4
"""Vectors of a row that a product takes at a time."""

LINE_BYTES = 64
FLOAT_BYTES = 4

VECTOR = ir.VectorType(FLOAT, LANES)


def pointer(builder: Builder, address: Value, kind: Any) -> Value:
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Builder, address: Value) -> Value:
    return builder.load(pointer(builder, address, VECTOR), align=4)


def load_bytes(builder: Builder, address: Value) -> Value:
    """LANES int8 as float32, which is exact."""
    narrow = ir.VectorType(INT8, LANES)
    loaded = builder.load(pointer(builder, address, narrow), align=1)
    return builder.sitofp(builder.sext(loaded, ir.VectorType(INT32, LANES)), VECTOR)


def store(builder: Builder, value: Value, address: Value) -> None:
    builder.store(value, pointer(builder, address, VECTOR), align=4)


def splat(builder: Builder, value: Value) -> Value:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), zeros)


def call(builder: Builder, name: str, kind: Any, arguments: Sequence[Value]) -> Value:
    """An LLVM intrinsic over one type."""
    suffix = "f32" if kind is FLOAT else f"v{LANES}f32"
    function_type = ir.FunctionType(kind, [kind] * len(arguments))
    full = f"llvm.{name}.{suffix}"
    known = builder.module.globals.get(full)
    return builder.call(known or ir.Function(builder.module, function_type, full), arguments)


def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    return call(builder, "fma", VECTOR, (a, b, c))


def fold(builder: Builder, value: Value, join: Callable[[Value, Value], Value]) -> Value:
    """All lanes as one: the upper half is joined to the lower one until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(INT32, width)
        nothing = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(value, nothing, ir.Constant(kind, list(range(width))))
        high = builder.shuffle_vector(
            value, nothing, ir.Constant(kind, list(range(width, 2 * width)))
        )
        value = join(low, high)
    return builder.extract_element(value, ir.Constant(INT32, 0))


def loop(
    builder: Builder,
    count: Value,
    start: Sequence[Value],
    body: Callable[[Value, Sequence[Value]], Sequence[Value]],
) -> list[Value]:
    """`values = body(i, values)` for i from 0 to count - 1; the last values."""
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT64)
    index.add_incoming(ir.Constant(INT64, 0), before)
    carried = []
    for value in start:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        carried.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    results = body(index, carried)
    index.add_incoming(builder.add(index, ir.Constant(INT64, 1)), builder.block)
    for phi, result in zip(carried, results, strict=True):
        phi.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return list(carried)


def prefetch(builder: Builder, address: Value) -> None:
    byte = INT8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    known = builder.module.globals.get("llvm.prefetch.p0")
    function = known or ir.Function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(INT32, number) for number in (0, 3, 1)]
    builder.call(function, [builder.inttoptr(address, byte), *flags])


def times(builder: Builder, value: Value, factor: int) -> Value:
    return builder.mul(value, ir.Constant(INT64, factor))


def constant(number: int) -> Value:
    return ir.Constant(INT64, number)


def addresses_behind(builder: Builder, bases: Sequence[Value], offset: Value) -> list[Value]:
    return [builder.add(base, offset) for base in bases]


def addresses(builder: Builder, first: Value, stride: Value, count: int) -> list[Value]:
    return [builder.add(first, times(builder, stride, number)) for number in range(count)]


def _sums(builder: Builder, vectors: Sequence[Value]) -> Value:
    """The lanes of each vector added by the tree of `fold`, all results in one short vector.

    Two vectors are halved into one that holds the sums of both, and so on; so several sums cost
    little more than one.
    """
    left, width = list(vectors), LANES
    groups = 1
    while len(left) > 1 or width > 1:
        width //= 2
        two = len(left) > 1
        pairs = list(zip(left[::2], left[1::2], strict=True)) if two else [(left[0], left[0])]
        starts = [2 * width * group for group in range(groups)]
        if two:
            starts += [LANES + start for start in starts]
            groups *= 2
        kind = ir.VectorType(INT32, groups * width)
        low = ir.Constant(kind, [start + i for start in starts for i in range(width)])
        high = ir.Constant(kind, [start + width + i for start in starts for i in range(width)])
        left = [
            builder.fadd(builder.shuffle_vector(x, y, low), builder.shuffle_vector(x, y, high))
            for x, y in pairs
        ]
    return left[0]


def dot_tile(rows: int, columns: int, *, scaled: bool = False) -> Tile:
    """A tile of dot products of float32; `columns` is a power of two.

    The tile takes (w, w_stride, scales, x, x_stride, length, ahead, out, out_stride): `columns`
    weight rows from address `w` on, `rows` activation rows from address `x` on, all of `length`
    elements.
    It stores `out[row][column]`, and asks the memory for the bytes that stand `ahead` bytes behind
    those weights that it reads.
    scaled: a weight is int8 times the float32 scale of its GROUP neighbours, `scales` [columns,
    groups of a row]; otherwise weights are float32 and `scales` is not looked at.
    """

    @intrinsic
    def tile(
        _context: Any,
        w: Any,
        w_stride: Any,
        scales: Any,
        x: Any,
        x_stride: Any,
        length: Any,
        ahead: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
            w, w_stride, scales, x, x_stride, length, ahead, out, out_stride = args
            weights = addresses(builder, w, w_stride, columns)
            inputs = addresses(builder, x, x_stride, rows)
            by = addresses(builder, scales, scales_stride(builder, length), columns)
            sums = _dots(builder, weights, inputs, length, ahead, by if scaled else ())
            for row, place in enumerate(addresses(builder, out, out_stride, rows)):
                total = _sums(builder, sums[row * columns : (row + 1) * columns])
                builder.store(total, pointer(builder, place, total.type), align=4)
            return ir.Constant(INT64, 0)

        words = (w, w_stride, scales, x, x_stride, length, ahead, out, out_stride)
        return types.int64(*words), generate

    return tile


def scales_stride(builder: Builder, length: Value) -> Value:
    """Bytes of the scales of a row of `length` int8."""
    groups = builder.sdiv(builder.add(length, constant(GROUP - 1)), constant(GROUP))
    return times(builder, groups, FLOAT_BYTES)


def _dots(
    builder: Builder,
    weights: Sequence[Value],
    inputs: Sequence[Value],
    length: Value,
    ahead: Value,
    scales: Sequence[Value] = (),
) -> list[Value]:
    """A vector of partial sums for each input and weight, inputs first.

    scales: where those of each weight row begin, if weights are int8.
    Several vectors are taken at a time where there are so many, and then one by one: the order of
    the sums is the same.
    """
    columns = len(weights)
    element = 1 if scales else FLOAT_BYTES

    def widened(places: Sequence[Value], vector: Value) -> list[Value]:
        """The weights at these places; `vector` is how many vectors of a row stand before them."""
        if not scales:
            return [load(builder, place) for place in places]
        group = times(builder, builder.sdiv(vector, constant(GROUP // LANES)), FLOAT_BYTES)
        by = [
            builder.load(pointer(builder, base, FLOAT))
            for base in addresses_behind(builder, scales, group)
        ]
        return [
            builder.fmul(load_bytes(builder, place), splat(builder, scale))
            for place, scale in zip(places, by, strict=True)
        ]

    def several(count: int, first: Value) -> Callable[[Value, Sequence[Value]], list[Value]]:
        """The next `count` vectors; `first` is the number of vectors before the loop."""

        def body(index: Value, sums: Sequence[Value]) -> list[Value]:
            vector = builder.add(first, times(builder, index, count))
            places = addresses_behind(builder, weights, times(builder, vector, element * LANES))
            sources = addresses_behind(builder, inputs, times(builder, vector, FLOAT_BYTES * LANES))
            results = list(sums)
            for step in range(count):
                offset = step * LANES
                here = addresses_behind(builder, places, constant(element * offset))
                if element * offset % LINE_BYTES == 0:
                    for place in here:
                        prefetch(builder, builder.add(place, ahead))
                loaded = widened(here, builder.add(vector, constant(step)))
                for row, base in enumerate(sources):
                    value = load(builder, builder.add(base, constant(FLOAT_BYTES * offset)))
                    for column, weight in enumerate(loaded):
                        number = row * columns + column
                        results[number] = fma(builder, value, weight, results[number])
            return results

        return body

    zero = ir.Constant(VECTOR, [0.0] * LANES)
    vectors = builder.sdiv(length, constant(LANES))
    rounds = builder.sdiv(vectors, constant(UNROLLED))
    done = times(builder, rounds, UNROLLED)
    sums = loop(builder, rounds, [zero] * (columns * len(inputs)), several(UNROLLED, constant(0)))
    return loop(builder, builder.sub(vectors, done), sums, several(1, done))


@intrinsic
def dot(_context: Any, x: Any, y: Any, length: Any) -> Any:
    """The sum of `x[i] * y[i]`, as every tile adds it."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        x, y, length = args
        sums = _dots(builder, [y], [x], length, ir.Constant(INT64, 0))
        return fold(builder, sums[0], builder.fadd)

    return types.float32(x, y, length), generate


def weigh_tile(rows: int, vectors: int) -> Tile:
    """Weighted sums of value rows, added to what stands at their destination.

    The tile takes (p, p_stride, v, v_stride, count, ahead, out, out_stride): for each of `rows`
    rows of weights (float32, `count` of them), `vectors` * LANES elements of
    `out[row] += sum over t of p[row][t] * v[t]`, t ascending.
    It asks the memory for what stands `ahead` bytes behind the values that it reads.
    """

    @intrinsic
    def tile(
        _context: Any,
        p: Any,
        p_stride: Any,
        v: Any,
        v_stride: Any,
        count: Any,
        ahead: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
            p, p_stride, v, v_stride, count, ahead, out, out_stride = args
            weights = addresses(builder, p, p_stride, rows)
            bases = addresses(builder, out, out_stride, rows)
            wide = ir.Constant(INT64, 4 * LANES)
            places = [place for base in bases for place in addresses(builder, base, wide, vectors)]

            def body(index: Value, sums: Sequence[Value]) -> list[Value]:
                base = builder.add(v, builder.mul(index, v_stride))
                values = addresses(builder, base, wide, vectors)
                for value in values:
                    prefetch(builder, builder.add(value, ahead))
                loaded = [load(builder, value) for value in values]
                offset = times(builder, index, 4)
                results = []
                for row, weight in enumerate(weights):
                    scalar = builder.load(pointer(builder, builder.add(weight, offset), FLOAT))
                    factor = splat(builder, scalar)
                    for number, value in enumerate(loaded):
                        total = sums[row * vectors + number]
                        results.append(fma(builder, factor, value, total))
                return results

            sums = loop(builder, count, [load(builder, place) for place in places], body)
            for total, place in zip(sums, places, strict=True):
                store(builder, total, place)
            return ir.Constant(INT64, 0)

        return types.int64(p, p_stride, v, v_stride, count, ahead, out, out_stride), generate

    return tile
