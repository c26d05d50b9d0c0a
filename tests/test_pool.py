"""Claims about the pool: its size, its buffer, and the counts of its checks."""

from __future__ import annotations

import mmap

import pytest
import torch

from engine.memory_size import MemorySizeError, measure_free_bytes, parse_memory
from engine.pool import KVPool, PoolTooSmallError, bytes_needed, filled_counts, pages_for
from kernels.layout import BufferUnsuitableError, PageLayout, PageMemory

LAYOUT = PageLayout(layers=2, kv_heads=1, head_dim=32, page_tokens=4)
TAG = 0xFEDCBA9876543210


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        (" 64kib ", 64 << 10),
        ("20%", 200_000),
        ("0.5%", 5_000),
        ("100 %", 1_000_000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    """Bytes, binary and decimal units, and shares of free memory."""
    assert parse_memory(text, free_bytes=1_000_000) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "12 apples", "101%", "0", "0%", "1e9", "٣", "0.1B", "5%%", "9" * 400 + ".5B"],
)
def test_unreadable_sizes_are_refused(text: str) -> None:
    """Whatever is no size is an error that repeats the text."""
    with pytest.raises(MemorySizeError) as caught:
        parse_memory(text, free_bytes=1_000_000)
    assert caught.value.text == text


def test_free_memory_is_measured() -> None:
    """The host says how much memory is free, in bytes."""
    assert measure_free_bytes() > 1 << 20


def test_whole_pages_fit() -> None:
    """Pages are counted down to whole ones, and fewer than one is refused with the numbers."""
    page = LAYOUT.page_bytes
    assert page == 2 * 5 * 256
    assert pages_for(3 * page - 1, LAYOUT) == 2
    assert pages_for(3 * page, LAYOUT) == 3
    assert bytes_needed(LAYOUT, 3) == 3 * page
    with pytest.raises(PoolTooSmallError, match=f"{page - 1} bytes .* {page} bytes"):
        pages_for(page - 1, LAYOUT)


def test_a_pool_is_a_view_of_its_buffer() -> None:
    """What the pool stamps stands in the buffer at the documented place, and nothing else moves."""
    buffer = mmap.mmap(-1, bytes_needed(LAYOUT, 3) + 100)
    buffer[:] = b"\xaa" * len(buffer)
    pool = KVPool(LAYOUT, 3, buffer)
    pool.open_pages([(1, 1)], tag=TAG, first_position=6)
    block = LAYOUT.block_bytes
    for layer in range(2):
        start = (layer * 3 + 1) * block
        header = buffer[start : start + LAYOUT.header_bytes]
        assert header[:8] == TAG.to_bytes(8, "little")
        assert header[8:16] == layer.to_bytes(4, "little") + (6).to_bytes(4, "little")
        assert header[16:] == bytes(len(header) - 16)
        rows = buffer[start + LAYOUT.header_bytes : start + block - 64]
        assert rows == b"\xaa" * len(rows)
        assert buffer[start + block - 64 : start + block] == bytes(56) + TAG.to_bytes(8, "little")
    assert buffer[:block] == b"\xaa" * block
    assert buffer[-100:] == b"\xaa" * 100
    assert pool.tokens == 12
    assert (pool.layout, pool.pages) == (LAYOUT, 3)
    del pool
    buffer.close()


def test_unfit_buffers_are_refused() -> None:
    """Read-only and short buffers raise before a view exists."""
    size = bytes_needed(LAYOUT, 2)
    with pytest.raises(BufferUnsuitableError, match="writable"):
        KVPool(LAYOUT, 2, memoryview(bytes(size)))
    with pytest.raises(BufferUnsuitableError, match=f"{size - 1}, required is {size}"):
        KVPool(LAYOUT, 2, mmap.mmap(-1, size - 1))
    with pytest.raises(BufferUnsuitableError, match="modulo 64"):
        KVPool(LAYOUT, 2, memoryview(mmap.mmap(-1, size + 8))[8:])
    with pytest.raises(BufferUnsuitableError):
        KVPool(LAYOUT, 0, mmap.mmap(-1, size))


def test_checks_are_counted() -> None:
    """Each compare counts pages times layers; a failed one counts a mismatch."""
    pool = KVPool.allocate(LAYOUT, 4)
    pool.open_pages([(2, 2), (0, 1)], tag=TAG, first_position=3)
    assert pool.check([(2, 2), (0, 1)], tag=TAG, first_position=3, tokens=0).first is None
    assert pool.check([(3, 1)], tag=TAG, first_position=4, tokens=0).first is None
    assert pool.counters.reads_checked == 3 * 2 + 2
    assert pool.counters.mismatches == 0
    found = pool.check([(3, 1)], tag=TAG, first_position=3, tokens=0).first
    assert found is not None
    assert (found.page, found.layer, found.field) == (3, 0, "position")
    short = pool.check([(2, 1)], tag=TAG, first_position=3, tokens=1).first
    assert short is not None
    assert short.field == "filled"
    assert pool.counters.reads_checked == 3 * 2 + 2 + 2 + 2
    assert pool.counters.mismatches == 2


def test_pages_travel_from_pool_to_pool() -> None:
    """Packed slots, copied block by block, verify in the destination pool."""
    source, target = KVPool.allocate(LAYOUT, 5), KVPool.allocate(LAYOUT, 6)
    source.memory.octets.random_(0, 256)
    target.memory.octets.fill_(0xFF)
    staging = PageMemory.allocate(LAYOUT, 4)
    digest = source.pack(
        [(4, 1), (0, 2)], staging, [(1, 3)], tag=TAG, first_position=2, tokens=10, source_tag=TAG
    )
    sent = LAYOUT.run_spans(pages=4, start=1, count=3)
    placed = LAYOUT.run_spans(pages=6, start=2, count=3)
    for (origin, size), (destination, _) in zip(sent, placed, strict=True):
        target.memory.octets[destination : destination + size] = staging.octets[
            origin : origin + size
        ]
    report = target.verify([(2, 3)], tag=TAG, first_position=2, tokens=10)
    assert report.mismatch is None
    assert (report.checked, report.digest) == (6, digest)
    assert torch.equal(target.memory.data[:, 2], source.memory.data[:, 4])
    target.memory.octets[placed[1][0] + LAYOUT.header_bytes + 7] ^= 1
    broken = target.verify([(2, 3)], tag=TAG, first_position=2, tokens=10)
    assert broken.mismatch is not None
    assert (broken.mismatch.page, broken.mismatch.layer) == (2, 1)
    assert broken.mismatch.field == "digest"
    assert broken.digest != digest
    assert target.counters.mismatches == 1


def test_tokens_fill_pages_in_order() -> None:
    """All pages but the last are full."""
    assert filled_counts(LAYOUT, 4, 9).tolist() == [4, 4, 1, 0]
    assert filled_counts(LAYOUT, 2, 8).tolist() == [4, 4]
