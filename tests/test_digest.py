"""Claims about the digest wsum32, beside an independent model in plain integers."""

from __future__ import annotations

import itertools
import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.digest import data_sums, mix, range_digest, seal, to_signed, to_unsigned
from kernels.layout import PageLayout, PageMemory

TINY = PageLayout(layers=1, kv_heads=1, head_dim=32, page_tokens=1)
MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    """The published splitmix64 step in unbounded integers."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def naive_digest(octets: bytes, *, tag: int, layer: int, position: int, filled: int) -> int:
    """Algorithm 1 as its documentation spells it."""
    words = struct.unpack(f"<{len(octets) // 4}i", octets)
    data = sum(word * (index + 1) for index, word in enumerate(words)) & MASK
    state = mixed(tag)
    state = mixed(state ^ (layer | position << 32))
    state = mixed(state ^ filled)
    return mixed(state ^ data) or 1


def block(words: list[int]) -> PageMemory:
    memory = PageMemory.allocate(TINY, 1)
    memory.octets.zero_()
    memory.data[0, 0] = torch.tensor(words, dtype=torch.int32)
    return memory


def digest_of(memory: PageMemory, tag: int = 5) -> int:
    one = torch.ones(1, dtype=torch.int64)
    sums = data_sums(memory, torch.tensor([0]), one)
    sealed = seal(sums, tags=one * to_signed(tag), positions=one * 0, filled=one)
    return to_unsigned(int(sealed[0, 0]))


WORDS = TINY.row_bytes // 4
EXTREME = [-(1 << 31), (1 << 31) - 1, -1, 0, 1, 0x7F800000]
BLOCK = [EXTREME[index % 6] if index % 2 else index * 65_537 for index in range(WORDS)]


def test_every_single_bit_of_the_data_changes_the_digest() -> None:
    """Exhaustive over a small block: no flipped bit leaves the digest as it was."""
    memory = block(BLOCK)
    digest = digest_of(memory)
    octets = memory.data[0, 0].view(torch.uint8)
    for index, bit in itertools.product(range(octets.numel()), range(8)):
        octets[index] ^= 1 << bit
        assert digest_of(memory) != digest, (index, bit)
        octets[index] ^= 1 << bit
    assert digest_of(memory) == digest


def test_every_swap_of_different_words_changes_the_digest() -> None:
    """Exhaustive: two words that change places are never invisible; a plain sum would miss all."""
    memory = block(BLOCK)
    digest = digest_of(memory)
    words = memory.data[0, 0]
    swapped = 0
    for first, second in itertools.combinations(range(WORDS), 2):
        one, two = int(words[first]), int(words[second])
        if one == two:
            continue
        words[first], words[second] = two, one
        assert digest_of(memory) != digest, (first, second)
        words[first], words[second] = one, two
        swapped += 1
    assert swapped > 1500


@given(
    tag=st.integers(1, MASK),
    positions=st.lists(st.integers(0, (1 << 31) - 1), min_size=2, max_size=2),
    filled=st.lists(st.integers(0, 3), min_size=2, max_size=2),
    seed=st.integers(0, 1000),
)
def test_digests_agree_with_plain_integers(
    tag: int, positions: list[int], filled: list[int], seed: int
) -> None:
    """Vectorised over layers and pages, each block's digest is what the documentation says."""
    layout = PageLayout(layers=2, kv_heads=1, head_dim=32, page_tokens=3)
    memory = PageMemory.allocate(layout, 3)
    generator = torch.Generator().manual_seed(seed)
    memory.octets.copy_(
        torch.randint(0, 256, memory.octets.shape, generator=generator).to(torch.uint8)
    )
    pages = torch.tensor([2, 0])
    counts = torch.tensor(filled)
    digests = seal(
        data_sums(memory, pages, counts),
        tags=torch.full((2,), to_signed(tag)),
        positions=torch.tensor(positions),
        filled=counts,
    )
    expected = []
    for layer in range(2):
        for entry, page in enumerate(pages.tolist()):
            start = layout.block_offset(pages=3, layer=layer, page=page) + layout.header_bytes
            octets = memory.octets[start : start + filled[entry] * layout.row_bytes]
            value = naive_digest(
                bytes(octets.tolist()),
                tag=tag,
                layer=layer,
                position=positions[entry],
                filled=filled[entry],
            )
            expected.append(value)
            assert to_unsigned(int(digests[layer, entry])) == value
    assert range_digest(digests) == sum(expected) & MASK


def test_each_part_of_a_blocks_identity_changes_its_digest() -> None:
    """Tag, layer, position and filled are bound into the digest."""
    sums = torch.zeros((2, 1), dtype=torch.int64)
    one = torch.ones(1, dtype=torch.int64)
    variants = [
        seal(sums, tags=one, positions=one, filled=one),
        seal(sums, tags=one * 2, positions=one, filled=one),
        seal(sums, tags=one, positions=one * 2, filled=one),
        seal(sums, tags=one, positions=one, filled=one * 2),
    ]
    assert len({int(value) for variant in variants for value in variant}) == 8


def test_a_digest_is_never_zero() -> None:
    """0 marks an open page; the one data part that mixes to 0 is given 1."""
    one = torch.ones(1, dtype=torch.int64)
    state = mix(mix(mix(one) ^ (1 << 32)) ^ 1)
    # mix(x) is 0 exactly where x + gamma is 0, so this sum is the one that would give 0.
    sums = (state ^ to_signed(-0x9E3779B97F4A7C15))[None, :]
    assert int(mix(state ^ sums[0])) == 0
    assert seal(sums, tags=one, positions=one, filled=one).tolist() == [[1]]


@given(st.integers(0, MASK))
def test_signed_and_unsigned_are_inverse(value: int) -> None:
    """Two's complement loses nothing either way, and mixing equals the published step."""
    assert to_unsigned(to_signed(value)) == value
    assert -(1 << 63) <= to_signed(value) < 1 << 63
    assert to_unsigned(int(mix(torch.tensor([to_signed(value)])))) == mixed(value)
