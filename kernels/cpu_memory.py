"""Reading, writing and counting at addresses, for compiled code that several threads run.

Owns: the memory order of what threads share.
Must not know: what stands at an address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu_compile import intrinsic
from kernels.cpu_vector import FLOAT, INT64, Builder, Tile, Value, pointer, prefetch

WORD = 8
"""Bytes of an int64."""


@intrinsic
def fetch_add(_context: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address, atomically; what stood there before."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        place = pointer(builder, args[0], INT64)
        return builder.atomic_rmw("add", place, args[1], "acq_rel")

    return types.int64(address, amount), generate


@intrinsic
def load_acquire(_context: Any, address: Any) -> Any:
    """The int64 at an address; everything that its writer did before is seen."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        return builder.load_atomic(pointer(builder, args[0], INT64), "acquire", 8)

    return types.int64(address), generate


@intrinsic
def ask_for(_context: Any, address: Any) -> Any:
    """Have the cache line at an address fetched; an address that is not there does no harm."""

    def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        prefetch(builder, args[0])
        return ir.Constant(INT64, 0)

    return types.int64(address), generate


def _plain_load(kind: Any, numba_kind: Any) -> Tile:
    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
            return builder.load(pointer(builder, args[0], kind))

        return numba_kind(address), generate

    return load


def _plain_store(kind: Any, numba_kind: Any) -> Tile:
    @intrinsic
    def store(_context: Any, address: Any, _value: Any) -> Any:
        def generate(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
            builder.store(args[1], pointer(builder, args[0], kind))
            return ir.Constant(INT64, 0)

        return types.int64(address, numba_kind), generate

    return store


load_float: Callable[[int], float] = _plain_load(FLOAT, types.float32)
load_word: Callable[[int], int] = _plain_load(INT64, types.int64)
store_float: Callable[[int, float], int] = _plain_store(FLOAT, types.float32)
store_word: Callable[[int, int], int] = _plain_store(INT64, types.int64)
