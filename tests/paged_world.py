"""Pools with a few sequences in scattered pages, and what attention over them must give.

Keys and values are kept beside the pool, so that what is expected is never read from a page.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kernels import headers
from kernels.digest import to_signed
from kernels.layout import PageLayout, PageMemory
from kernels.tables import PageTables

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Absolute, for values drawn from a normal distribution; broken kernels are further off."""


@attrs.define(eq=False)
class World:
    """Sequences in a poisoned pool: every byte that nobody wrote is part of a NaN.

    stored: tokens of each sequence that lie in the pool; keys, values: `[layers, tokens, ...]` of
    each sequence, those to come included.
    """

    layout: PageLayout
    memory: PageMemory
    pages: list[list[int]]
    tags: list[int]
    stored: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    generator: torch.Generator

    def tables(self, rows: Sequence[int], *, tokens: Sequence[int] | None = None) -> PageTables:
        """Tables in which each sequence holds `tokens`, by default what is stored."""
        tags = [[tag] * len(pages) for tag, pages in zip(self.tags, self.pages, strict=True)]
        return PageTables.of(self.pages, tags, tokens=tokens or self.stored, rows=rows)

    def draw(self, rows: int, heads: int) -> Tensor:
        shape = (rows, heads, self.layout.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.layout.dtype)

    def expected(self, sequence: int, layer: int, queries: Tensor, *, tokens: int) -> Tensor:
        """Softmax attention of the last rows of a sequence of `tokens` tokens, in float64."""
        count, heads, head_dim = queries.shape
        group = heads // self.layout.kv_heads
        keys = self.keys[sequence][layer, :tokens].double().repeat_interleave(group, 1)
        values = self.values[sequence][layer, :tokens].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,thd->hqt", queries.double(), keys) / head_dim**0.5
        seen = torch.arange(tokens - count, tokens)
        scores[:, torch.arange(tokens)[None, :] > seen[:, None]] = float("-inf")
        return torch.einsum("hqt,thd->qhd", torch.softmax(scores, -1), values)

    def corrupt(self, layer: int, page: int, word: int, mask: int) -> None:
        """Flip bits of one word of a block."""
        self.memory.words[layer, page, word] ^= to_signed(mask)


def make_world(
    layout: PageLayout,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    room: Sequence[int] | None = None,
    spare: int = 3,
) -> World:
    """Sequences of these lengths; room: tokens that the pages of each hold, by default as many."""
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    size = layout.page_tokens
    counts = [layout.pages_for_tokens(tokens) for tokens in room or lengths]
    total = sum(counts) + spare
    memory = PageMemory.allocate(layout, total)
    memory.octets.fill_(0xFF)
    numbers = list(range(total))
    chance.shuffle(numbers)
    world = World(layout, memory, [], [], list(lengths), [], [], generator)
    for tokens, count in zip(lengths, counts, strict=True):
        pages = [numbers.pop() for _ in range(count)]
        # Tags that are NaN when read as floats, so that a score made of one would show.
        tag = 0x7FF8_0000_0000_0000 | chance.getrandbits(48) | 1
        shape = (layout.layers, max(1, count) * size, layout.kv_heads, layout.head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(layout.dtype) for _ in "kv")
        world.pages.append(pages)
        world.tags.append(tag)
        world.keys.append(keys)
        world.values.append(values)
        if not pages:
            continue
        positions = torch.arange(count)
        filled = (tokens - positions * size).clamp(0, size)
        headers.stamp(
            memory,
            torch.tensor(pages),
            tags=torch.full((count,), to_signed(tag)),
            positions=positions,
            filled=filled,
        )
        for token in range(tokens):
            row = pages[token // size] * layout.block_rows + token % size
            memory.rows[:, row, 0] = keys[:, token]
            memory.rows[:, row, 1] = values[:, token]
    return world
