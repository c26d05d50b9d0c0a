"""The compiled functions that Python calls.

Owns: which they are, and the edition that their kept machine code belongs to.
Must not know: what they compute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels import (
    cpu_compile,
    cpu_elementwise,
    cpu_layers,
    cpu_memory,
    cpu_pack,
    cpu_products,
    cpu_step,
    cpu_vector,
    cpu_words,
)
from kernels.cpu_compile import edition, entry
from kernels.cpu_layers import Arena, Plan, Shape, Weights
from kernels.cpu_pack import Blocks

EDITION = edition(
    cpu_compile,
    cpu_elementwise,
    cpu_layers,
    cpu_memory,
    cpu_pack,
    cpu_products,
    cpu_step,
    cpu_vector,
    cpu_words,
)


def _make_walk(edition: int) -> Callable[[Shape, Weights, Plan, Arena, int], None]:
    @entry
    def walk(s: Shape, weights: Weights, p: Plan, a: Arena, thread: int) -> None:
        if edition >= 0:
            cpu_step.take_part(s, weights, p, a, thread)

    return walk


def _make_pack(edition: int) -> Callable[[Blocks], int]:
    @entry
    def pack(b: Blocks) -> int:
        return cpu_pack.pack_blocks(b) if edition >= 0 else 0

    return pack


def _make_verify(edition: int) -> Callable[[Blocks, int], int]:
    @entry
    def verify(b: Blocks, digests: int) -> int:
        return cpu_pack.verify_blocks(b, digests) if edition >= 0 else 0

    return verify


walk = _make_walk(EDITION)
"""`kernels.cpu_step.take_part`."""

pack = _make_pack(EDITION)
"""`kernels.cpu_pack.pack_blocks`."""

verify = _make_verify(EDITION)
"""`kernels.cpu_pack.verify_blocks`."""

KEPT = cpu_compile.CAN_BE_KEPT
"""Whether machine code is kept for the next process."""


def prepare() -> None:
    """Compile, or read what was kept, by calling everything with nothing to do."""
    room = torch.zeros(64, dtype=torch.int64)
    sizes = dict.fromkeys(Shape._fields, 1)
    shape = Shape(**sizes)._replace(layers=0, vocabulary=0, scale=1.0, epsilon=1.0)
    # The addresses of the layer before the first are read, though nothing is done with them.
    weights = Weights(room.data_ptr() + room.nbytes // 2, 0, 0, 0)
    arena = Arena(**dict.fromkeys(Arena._fields, 0))._replace(counters=room.data_ptr())
    walk(shape, weights, Plan(*[0] * len(Plan._fields)), arena, 0)
    nothing = Blocks(*[0] * len(Blocks._fields))
    pack(nothing)
    verify(nothing, room.data_ptr())
