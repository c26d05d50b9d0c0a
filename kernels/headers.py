"""Page headers: how they are written, and the compare that guards every read.

It owns the meaning of the header and trailer words.
It must not decide what a mismatch leads to: it reports one as data.

Words are little-endian and 64 bits wide:

    header 0   tag, never 0
    header 1   layer | position << 32      position is the logical page number in the request
    header 2   filled | algorithm << 32    algorithm of the digest, 0 where the page bears none
    header 3   digest                      0 on a page that is still filling
    header 4.. zero
    trailer    seven zero words, then the tag
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.digest import ALGORITHM_WSUM32, to_signed, to_unsigned
from kernels.layout import PageMemory

LOW_32 = 0xFFFFFFFF

HeaderField = Literal[
    "head_tag", "tail_tag", "layer", "position", "filled", "algorithm", "digest", "padding"
]

READ_FIELDS: tuple[HeaderField, ...] = ("head_tag", "tail_tag", "layer", "position", "filled")
"""What `check` compares, in the order in which a mismatch is named."""


class TagZeroError(ValueError):
    """A tag of 0 would make memory that nobody wrote look owned."""

    def __init__(self) -> None:
        super().__init__("tag is 0, required is 1 to 2**64 - 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderMismatch:
    """One block does not bear what its reader expects; tags and digests are unsigned."""

    page: int
    layer: int
    field: HeaderField
    expected: int
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderReport:
    """The outcome of one compare.

    checked: number of blocks compared (layers * pages).
    mismatches: for each bad entry of the page list, its index there and its first mismatch.
    """

    checked: int
    mismatches: tuple[tuple[int, HeaderMismatch], ...] = ()

    @property
    def first(self) -> HeaderMismatch | None:
        return self.mismatches[0][1] if self.mismatches else None


def tag_tensor(tag: int, count: int, device: torch.device | None = None) -> Tensor:
    """int64 `[count]` that holds one unsigned tag.

    Raises:
        TagZeroError: the tag is 0.
    """
    if tag == 0:
        raise TagZeroError
    return torch.full((count,), to_signed(tag), dtype=torch.int64, device=device)


def stamp(
    memory: PageMemory,
    pages: Tensor,
    *,
    tags: Tensor,
    positions: Tensor,
    filled: Tensor,
    digests: Tensor | None = None,
) -> None:
    """Write header and trailer of every layer of the given pages, zeros included.

    pages, tags, positions, filled: int64 `[N]`, tags in two's complement.
    digests: int64 `[layers, N]`, or None for open pages, which bear none.
    """
    words, header_words = memory.words, memory.layout.header_words
    layer = torch.arange(memory.layout.layers, device=words.device)[:, None]
    header = torch.zeros(
        (memory.layout.layers, pages.numel(), header_words), dtype=torch.int64, device=words.device
    )
    header[:, :, 0] = tags
    header[:, :, 1] = layer | (positions << 32)
    header[:, :, 2] = filled
    if digests is not None:
        header[:, :, 2] |= ALGORITHM_WSUM32 << 32
        header[:, :, 3] = digests
    words[:, pages, :header_words] = header
    trailer = torch.zeros(
        (memory.layout.layers, pages.numel(), 8), dtype=torch.int64, device=words.device
    )
    trailer[:, :, 7] = tags
    words[:, pages, -8:] = trailer


def set_filled(memory: PageMemory, pages: Tensor, filled: Tensor) -> None:
    """Note that pages now hold `filled` tokens; an appended page is open and bears no digest."""
    memory.words[:, pages, 2] = filled.expand(memory.layout.layers, -1)
    memory.words[:, pages, 3] = 0


def read_fields(memory: PageMemory, pages: Tensor) -> Tensor:
    """int64 `[layers, N, 5]`: the found values of `READ_FIELDS`."""
    head = memory.words[:, :, :3].index_select(1, pages)
    tail = memory.words[:, :, -1].index_select(1, pages)
    place, filled = head[:, :, 1], head[:, :, 2]
    return torch.stack(
        (head[:, :, 0], tail, place & LOW_32, (place >> 32) & LOW_32, filled & LOW_32), dim=-1
    )


def check(
    memory: PageMemory,
    pages: Tensor,
    tags: Tensor,
    positions: Tensor,
    filled_min: Tensor,
) -> HeaderReport:
    """Compare both tags, layer, position and filled of `layers * N` blocks at once.

    pages, tags, positions, filled_min: int64 `[N]`. `filled` passes from `filled_min` to the
    page size. A mismatch is returned, never raised.
    """
    layers = memory.layout.layers
    words = memory.words
    head = words[:, :, :3].index_select(1, pages)
    tail = words[:, :, -1].index_select(1, pages)
    layer = torch.arange(layers, device=words.device)[:, None]
    filled = head[:, :, 2] & LOW_32
    bad = (
        (head[:, :, 0] != tags)
        | (tail != tags)
        | (head[:, :, 1] != (layer | (positions << 32)))
        | (filled < filled_min)
        | (filled > memory.layout.page_tokens)
    )
    checked = layers * pages.numel()
    if not bool(bad.any()):
        return HeaderReport(checked=checked)
    return HeaderReport(
        checked=checked,
        mismatches=_describe(memory, pages, tags, positions, filled_min, bad),
    )


def _describe(
    memory: PageMemory,
    pages: Tensor,
    tags: Tensor,
    positions: Tensor,
    filled_min: Tensor,
    bad: Tensor,
) -> tuple[tuple[int, HeaderMismatch], ...]:
    """Name the first mismatch of each bad entry; the slow path, taken once a violation is there."""
    found = read_fields(memory, pages)
    mismatches: list[tuple[int, HeaderMismatch]] = []
    for entry in torch.nonzero(bad.any(dim=0)).flatten().tolist():
        layer = int(torch.nonzero(bad[:, entry])[0])
        expected = (
            int(tags[entry]),
            int(tags[entry]),
            layer,
            int(positions[entry]),
            int(filled_min[entry]),
        )
        values = [int(value) for value in found[layer, entry]]
        for index, field in enumerate(READ_FIELDS):
            good = (
                expected[index] <= values[index] <= memory.layout.page_tokens
                if field == "filled"
                else values[index] == expected[index]
            )
            if not good:
                mismatches.append(
                    (
                        entry,
                        HeaderMismatch(
                            page=int(pages[entry]),
                            layer=layer,
                            field=field,
                            expected=to_unsigned(expected[index]),
                            found=to_unsigned(values[index]),
                        ),
                    )
                )
                break
    return tuple(mismatches)
