"""The page layout: where each byte of a KV pool stands, and tensor views over it.

It owns the arithmetic of blocks, headers, token rows and trailers.
It must not know who holds a page or what a tag stands for.

One pool is one buffer, `[layers][pages][block]`. A block is one layer of one page:

    header   row_bytes - 64 bytes   four 64-bit words, then zeros
    rows     page_tokens * row_bytes, each row `[K, V][kv_heads][head_dim]`
    trailer  64 bytes               seven zero words, then the tag

The trailer of a page and the header of the next one together are exactly one row, the *gap
row*, so the rows of a contiguous run of pages lie at one constant stride.
`docs/page-layout.md` is the prose of this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUT_VERSION = 1
"""Changes whenever a byte of a block changes its meaning or place."""

TRAILER_BYTES = 64
ALIGNMENT_BYTES = 64
WORD_BYTES = 8
MIN_HALF_ROW_BYTES = 128
MAX_PAGE_TOKENS = 1 << 16

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class LayoutUnsupportedError(ValueError):
    """A model or a page size does not fit the layout; the engine cannot start with it."""

    def __init__(self, *, quantity: str, value: int | str, required: str) -> None:
        super().__init__(f"{quantity} is {value}, required is {required}")
        self.quantity = quantity
        self.value = value
        self.required = required


class BufferUnsuitableError(ValueError):
    """A buffer is too small, misaligned or read-only for the pool that it shall carry."""

    def __init__(self, *, quantity: str, value: int, required: int) -> None:
        super().__init__(f"buffer {quantity} is {value}, required is {required}")
        self.quantity = quantity
        self.value = value
        self.required = required


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """The shape of one rank's pages; equal layouts mean interchangeable bytes.

    Raises:
        LayoutUnsupportedError: a count is not positive, half a row is shorter than 128 bytes,
            a row is no multiple of 64 bytes, or the dtype is unknown.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = 32
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise LayoutUnsupportedError(quantity=name, value=value, required="at least 1")
        if self.page_tokens > MAX_PAGE_TOKENS:
            raise LayoutUnsupportedError(
                quantity="page_tokens",
                value=self.page_tokens,
                required=f"at most {MAX_PAGE_TOKENS}",
            )
        if self.dtype not in _DTYPE_NAMES:
            raise LayoutUnsupportedError(
                quantity="dtype",
                value=str(self.dtype),
                required="one of " + ", ".join(_DTYPE_NAMES.values()),
            )
        if self.half_row_bytes < MIN_HALF_ROW_BYTES:
            raise LayoutUnsupportedError(
                quantity="kv_heads * head_dim * itemsize",
                value=self.half_row_bytes,
                required=f"at least {MIN_HALF_ROW_BYTES} bytes",
            )
        if self.row_bytes % ALIGNMENT_BYTES:
            raise LayoutUnsupportedError(
                quantity="row_bytes",
                value=self.row_bytes,
                required=f"a multiple of {ALIGNMENT_BYTES} bytes",
            )
        # The digest weighs 32-bit words by their index; products must stay below 2**63.
        if self.page_tokens * self.row_bytes // 4 >= 1 << 31:
            raise LayoutUnsupportedError(
                quantity="page_tokens * row_bytes",
                value=self.page_tokens * self.row_bytes,
                required=f"less than {1 << 33} bytes",
            )

    @property
    def half_row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V in one layer, and the stride between token rows."""
        return 2 * self.half_row_bytes

    @property
    def header_bytes(self) -> int:
        return self.row_bytes - TRAILER_BYTES

    @property
    def header_words(self) -> int:
        return self.header_bytes // WORD_BYTES

    @property
    def block_rows(self) -> int:
        """Rows between the same token of two neighbouring pages (token rows and the gap row)."""
        return self.page_tokens + 1

    @property
    def block_bytes(self) -> int:
        return self.block_rows * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.layers * self.block_bytes

    def pages_for_tokens(self, tokens: int) -> int:
        """The pages that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def block_offset(self, *, pages: int, layer: int, page: int) -> int:
        """Byte offset of one block in a pool of `pages` pages."""
        return (layer * pages + page) * self.block_bytes

    def run_spans(self, *, pages: int, start: int, count: int) -> tuple[tuple[int, int], ...]:
        """The (byte offset, byte length) of a contiguous run of pages, one span a layer."""
        return tuple(
            (self.block_offset(pages=pages, layer=layer, page=start), count * self.block_bytes)
            for layer in range(self.layers)
        )

    def canonical(self) -> str:
        """A text that is equal exactly for layouts whose bytes are interchangeable."""
        return (
            f"pages-v{LAYOUT_VERSION} layers={self.layers} kv_heads={self.kv_heads} "
            f"head_dim={self.head_dim} page_tokens={self.page_tokens} "
            f"dtype={_DTYPE_NAMES[self.dtype]}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class PageMemory:
    """Views over one buffer laid out as `[layers][pages][block]`; they share its memory.

    layout: the shape of a block.
    pages: number of pages (or of staging slots, which have the same shape).
    octets: uint8 `[pages * page_bytes]`, the whole buffer.
    words: int64 `[layers, pages, block_bytes / 8]`, for headers and trailers.
    data: int32 `[layers, pages, page_tokens * row_bytes / 4]`, the token rows as raw words.
    rows: dtype `[layers, pages * (page_tokens + 1) - 1, 2, kv_heads, head_dim]`; token `t` of page
        `p` is row `p * (page_tokens + 1) + t`, and the rows in between are gap rows.
    """

    layout: PageLayout
    pages: int
    octets: Tensor
    words: Tensor
    data: Tensor
    rows: Tensor

    @classmethod
    def over(cls, octets: Tensor, layout: PageLayout, pages: int) -> PageMemory:
        """Views over `octets` (uint8, one-dimensional); longer buffers are used in part.

        Raises:
            BufferUnsuitableError: the buffer is too small or not aligned to 64 bytes.
        """
        needed = pages * layout.page_bytes
        if pages < 1:
            raise BufferUnsuitableError(quantity="pages", value=pages, required=1)
        if octets.numel() < needed:
            raise BufferUnsuitableError(
                quantity="length in bytes", value=octets.numel(), required=needed
            )
        if octets.data_ptr() % ALIGNMENT_BYTES:
            raise BufferUnsuitableError(
                quantity="address modulo 64", value=octets.data_ptr() % ALIGNMENT_BYTES, required=0
            )
        octets = octets[:needed]
        shape = (layout.layers, pages, -1)
        row_words = layout.row_bytes // 4
        first_word = layout.header_bytes // 4
        data = octets.view(torch.int32).view(shape)[
            :, :, first_word : first_word + layout.page_tokens * row_words
        ]
        elements = octets.view(layout.dtype)
        half = layout.kv_heads * layout.head_dim
        rows = elements.as_strided(
            (layout.layers, pages * layout.block_rows - 1, 2, layout.kv_heads, layout.head_dim),
            (
                pages * layout.block_rows * 2 * half,
                2 * half,
                half,
                layout.head_dim,
                1,
            ),
            elements.storage_offset() + layout.header_bytes // layout.dtype.itemsize,
        )
        return cls(
            layout=layout,
            pages=pages,
            octets=octets,
            words=octets.view(torch.int64).view(shape),
            data=data,
            rows=rows,
        )

    @classmethod
    def allocate(
        cls, layout: PageLayout, pages: int, device: torch.device | None = None
    ) -> PageMemory:
        """Fresh private memory, not cleared, for staging, for pools on a GPU, and for tests."""
        size = pages * layout.page_bytes + ALIGNMENT_BYTES
        octets = torch.empty(size, dtype=torch.uint8, device=device)
        skip = -octets.data_ptr() % ALIGNMENT_BYTES
        return cls.over(octets[skip:], layout, pages)


def contiguous_start(pages: Tensor) -> int | None:
    """The first page where the pages are one ascending run, None where they are scattered."""
    count = pages.numel()
    if count == 0:
        return None
    first = int(pages[0])
    run = torch.arange(first, first + count, dtype=pages.dtype, device=pages.device)
    return first if torch.equal(pages, run) else None


def select_pages(blocks: Tensor, pages: Tensor) -> Tensor:
    """Some of `blocks` by their first index: a view of a contiguous run, a copy of scattered ones.

    blocks: `[pages of the pool, ...]`; pages: int64 `[N]`. Nobody may write into the result.
    """
    first = contiguous_start(pages)
    if first is None:
        return blocks.index_select(0, pages)
    return blocks[first : first + pages.numel()]
