"""Claims about the scrubber over a real pool."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.device_pool import DevicePool
from engine.pool import KVPool
from engine.scrubber import BACKLOG_PAGES, Scrubber, ShareOutOfRangeError
from engine.step_plan import SequenceSlice
from kernels import dispatch, pack
from kernels.headers import HeaderMismatch
from kernels.layout import PageLayout
from kernels.tables import PageLabels, new_flags

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=32, page_tokens=8)
TAG = (1 << 63) + 5


def filled_pool(sequence: SequenceSlice, *, sealed: bool, on_device: bool = False) -> KVPool:
    """A pool in which the sequence's pages are filled with noise, sealed as if they had arrived."""
    pool: KVPool = KVPool.allocate(LAYOUT, 12)
    if on_device:
        pool = DevicePool(LAYOUT, 12, device=torch.device("cpu"))
    pool.memory.octets.fill_(0xFF)
    pool.open_pages(sequence.pages, tag=TAG, first_position=0)
    pages = [page for first, count in sequence.pages for page in range(first, first + count)]
    pool.memory.data[:, pages] = torch.randint(-(1 << 31), 1 << 31, (2, len(pages), 1024)).int()
    tokens = sequence.start + sequence.count
    filled = [max(0, min(8, tokens - 8 * n)) for n in range(len(pages))]
    pool.memory.words[:, pages, 2] = torch.tensor(filled)
    if sealed:
        labels = PageLabels.of(
            pages, [TAG] * len(pages), positions=range(len(pages)), filled=filled
        )
        digests = dispatch.digest_pages(
            pool.memory, labels, new_flags(len(pages), torch.device("cpu"))
        )
        pool.memory.words[:, pages, 2] |= 1 << 32
        pool.memory.words[:, pages, 3] = digests
    return pool


SEQUENCE = SequenceSlice(((5, 2), (1, 2)), TAG, 27, 1)
PAGES = [5, 6, 1]
"""The full ones: 28 tokens fill three of its pages."""


def rounds(scrubber: Scrubber, steps: int) -> list[dict[int, HeaderMismatch]]:
    """What each of some steps found; a step reads a page's bytes beside the sequence's."""
    return [scrubber.after_step(["a"], [SEQUENCE], {}) for _ in range(steps)]


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("sealed", [True, False])
def test_sound_pages_are_looked_at_in_turn(sealed: bool, on_device: bool) -> None:
    """Round and round over the full pages, at the stated share of the bytes that steps read."""
    pool = filled_pool(SEQUENCE, sealed=sealed, on_device=on_device)
    scrubber = Scrubber(pool, step_bytes=LAYOUT.page_bytes, share=0.1)
    # A step reads the weights, here a page's bytes, and four pages.
    assert rounds(scrubber, 40) == [{}] * 40
    assert scrubber.pages_looked_at in (19, 20)
    assert scrubber.mismatches == 0
    report = pack.verify(
        pool.memory,
        torch.tensor(PAGES),
        tag=TAG,
        positions=torch.arange(3),
        filled=torch.tensor([8, 8, 8]),
    )
    # Pages that were open when they became full are sealed by now.
    assert report.mismatch is None
    assert pool.memory.words[:, 2, 3].ne(0).all() == sealed


@pytest.mark.parametrize(("page", "layer"), list(itertools.product(PAGES, (0, 1))))
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("on_device", [True, False])
def test_one_altered_word_is_found_within_a_round(
    page: int, layer: int, sealed: bool, on_device: bool
) -> None:
    """In any full page and layer, of pages that arrived at once and of others since the first look."""
    pool = filled_pool(SEQUENCE, sealed=sealed, on_device=on_device)
    scrubber = Scrubber(pool, step_bytes=0, share=0.25)
    assert sealed or rounds(scrubber, 3) == [{}] * 3
    pool.memory.data[layer, page, 700] ^= 1 << 9
    found = [outcome for outcome in rounds(scrubber, 3) if outcome]
    assert len(found) == 1
    mismatch = found[0][0]
    assert (mismatch.page, mismatch.layer, mismatch.field) == (page, layer, "digest")
    assert mismatch.expected != mismatch.found
    assert pool.counters.mismatches == scrubber.mismatches == 1


def test_a_block_altered_with_its_digest_is_found() -> None:
    """Another sealed block under the same header shows once the page has been seen."""
    pool = filled_pool(SEQUENCE, sealed=True)
    scrubber = Scrubber(pool, step_bytes=0, share=0.25)
    assert rounds(scrubber, 3) == [{}] * 3
    pool.memory.data[1, 6, 0] ^= 1
    labels = PageLabels.of([6], [TAG], positions=[1], filled=[8])
    pool.memory.words[:, 6, 3] = dispatch.digest_pages(
        pool.memory, labels, new_flags(1, torch.device("cpu"))
    )[:, 0]
    assert any(rounds(scrubber, 3))


@pytest.mark.parametrize("word", [0, 1, 2, 3, -1])
@pytest.mark.parametrize("on_device", [True, False])
def test_an_altered_header_is_found(word: int, on_device: bool) -> None:
    """Tags, place, filled and the digest itself; a seal that is broken off does not help."""
    pool = filled_pool(SEQUENCE, sealed=True, on_device=on_device)
    scrubber = Scrubber(pool, step_bytes=0, share=0.25)
    assert rounds(scrubber, 3) == [{}] * 3
    if word == 2:
        pool.memory.words[:, 6, 2] &= 0xFFFFFFFF
        pool.memory.words[:, 6, 3] = 0
        pool.memory.data[1, 6, 0] ^= 1
        assert any(rounds(scrubber, 3))
        return
    pool.memory.words[1, 6, word] ^= 1 << 3
    assert any(rounds(scrubber, 3))


def test_pages_that_are_still_filled_are_left_alone() -> None:
    """The open last page changes with each step and is nobody's mistake."""
    pool = filled_pool(SEQUENCE, sealed=True)
    scrubber = Scrubber(pool, step_bytes=0, share=1.0)
    for _ in range(6):
        pool.memory.data[:, 2] += 1
        assert scrubber.after_step(["a"], [SEQUENCE], {}) == {}


def test_a_sequence_that_is_over_is_forgotten() -> None:
    """The next request with this name begins anew: its pages hold something else."""
    pool = filled_pool(SEQUENCE, sealed=False)
    scrubber = Scrubber(pool, step_bytes=0, share=1.0)
    rounds(scrubber, 3)
    pool.memory.data[:, PAGES] += 1
    pool.open_pages(SEQUENCE.pages, tag=TAG, first_position=0)
    pool.memory.words[:, PAGES, 2] = 8
    scrubber.forget("a")
    assert rounds(scrubber, 3) == [{}] * 3


def test_what_is_saved_up_is_bounded() -> None:
    """After steps without a full page, no step has to make up for all of them."""
    pool = filled_pool(SEQUENCE, sealed=True)
    scrubber = Scrubber(pool, step_bytes=1 << 40, share=1.0)
    short = SequenceSlice(((5, 1),), TAG, 3, 1)
    for _ in range(5):
        assert scrubber.after_step(["b"], [short], {}) == {}
    assert scrubber.pages_looked_at == 0
    rounds(scrubber, 1)
    assert scrubber.pages_looked_at == BACKLOG_PAGES


def test_every_sequence_has_its_turn() -> None:
    """A long neighbour does not keep a short one from being looked at; each is told by its number."""
    pool = filled_pool(SEQUENCE, sealed=True)
    other = SequenceSlice(((9, 1),), 7, 7, 1)
    pool.open_pages(other.pages, tag=7, first_position=0)
    pool.memory.words[:, 9, 2] = 8
    scrubber = Scrubber(pool, step_bytes=0, share=0.2)
    for _ in range(2):
        assert scrubber.after_step(["a", "b"], [SEQUENCE, other], {}) == {}
    pool.memory.data[0, 9, 0] ^= 1
    found = [scrubber.after_step(["a", "b"], [SEQUENCE, other], {}) for _ in range(3)]
    assert {tuple(outcome) for outcome in found if outcome} == {(1,)}


def test_a_sequence_that_failed_already_is_not_looked_at() -> None:
    """Its first mismatch is the one that is told."""
    pool = filled_pool(SEQUENCE, sealed=True)
    scrubber = Scrubber(pool, step_bytes=0, share=1.0)
    first = HeaderMismatch(page=5, layer=0, field="layer", expected=0, found=1)
    assert scrubber.after_step(["a"], [SEQUENCE], {0: first}) == {0: first}
    assert scrubber.pages_looked_at == 0


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_it_cannot_be_switched_off(share: float) -> None:
    """A share of nothing is refused with the number."""
    with pytest.raises(ShareOutOfRangeError, match="required is more than 0"):
        Scrubber(KVPool.allocate(LAYOUT, 1), step_bytes=0, share=share)
