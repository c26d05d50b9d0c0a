"""Packing and verifying pages on a CPU: each block is read once.

Owns: what is written into a slot and what is compared on arrival.
Must not know: tensors, requests; memory comes as addresses. `kernels.pack` is the definition.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.cpu_compile import compiled
from kernels.cpu_memory import WORD, load_word, store_word
from kernels.cpu_words import copy_and_weigh, seal, weigh_words
from kernels.layout import TRAILER_BYTES


class Blocks(NamedTuple):
    """The shape of blocks and the lists of pages, which are addresses of int64 [entries].

    source, target: first byte of a memory of that many pages; verifying has no target.
    """

    layers: int
    page_tokens: int
    row_bytes: int
    block_bytes: int
    entries: int
    source: int
    source_memory_pages: int
    source_pages: int
    target: int
    target_memory_pages: int
    target_pages: int
    positions: int
    filled: int
    tag: int
    algorithm: int


@compiled
def _clear(first: int, stop: int) -> None:
    for place in range(first, stop, WORD):
        store_word(place, 0)


@compiled
def _all_zero(first: int, stop: int) -> bool:
    found = 0
    for place in range(first, stop, WORD):
        found |= load_word(place)
    return found == 0


@compiled
def pack_blocks(b: Blocks) -> int:
    """Fill the slots; the range digest, in two's complement."""
    digests = 0
    header = b.row_bytes - TRAILER_BYTES
    for layer in range(b.layers):
        for entry in range(b.entries):
            page = load_word(b.source_pages + entry * WORD)
            slot = load_word(b.target_pages + entry * WORD)
            filled = load_word(b.filled + entry * WORD)
            place = layer | (load_word(b.positions + entry * WORD) << 32)
            source = b.source + (layer * b.source_memory_pages + page) * b.block_bytes
            target = b.target + (layer * b.target_memory_pages + slot) * b.block_bytes
            used = filled * b.row_bytes
            total = copy_and_weigh(source + header, target + header, used // 4, 0)
            # Stale rows of a page's earlier owner are never shipped.
            _clear(target + header + used, target + b.block_bytes - WORD)
            digest = seal(total, b.tag, place, filled)
            store_word(target, b.tag)
            store_word(target + WORD, place)
            store_word(target + 2 * WORD, filled | (b.algorithm << 32))
            store_word(target + 3 * WORD, digest)
            _clear(target + 4 * WORD, target + header)
            store_word(target + b.block_bytes - WORD, b.tag)
            digests += digest
    return digests


@compiled
def verify_blocks(b: Blocks, digests: int) -> int:
    """How many blocks differ from what was to arrive; the range digest goes to `digests`."""
    bad, sums = 0, 0
    header = b.row_bytes - TRAILER_BYTES
    for layer in range(b.layers):
        for entry in range(b.entries):
            page = load_word(b.source_pages + entry * WORD)
            filled = load_word(b.filled + entry * WORD)
            place = layer | (load_word(b.positions + entry * WORD) << 32)
            block = b.source + (layer * b.source_memory_pages + page) * b.block_bytes
            used = filled * b.row_bytes
            total = weigh_words(block + header, 0, used // 4, 0)
            digest = seal(total, b.tag, place, filled)
            sums += digest
            sound = (
                load_word(block) == b.tag
                and load_word(block + b.block_bytes - WORD) == b.tag
                and load_word(block + WORD) == place
                and load_word(block + 2 * WORD) == (filled | (b.algorithm << 32))
                and load_word(block + 3 * WORD) == digest
                and _all_zero(block + 4 * WORD, block + header)
                and _all_zero(block + header + used, block + b.block_bytes - WORD)
            )
            bad += not sound
    store_word(digests, sums)
    return bad
