"""Claims about the page layout: where bytes stand, and what headers and packing guard."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.digest import range_digest
from kernels.headers import HeaderMismatch, TagZeroError, check, set_filled, stamp, tag_tensor
from kernels.layout import BufferUnsuitableError, LayoutUnsupportedError, PageLayout, PageMemory
from kernels.pack import pack, verify

TAG = 0xF0E1D2C3B4A59687
TINY = PageLayout(layers=2, kv_heads=1, head_dim=32, page_tokens=2)
REAL = PageLayout(layers=30, kv_heads=3, head_dim=64)


def filled_memory(layout: PageLayout, pages: int, seed: int = 0) -> PageMemory:
    """Pages of random rows between zeroed headers."""
    memory = PageMemory.allocate(layout, pages)
    memory.octets.zero_()
    generator = torch.Generator().manual_seed(seed)
    memory.data.copy_(
        torch.randint(-(1 << 31), 1 << 31, memory.data.shape, generator=generator).to(torch.int32)
    )
    return memory


def sealed_pages(filled: list[int], layout: PageLayout = TINY) -> tuple[PageMemory, int]:
    """A staging memory whose slots hold pages in order, and its range digest."""
    source = filled_memory(layout, len(filled))
    staging = filled_memory(layout, len(filled), seed=1)
    pages = torch.arange(len(filled))
    digest = pack(
        source, pages, staging, pages, tag=TAG, positions=pages, filled=torch.tensor(filled)
    )
    return staging, digest


def test_the_documented_numbers_of_a_real_model_hold() -> None:
    """A model with 3 KV heads of 64 in float32 has rows of 1,536 and blocks of 50,688 bytes."""
    assert REAL.row_bytes == 1536
    assert REAL.header_bytes == 1472
    assert REAL.block_bytes == 50_688
    assert REAL.page_bytes == 1_520_640
    assert REAL.block_offset(pages=10, layer=2, page=3) == 23 * 50_688
    assert REAL.run_spans(pages=10, start=3, count=2)[29] == (293 * 50_688, 2 * 50_688)


@pytest.mark.parametrize(
    "layout",
    [
        TINY,
        PageLayout(layers=1, kv_heads=2, head_dim=64, page_tokens=3, dtype=torch.bfloat16),
        PageLayout(layers=2, kv_heads=1, head_dim=64, page_tokens=1, dtype=torch.float16),
        PageLayout(layers=1, kv_heads=3, head_dim=80, page_tokens=5),
    ],
)
def test_a_token_row_lies_where_the_documentation_says(layout: PageLayout) -> None:
    """Row t of page p in layer l begins (t + 1) rows less 64 bytes behind its block's start."""
    memory = PageMemory.allocate(layout, 3)
    base = memory.octets.data_ptr()
    for layer in range(layout.layers):
        for page in range(3):
            block = (layer * 3 + page) * layout.block_bytes
            assert memory.words[layer, page].data_ptr() - base == block
            for token in range(layout.page_tokens):
                row = memory.rows[layer, page * layout.block_rows + token]
                offset = block + (token + 1) * layout.row_bytes - 64
                assert row.data_ptr() - base == offset
                assert offset % 64 == 0
                assert row[1].data_ptr() - row[0].data_ptr() == layout.half_row_bytes
                assert row.is_contiguous()
    last = memory.rows[-1, -1]
    assert last.data_ptr() + layout.row_bytes - base == 3 * layout.page_bytes - 64


@pytest.mark.parametrize("layout", [TINY, REAL])
def test_a_gap_row_is_a_trailer_and_the_next_header(layout: PageLayout) -> None:
    """The K half of a gap row holds the tag and the next header's words, its V half zeros."""
    memory = PageMemory.allocate(layout, 2)
    memory.octets.fill_(0xFF)
    pages = torch.arange(2)
    stamp(
        memory,
        pages,
        tags=torch.tensor([11, 12]),
        positions=torch.tensor([5, 6]),
        filled=torch.tensor([1, 2]),
        digests=torch.full((layout.layers, 2), -1),
    )
    gap = memory.rows[1, layout.page_tokens].clone().view(torch.int64).flatten()
    half = layout.half_row_bytes // 8
    assert gap[:12].tolist() == [0] * 7 + [11, 12, 1 | 6 << 32, 2 | 1 << 32, -1]
    assert gap[12:].eq(0).all()
    assert half >= 12
    assert gap[half:].eq(0).all()


@pytest.mark.parametrize(
    ("arguments", "quantity"),
    [
        ({"layers": 0}, "layers"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 1 << 20}, "page_tokens"),
        ({"head_dim": 31}, "kv_heads * head_dim * itemsize"),
        ({"head_dim": 36}, "row_bytes"),
        ({"dtype": torch.float64}, "dtype"),
        ({"head_dim": 1 << 20, "page_tokens": 1 << 12}, "page_tokens * row_bytes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(
    arguments: dict[str, Any], quantity: str
) -> None:
    """A layout that could not keep its promises does not come to exist."""
    shape: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 32}
    with pytest.raises(LayoutUnsupportedError) as caught:
        PageLayout(**(shape | arguments))
    assert caught.value.quantity == quantity


def test_canonical_texts_tell_layouts_apart() -> None:
    """Every field of a layout changes its canonical text."""
    shape: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 64, "page_tokens": 8}
    texts = {PageLayout(**shape).canonical()}
    for name, value in shape.items():
        texts.add(PageLayout(**(shape | {name: value * 2})).canonical())
    texts.add(PageLayout(**shape, dtype=torch.float16).canonical())
    assert len(texts) == 6


def test_unfit_buffers_are_refused() -> None:
    """Too short, misaligned or empty memory raises with the numbers compared."""
    octets = torch.zeros(2 * TINY.page_bytes + 128, dtype=torch.uint8)
    aligned = octets[-octets.data_ptr() % 64 :]
    with pytest.raises(BufferUnsuitableError, match="length"):
        PageMemory.over(aligned[: 2 * TINY.page_bytes - 1], TINY, 2)
    with pytest.raises(BufferUnsuitableError, match="modulo 64 is 8"):
        PageMemory.over(aligned[8:], TINY, 2)
    with pytest.raises(BufferUnsuitableError, match="pages is 0"):
        PageMemory.over(aligned, TINY, 0)


def stamped(tag: int = TAG) -> tuple[PageMemory, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three pages, stamped in reverse order of position, two tokens in each."""
    memory = filled_memory(TINY, 4)
    pages, positions = torch.tensor([3, 0, 2]), torch.tensor([7, 8, 9])
    tags = tag_tensor(tag, 3)
    stamp(memory, pages, tags=tags, positions=positions, filled=torch.tensor([2, 2, 1]))
    return memory, pages, tags, positions


def test_a_good_header_passes_and_is_counted() -> None:
    """The compare counts pages times layers and finds nothing on sound pages."""
    memory, pages, tags, positions = stamped()
    report = check(memory, pages, tags, positions, torch.tensor([2, 1, 0]))
    assert report.checked == 3 * 2
    assert report.mismatches == ()
    assert report.first is None


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("word", "bits", "field"),
    [
        (0, range(64), "head_tag"),
        (-1, range(64), "tail_tag"),
        (1, range(32), "layer"),
        (1, range(32, 64), "position"),
        (2, range(32), "filled"),
    ],
)
def test_every_flipped_header_bit_is_seen(
    page: int, layer: int, word: int, bits: range, field: str
) -> None:
    """Each bit of tag, layer, position and filled stops the read, in each block."""
    memory, pages, tags, positions = stamped()
    needed = torch.tensor([2, 2, 1])
    for bit in bits:
        number = int(pages[page])
        before = int(memory.words[layer, number, word])
        memory.words[layer, number, word] = before ^ (1 << bit if bit < 63 else -(1 << 63))
        report = check(memory, pages, tags, positions, needed)
        assert [index for index, _ in report.mismatches] == [page], (field, bit)
        first = report.first
        assert first is not None
        assert (first.page, first.layer, first.field) == (number, layer, field)
        assert first.expected != first.found
        memory.words[layer, number, word] = before
    assert check(memory, pages, tags, positions, needed).first is None


def test_mismatches_name_unsigned_tags_and_every_bad_page() -> None:
    """A foreign tag comes out as the number that the log knows, for each page that bears it."""
    memory, pages, tags, positions = stamped()
    foreign = 0x8000000000000001
    stamp(
        memory,
        pages[1:],
        tags=tag_tensor(foreign, 2),
        positions=positions[1:],
        filled=torch.tensor([2, 2]),
    )
    report = check(memory, pages, tags, positions, torch.tensor([2, 2, 1]))
    expected = [
        (
            index,
            HeaderMismatch(
                page=int(pages[index]), layer=0, field="head_tag", expected=TAG, found=foreign
            ),
        )
        for index in (1, 2)
    ]
    assert list(report.mismatches) == expected
    assert report.first == expected[0][1]


def test_a_page_with_too_few_tokens_is_seen() -> None:
    """A placeholder page, with the right tag and fewer tokens than needed, does not pass."""
    memory, pages, tags, positions = stamped()
    report = check(memory, pages, tags, positions, torch.tensor([2, 2, 2]))
    assert report.first == HeaderMismatch(page=2, layer=0, field="filled", expected=2, found=1)


def test_setting_filled_opens_the_page() -> None:
    """An appended page keeps tag and place, and bears neither digest nor algorithm."""
    staging, _ = sealed_pages([2, 1])
    assert int(staging.words[0, 1, 3]) != 0
    set_filled(staging, torch.tensor([1]), torch.tensor([2]))
    for layer in range(2):
        assert staging.words[layer, 1, 1:4].tolist() == [layer | 1 << 32, 2, 0]
        assert int(staging.words[layer, 0, 3]) != 0


def test_tag_zero_is_refused() -> None:
    """Memory that nobody wrote is zero, so no owner may be called 0."""
    with pytest.raises(TagZeroError):
        tag_tensor(0, 1)


@pytest.mark.parametrize("filled", [[2, 2, 2], [2, 2, 1], [1]])
def test_a_packed_range_verifies_and_keeps_its_rows(filled: list[int]) -> None:
    """Pack then verify: the same digest on both sides, the same rows, zeros behind them."""
    source = filled_memory(TINY, 5)
    staging = filled_memory(TINY, 5, seed=1)
    pages = torch.tensor([4, 1, 2][: len(filled)])
    slots = torch.tensor([0, 3, 1][: len(filled)])
    positions = torch.arange(len(filled)) + 6
    counts = torch.tensor(filled)
    digest = pack(source, pages, staging, slots, tag=TAG, positions=positions, filled=counts)
    report = verify(staging, slots, tag=TAG, positions=positions, filled=counts)
    assert report.mismatch is None
    assert report.checked == len(filled) * 2
    assert report.digest == digest
    assert 0 < digest < 1 << 64
    assert report.method == "wsum32"
    for page, slot, count in zip(pages.tolist(), slots.tolist(), filled, strict=True):
        words = count * TINY.row_bytes // 4
        assert torch.equal(staging.data[:, slot, :words], source.data[:, page, :words])
        assert staging.data[:, slot, words:].eq(0).all()


def test_range_digests_add_up() -> None:
    """A range digest is the sum of the header digests, so ranges may arrive in any order."""
    staging, digest = sealed_pages([2, 2, 1])
    assert range_digest(staging.words[:, :, 3]) == digest
    parts = [range_digest(staging.words[:, page, 3]) for page in (2, 0, 1)]
    assert sum(parts) % (1 << 64) == digest


def test_stale_rows_are_never_shipped() -> None:
    """Rows past the filled ones are another request's NaNs; no packed row carries one."""
    source = filled_memory(TINY, 2)
    rows = source.rows
    rows.fill_(math.nan)
    rows[:, :3] = 1.0
    rows[:, 3] = 2.0
    staging = PageMemory.allocate(TINY, 2)
    staging.octets.fill_(0xFF)
    pages = torch.arange(2)
    pack(source, pages, staging, pages, tag=TAG, positions=pages, filled=torch.tensor([2, 1]))
    row_bytes = TINY.row_bytes
    for layer in range(2):
        for page in range(2):
            assert not staging.rows[layer, page * 3 : page * 3 + 2].isnan().any()
    assert staging.rows[:, 3].eq(2.0).all()
    assert staging.rows[:, 4].eq(0.0).all()
    assert staging.rows[:, 4].numel() * 4 == 2 * row_bytes


def test_every_flipped_bit_of_an_arrived_block_is_seen() -> None:
    """Exhaustive: no bit of a sealed page, used or unused, changes without a mismatch."""
    layout = PageLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=2)
    staging, _ = sealed_pages([2, 1], layout)
    pages, filled = torch.arange(2), torch.tensor([2, 1])
    fields = set()
    for index in range(staging.octets.numel()):
        bit = 1 << index % 8
        staging.octets[index] ^= bit
        report = verify(staging, pages, tag=TAG, positions=pages, filled=filled)
        assert report.mismatch is not None, index
        assert report.mismatch.page == index // layout.block_bytes
        fields.add(report.mismatch.field)
        staging.octets[index] ^= bit
    assert fields == {
        "head_tag",
        "tail_tag",
        "layer",
        "position",
        "filled",
        "algorithm",
        "digest",
        "padding",
    }
    assert verify(staging, pages, tag=TAG, positions=pages, filled=filled).mismatch is None


@pytest.mark.parametrize(
    ("tag", "positions", "filled", "field"),
    [
        (TAG ^ 1, [0, 1], [2, 1], "head_tag"),
        (TAG, [1, 0], [2, 1], "position"),
        (TAG, [0, 1], [2, 2], "filled"),
        (TAG, [0, 1], [1, 1], "filled"),
    ],
)
def test_arrivals_are_compared_with_what_was_granted(
    tag: int, positions: list[int], filled: list[int], field: str
) -> None:
    """A sound page of another grant, place or length is a mismatch, also one that holds more."""
    staging, _ = sealed_pages([2, 1])
    report = verify(
        staging,
        torch.arange(2),
        tag=tag,
        positions=torch.tensor(positions),
        filled=torch.tensor(filled),
    )
    assert report.mismatch is not None
    assert report.mismatch.field == field


def test_a_copy_that_went_wrong_is_seen() -> None:
    """The digest is made from the source page, so a fault between source and slot shows."""
    staging, _ = sealed_pages([2, 2])
    staging.data[1, 1, 5] += 1
    pages = torch.arange(2)
    report = verify(staging, pages, tag=TAG, positions=pages, filled=torch.tensor([2, 2])).mismatch
    assert report is not None
    assert (report.page, report.layer, report.field) == (1, 1, "digest")


def test_packing_between_layouts_is_refused() -> None:
    """Bytes of one layout never land in slots of another."""
    other = PageLayout(layers=2, kv_heads=1, head_dim=64, page_tokens=2)
    pages = torch.arange(1)
    with pytest.raises(LayoutUnsupportedError, match="destination layout"):
        pack(
            filled_memory(TINY, 1),
            pages,
            filled_memory(other, 1),
            pages,
            tag=TAG,
            positions=pages,
            filled=pages + 1,
        )
