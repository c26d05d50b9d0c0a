"""Tainted bytes: pages that hold whose token each of their words is.

Owns: how a page lies in a region, and what a reader would find there.
Must not know: the log, planes, and who may write what.

A page is a block of words: tag, position, filled, digest, one word a token, tag again.
A token's word is its id and the attempt that wrote it; ids differ between clients, so a foreign
word shows. Regions begin full of such words of nobody, as a pool that has served for months is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import attrs

WORD = 8
HEAD_WORDS = 4
ATTEMPT_BITS = 8
STALE_TAG = 0x57A1E
_MASK = (1 << 64) - 1


def word_of(token: int, attempt: int) -> int:
    """What a token's place holds."""
    return token << ATTEMPT_BITS | attempt


@attrs.frozen
class Block:
    """One page as it was found."""

    tag: int
    position: int
    filled: int
    digest: int
    words: tuple[int, ...]
    tail: int


@attrs.frozen
class Layout:
    """Where pages lie: one layer, one block a page. It looks like a `PageLayout` to its users."""

    page_tokens: int
    layers: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a page."""
        return (self.page_tokens + HEAD_WORDS + 1) * WORD

    def block_offset(self, *, pages: int, layer: int, page: int) -> int:
        """Where a page begins."""
        assert page < pages, "a page of the region"
        assert layer == 0, "there is one layer"
        return page * self.block_bytes

    def run_spans(self, *, pages: int, start: int, count: int) -> Iterator[tuple[int, int]]:
        """The one span of a run of pages."""
        assert start + count <= pages, "a run of the pool"
        yield start * self.block_bytes, count * self.block_bytes


class Region:
    """The pages of a pool or of staging, in real bytes."""

    def __init__(self, layout: Layout, pages: int) -> None:
        self.layout = layout
        self.pages = pages
        self.counters = Counters()
        self._block_bytes = layout.block_bytes
        self._struct = struct.Struct(f"<{layout.page_tokens + HEAD_WORDS + 1}Q")
        self._token = struct.Struct("<Q")
        stale = (STALE_TAG, 0, layout.page_tokens, 0, *range(layout.page_tokens), STALE_TAG)
        self.bytes = bytearray(self._struct.pack(*stale) * pages)

    def block(self, page: int) -> Block:
        """What stands on that page."""
        tag, position, filled, digest, *rest = self._struct.unpack_from(
            self.bytes, page * self._block_bytes
        )
        return Block(tag, position, filled, digest, tuple(rest[:-1]), rest[-1])

    def put(self, page: int, block: Block) -> None:
        """Write a page whole."""
        self._struct.pack_into(
            self.bytes,
            page * self._block_bytes,
            block.tag,
            block.position,
            block.filled,
            block.digest,
            *block.words,
            block.tail,
        )

    def open(self, page: int, *, tag: int, position: int) -> None:
        """Stamp a page that is about to be filled; the words in it stay what they were."""
        stood = self.block(page)
        self.put(page, Block(tag, position, 0, stood.digest, stood.words, tag))

    def append(self, page: int, *, place: int, word: int) -> None:
        """Write one token, and count it."""
        start = page * self._block_bytes
        self._token.pack_into(self.bytes, start + (HEAD_WORDS + place) * WORD, word)
        self._token.pack_into(self.bytes, start + 2 * WORD, place + 1)


@attrs.define
class Counters:
    """What a pool counts of its reads."""

    reads_checked: int = 0
    mismatches: int = 0
    reads_unchecked: int = 0


def seal(block: Block) -> int:
    """The digest of a block with all that it vouches for."""
    kept = (block.tag, block.position, block.filled, *block.words[: block.filled])
    return zlib.crc32(struct.pack(f"<{len(kept)}Q", *kept))


def words_of(prompt: Sequence[int], attempt: int, *, start: int, stop: int) -> tuple[int, ...]:
    """What the tokens of an attempt's prompt should have left."""
    return tuple([token << ATTEMPT_BITS | attempt for token in prompt[start:stop]])
