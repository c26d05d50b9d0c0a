"""Packing pages for a remote write, and verifying pages that arrived.

It owns the copy from source pages into staging slots and the check of every byte on arrival.
It must not know how bytes travel or which grant a tag belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import compiled_code
from kernels.digest import (
    ALGORITHM_WSUM32,
    METHOD_WSUM32,
    data_sums,
    range_digest,
    seal,
    to_signed,
    to_unsigned,
)
from kernels.headers import (
    LOW_32,
    HeaderField,
    HeaderMismatch,
    TagZeroError,
    check,
    stamp,
    tag_tensor,
)
from kernels.layout import (
    LayoutUnsupportedError,
    PageLayout,
    PageMemory,
    contiguous_start,
    select_pages,
)


class PageListError(ValueError):
    """A list of pages, positions or counts does not fit its memory: a caller's defect."""

    def __init__(self, *, quantity: str, value: int, limit: int) -> None:
        super().__init__(f"{quantity} of a page list is {value}, the limit is {limit}")
        self.quantity = quantity
        self.value = value
        self.limit = limit


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What arrived.

    checked: number of blocks whose headers, padding and digests were compared.
    digest: the unsigned range digest over the recomputed block digests.
    mismatch: the first difference, or None.
    method: name of the digest algorithm, for the log.
    """

    checked: int
    digest: int
    mismatch: HeaderMismatch | None
    method: str = METHOD_WSUM32


def pack_plainly(
    source: PageMemory,
    source_pages: Tensor,
    destination: PageMemory,
    slots: Tensor,
    *,
    tag: int,
    positions: Tensor,
    filled: Tensor,
) -> int:
    """Fill staging slots with sealed copies of source pages that bear the destination's tag.

    source_pages, slots, positions, filled: int64 `[N]`; every filled row is copied, all other
    rows of a slot are zeroed, so stale bytes of another request are never shipped.
    The digests are of the source, not of the copy.
    Returns the unsigned range digest.

    Raises:
        LayoutUnsupportedError: source and destination differ in layout.
        TagZeroError: the tag is 0.
    """
    layout = source.layout
    _require_equal(layout, destination.layout)
    tags = tag_tensor(tag, slots.numel(), destination.words.device)
    sums = data_sums(source, source_pages, filled)
    row_words = layout.row_bytes // 4
    partial = torch.nonzero(filled < layout.page_tokens).flatten().tolist()
    counts = filled.tolist()
    first_slot = contiguous_start(slots)
    for layer in range(layout.layers):
        rows = select_pages(source.data[layer], source_pages)
        if first_slot is None:
            destination.data[layer].index_copy_(0, slots, rows)
        else:
            destination.data[layer, first_slot : first_slot + slots.numel()].copy_(rows)
    for entry in partial:
        # Stale rows of a page's earlier owner are never shipped.
        destination.data[:, int(slots[entry]), counts[entry] * row_words :] = 0
    digests = seal(sums, tags=tags, positions=positions, filled=filled)
    stamp(destination, slots, tags=tags, positions=positions, filled=filled, digests=digests)
    return range_digest(digests)


def verify_plainly(
    memory: PageMemory,
    pages: Tensor,
    *,
    tag: int,
    positions: Tensor,
    filled: Tensor,
) -> VerifyReport:
    """Check every byte of arrived pages: header, digest over filled rows, zeros everywhere else.

    pages, positions, filled: int64 `[N]`; `filled` must be met exactly.

    Raises:
        TagZeroError: the tag is 0.
    """
    tags = tag_tensor(tag, pages.numel(), memory.words.device)
    digests = seal(data_sums(memory, pages, filled), tags=tags, positions=positions, filled=filled)
    report = check(memory, pages, tags, positions, filled)
    mismatch = report.first or _arrival_mismatch(memory, pages, filled, digests)
    return VerifyReport(checked=report.checked, digest=range_digest(digests), mismatch=mismatch)


def pack(
    source: PageMemory,
    source_pages: Tensor,
    destination: PageMemory,
    slots: Tensor,
    *,
    tag: int,
    positions: Tensor,
    filled: Tensor,
) -> int:
    """As `pack_plainly`, in one pass over the blocks where they lie in a CPU's memory.

    Raises:
        LayoutUnsupportedError: source and destination differ in layout.
        TagZeroError: the tag is 0.
        PageListError: a list names a page outside its memory, or lists differ in length.
    """
    _require_equal(source.layout, destination.layout)
    code = compiled_code(source.words, destination.words)
    if code is None:
        return pack_plainly(
            source, source_pages, destination, slots, tag=tag, positions=positions, filled=filled
        )
    blocks, kept = _blocks(
        source, source_pages, (destination, slots), tag=tag, positions=positions, filled=filled
    )
    digest = to_unsigned(code.pack(blocks))
    del kept
    return digest


def verify(
    memory: PageMemory, pages: Tensor, *, tag: int, positions: Tensor, filled: Tensor
) -> VerifyReport:
    """As `verify_plainly`, in one pass over the blocks where they lie in a CPU's memory.

    Raises:
        TagZeroError: the tag is 0.
        PageListError: a list names a page outside the memory, or lists differ in length.
    """
    code = compiled_code(memory.words)
    if code is None:
        return verify_plainly(memory, pages, tag=tag, positions=positions, filled=filled)
    blocks, kept = _blocks(memory, pages, None, tag=tag, positions=positions, filled=filled)
    digest = torch.zeros(1, dtype=torch.int64)
    bad = code.verify(blocks, digest.data_ptr())
    del kept
    if bad:
        # Only the definition names what differs.
        return verify_plainly(memory, pages, tag=tag, positions=positions, filled=filled)
    checked = memory.layout.layers * pages.numel()
    return VerifyReport(checked=checked, digest=to_unsigned(int(digest)), mismatch=None)


def _require_equal(layout: PageLayout, other: PageLayout) -> None:
    if other != layout:
        raise LayoutUnsupportedError(
            quantity="destination layout", value=other.canonical(), required=layout.canonical()
        )


def _blocks(
    source: PageMemory,
    pages: Tensor,
    target: tuple[PageMemory, Tensor] | None,
    *,
    tag: int,
    positions: Tensor,
    filled: Tensor,
) -> tuple[Any, tuple[Tensor, ...]]:
    """Lists and memories as addresses, and the tensors that must live while those are used."""
    from kernels.cpu_pack import Blocks

    if tag == 0:
        raise TagZeroError
    layout = source.layout
    places = target or (source, pages)
    kept = tuple(t.to(torch.int64).contiguous() for t in (pages, places[1], positions, filled))
    for numbers, limit in zip(
        kept, (source.pages, places[0].pages, 1 << 31, layout.page_tokens + 1), strict=True
    ):
        _require_within(numbers, limit=limit, count=kept[0].numel())
    return Blocks(
        layers=layout.layers,
        page_tokens=layout.page_tokens,
        row_bytes=layout.row_bytes,
        block_bytes=layout.block_bytes,
        entries=kept[0].numel(),
        source=source.octets.data_ptr(),
        source_memory_pages=source.pages,
        source_pages=kept[0].data_ptr(),
        target=places[0].octets.data_ptr(),
        target_memory_pages=places[0].pages,
        target_pages=kept[1].data_ptr(),
        positions=kept[2].data_ptr(),
        filled=kept[3].data_ptr(),
        tag=to_signed(tag),
        algorithm=ALGORITHM_WSUM32,
    ), kept


def _require_within(numbers: Tensor, *, limit: int, count: int) -> None:
    if numbers.numel() != count:
        raise PageListError(quantity="length", value=numbers.numel(), limit=count)
    for value in numbers.tolist():
        if not 0 <= value < limit:
            raise PageListError(quantity="entry", value=value, limit=limit - 1)


def _arrival_mismatch(
    memory: PageMemory, pages: Tensor, filled: Tensor, digests: Tensor
) -> HeaderMismatch | None:
    """What only a sealed page shows: exact filled, algorithm, digest, zero padding."""
    head = memory.words[:, :, :4].index_select(1, pages)
    counts = head[:, :, 2] & LOW_32
    algorithms = (head[:, :, 2] >> 32) & LOW_32
    padding = _padding_words(memory, pages, filled)
    zeros = torch.zeros_like(digests)
    compares: tuple[tuple[HeaderField, Tensor, Tensor], ...] = (
        ("filled", filled.expand_as(counts), counts),
        ("algorithm", torch.full_like(counts, ALGORITHM_WSUM32), algorithms),
        ("digest", digests, head[:, :, 3]),
        ("padding", zeros, padding),
    )
    for field, expected, found in compares:
        bad = torch.nonzero(expected != found)
        if bad.numel():
            layer, entry = (int(index) for index in bad[0])
            return HeaderMismatch(
                page=int(pages[entry]),
                layer=layer,
                field=field,
                expected=to_unsigned(int(expected[layer, entry])),
                found=to_unsigned(int(found[layer, entry])),
            )
    return None


def _padding_words(memory: PageMemory, pages: Tensor, filled: Tensor) -> Tensor:
    """int64 `[layers, N]`: how many words that must be zero are not."""
    layout = memory.layout
    header = memory.words[:, :, 4 : layout.header_words].index_select(1, pages)
    trailer = memory.words[:, :, -8:-1].index_select(1, pages)
    count = header.count_nonzero(dim=-1) + trailer.count_nonzero(dim=-1)
    row_words = layout.row_bytes // 4
    for entry, rows in enumerate(filled.tolist()):
        if rows < layout.page_tokens:
            tail = memory.data[:, int(pages[entry]), rows * row_words :]
            count[:, entry] += tail.count_nonzero(dim=-1)
    return count
