"""Compiled packing and verifying write and see exactly what their plain definitions do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels import cpu, pack
from kernels.headers import TagZeroError
from kernels.layout import LayoutUnsupportedError, PageLayout, PageMemory

LAYOUTS = (
    PageLayout(layers=3, kv_heads=2, head_dim=16, page_tokens=8),
    PageLayout(layers=2, kv_heads=3, head_dim=64, page_tokens=5),
    PageLayout(layers=1, kv_heads=1, head_dim=64, page_tokens=1, dtype=torch.float16),
    PageLayout(layers=2, kv_heads=2, head_dim=80, page_tokens=32, dtype=torch.bfloat16),
)
PAGES, SLOTS = 9, 7
TAG = (1 << 63) + 11


def memory(layout: PageLayout, pages: int, *, seed: int) -> PageMemory:
    """Pages full of anything, as other requests left them."""
    made = PageMemory.allocate(layout, pages)
    made.octets.random_(generator=torch.Generator().manual_seed(seed))
    return made


def lists(layout: PageLayout, count: int, *, seed: int) -> tuple[torch.Tensor, ...]:
    """Source pages, slots, positions and filled counts in any order."""
    chance = random.Random(seed)
    return (
        torch.tensor(chance.sample(range(PAGES), count), dtype=torch.int64),
        torch.tensor(chance.sample(range(SLOTS), count), dtype=torch.int64),
        torch.tensor([chance.randrange(1 << 20) for _ in range(count)], dtype=torch.int64),
        torch.tensor(
            [chance.randrange(layout.page_tokens + 1) for _ in range(count)], dtype=torch.int64
        ),
    )


def test_the_compiled_path_is_taken() -> None:
    """On a CPU with the compiler installed, nothing falls back silently."""
    assert cpu.load_compiled() == (cpu.compiled_code(torch.zeros(1)), None)
    assert cpu.compiled_code(torch.zeros(1, device="meta")) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_packed_bytes_and_digests_are_the_plain_ones(layout: PageLayout, count: int) -> None:
    """Every byte of the slots, those that were not named, and the range digest agree."""
    for seed in range(5):
        source = memory(layout, PAGES, seed=seed)
        plain, compiled = (memory(layout, SLOTS, seed=99) for _ in range(2))
        pages, slots, positions, filled = lists(layout, count, seed=seed)
        expected = pack.pack_plainly(
            source, pages, plain, slots, tag=TAG, positions=positions, filled=filled
        )
        found = pack.pack(
            source, pages, compiled, slots, tag=TAG, positions=positions, filled=filled
        )
        assert found == expected
        assert torch.equal(compiled.octets, plain.octets)
        arrived = pack.verify(compiled, slots, tag=TAG, positions=positions, filled=filled)
        assert arrived == pack.verify_plainly(
            plain, slots, tag=TAG, positions=positions, filled=filled
        )
        assert arrived.mismatch is None
        assert arrived.digest == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_changed_word_of_what_arrived_is_seen(layout: PageLayout) -> None:
    """Header, padding, rows and trailer: the compiled check fails exactly where the plain one does."""
    source = memory(layout, PAGES, seed=1)
    slots = memory(layout, SLOTS, seed=2)
    pages, places, positions, filled = lists(layout, 4, seed=3)
    wanted: dict[str, Any] = {"tag": TAG, "positions": positions, "filled": filled}
    pack.pack(source, pages, slots, places, tag=TAG, positions=positions, filled=filled)
    chance = random.Random(4)
    words = slots.words
    for _ in range(200):
        layer = chance.randrange(layout.layers)
        page = int(places[chance.randrange(4)])
        word = chance.choice([*range(6), -1, -2, chance.randrange(words.shape[2])])
        before = int(words[layer, page, word])
        words[layer, page, word] ^= 1 << chance.randrange(63)
        found = pack.verify(slots, places, **wanted)
        assert found == pack.verify_plainly(slots, places, **wanted)
        assert found.mismatch is not None
        words[layer, page, word] = before
    assert pack.verify(slots, places, **wanted).mismatch is None


def test_swapped_words_and_swapped_rows_are_seen() -> None:
    """A sum that ignored places would not notice."""
    layout = LAYOUTS[0]
    slots = memory(layout, SLOTS, seed=2)
    numbers = torch.arange(3)
    filled = torch.full((3,), layout.page_tokens)
    pack.pack(
        memory(layout, PAGES, seed=1),
        numbers,
        slots,
        numbers,
        tag=TAG,
        positions=numbers,
        filled=filled,
    )
    row = layout.row_bytes // 4
    for first, second in ((0, 1), (5, row + 5)):
        data = slots.data[1, 1]
        data[[first, second]] = data[[second, first]]
        report = pack.verify(slots, numbers, tag=TAG, positions=numbers, filled=filled)
        assert report.mismatch is not None
        assert report.mismatch.field == "digest"
        data[[first, second]] = data[[second, first]]


def test_lists_that_do_not_fit_are_refused() -> None:
    """No page outside its memory is read or written, whoever names it."""
    layout = LAYOUTS[0]
    source, slots = memory(layout, PAGES, seed=1), memory(layout, SLOTS, seed=2)
    one = torch.ones(1, dtype=torch.int64)
    wrong = (
        (one * PAGES, one, one, one),
        (one * -1, one, one, one),
        (one, one * SLOTS, one, one),
        (one, one, one * -1, one),
        (one, one, one, one * 9),
        (one, torch.arange(2), one, one),
    )
    for pages, places, positions, filled in wrong:
        with pytest.raises(pack.PageListError):
            pack.pack(source, pages, slots, places, tag=TAG, positions=positions, filled=filled)
    with pytest.raises(TagZeroError):
        pack.pack(source, one, slots, one, tag=0, positions=one, filled=one)
    with pytest.raises(LayoutUnsupportedError):
        pack.pack(
            source, one, memory(LAYOUTS[1], 2, seed=1), one, tag=TAG, positions=one, filled=one
        )


def test_compiled_code_can_be_got_ready() -> None:
    """Calling everything with nothing to do touches nothing and does not fail."""
    code, _ = cpu.load_compiled()
    code.prepare()
    assert code.KEPT
