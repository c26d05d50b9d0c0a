"""What the claims about the operations on pages share: the back end, faults, and calls into poison.

The claims run twice: over the plain-torch reference, and by `test_triton_interpreter` with Triton's
interpreter, where BACKEND is `triton`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import dispatch
from kernels.dispatch import Backend
from kernels.layout import PageLayout
from kernels.tables import Fault, PageLabels, PageTables, new_flags
from tests.paged_world import TOLERANCES, World

BACKEND: Backend = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "reference"
CPU = torch.device("cpu")
SMALL = PageLayout(layers=2, kv_heads=2, head_dim=16, page_tokens=8)

FIELDS = {
    Fault.HEAD_TAG: (0, 1 << 63),
    Fault.TAIL_TAG: (-1, 1),
    Fault.LAYER: (1, 1),
    Fault.POSITION: (1, 1 << 32),
    Fault.FILLED: (2, 1 << 3),
}
"""Which word and bits make each fault in a full page of 8 tokens."""


def decode(
    world: World, queries: Tensor, tables: PageTables | None = None, *, layer: int = 1
) -> tuple[Tensor, list[int]]:
    """Attention into an output of NaN, and the flags."""
    tables = tables or world.tables([1] * len(world.pages))
    return _attend(dispatch.decode_attention, world, queries, tables, layer)


def prefill(
    world: World, queries: Tensor, tables: PageTables, *, layer: int = 1
) -> tuple[Tensor, list[int]]:
    """Attention of chunks into an output of NaN, and the flags."""
    return _attend(dispatch.prefill_attention, world, queries, tables, layer)


def _attend(
    operation: Callable[..., Tensor], world: World, queries: Tensor, tables: PageTables, layer: int
) -> tuple[Tensor, list[int]]:
    flags = new_flags(tables.sequences, CPU)
    output = torch.full(queries.shape, math.nan, dtype=queries.dtype)
    operation(world.memory, layer, queries, tables, flags, output, backend=BACKEND)
    return output, flags.tolist()


def assert_decoded(world: World, queries: Tensor, output: Tensor, sequences: Sequence[int]) -> None:
    tolerance = TOLERANCES[world.layout.dtype]
    for sequence in sequences:
        tokens = world.stored[sequence]
        if tokens == 0:
            assert output[sequence].eq(0).all()
            continue
        expected = world.expected(sequence, 1, queries[sequence][None], tokens=tokens)[0]
        torch.testing.assert_close(output[sequence].double(), expected, rtol=0, atol=tolerance)


def labels_of(world: World, sequence: int = 0) -> PageLabels:
    pages, size = world.pages[sequence], world.layout.page_tokens
    filled = [min(size, world.stored[sequence] - n * size) for n in range(len(pages))]
    tags = [world.tags[sequence]] * len(pages)
    return PageLabels.of(pages, tags, positions=range(len(pages)), filled=filled)
