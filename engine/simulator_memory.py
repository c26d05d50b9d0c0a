"""Pages of many thousand tokens that remember whose they are, for replayed traces.

Owns: one number a page, and the comparison of what is read with whose it should be.
Must not know: the log. Like the small worlds' memory it asks an engine's own books and the bytes.

A number stands for a request's attempt.
Every write is compared with the holder of its pages when it lands; every page of a request is
compared when its decoding begins and when it ends, and nothing else can change a page in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from engine.decode import DecodeCore
from engine.effects import DecodeSlice, Post, PrefillSlice
from engine.prefill import PrefillCore
from engine.world_values import Found
from lifecycle.ids import SERIAL_DIGITS, PageRange, Party, RequestId, pages_for, slice_pages


class TracedMemory:
    """The pools of every engine, and how often they were compared."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages_compared = 0
        self.foreign_reads = 0
        self._pools: dict[Party, list[int]] = {}

    def add(self, party: Party, pages: int) -> None:
        """A pool whose pages are nobody's."""
        self._pools[party] = [0] * pages

    def compute(self, core: PrefillCore, part: PrefillSlice) -> None:
        """A prefill pass has written a slice into its source pages."""
        first = part.start // self.page_tokens
        stop = pages_for(part.start + part.count, self.page_tokens)
        self._held(core, part.request, part.attempt, "a prefill step wrote")
        mark = _mark(part.request, part.attempt)
        self._fill(self._pools[core.party], slice_pages(part.pages, start=first, stop=stop), mark)

    def pack(self, core: PrefillCore, post: Post) -> None:
        """What a write ships must have been computed for its request."""
        self._held(core, post.request, post.attempt, "a pack read")
        mark = _mark(post.request, post.attempt)
        if not self._all(self._pools[core.party], post.source_pages, mark):
            raise Found("computed-before-sent", f"{core.party}: write {post.ticket} is not ready")

    def land(self, owner: DecodeCore, post: Post) -> None:
        """A write arrives: its pages must still be the grant's that it names."""
        if post.grant not in owner.holdings:
            raise Found("late-write", f"ticket {post.ticket} for {post.grant} lands too late")
        mark = _mark(post.request, post.attempt)
        self._fill(self._pools[owner.party], post.target_pages, mark)

    def append(self, core: DecodeCore, part: DecodeSlice) -> None:
        """A decode step has written the token that it ran."""
        place, within = divmod(part.position, self.page_tokens)
        if within and part.index:
            return
        page = _page_at(part.pages, place)
        self._pools[core.party][page] = _mark(part.request, part.attempt)

    def read(self, core: DecodeCore, part: DecodeSlice, tokens: int) -> None:
        """Every page that holds the request's first `tokens` tokens is its own."""
        self._held(core, part.request, part.attempt, "a decode step reads")
        pages = slice_pages(part.pages, start=0, stop=pages_for(tokens, self.page_tokens))
        mark = _mark(part.request, part.attempt)
        if not self._all(self._pools[core.party], pages, mark):
            self.foreign_reads += 1
            raise Found("observed-foreign", f"{part.request} reads a page that is not its own")

    def _fill(self, pool: list[int], runs: Iterable[PageRange], mark: int) -> None:
        for run in runs:
            pool[run.first : run.stop] = [mark] * run.count

    def _all(self, pool: list[int], runs: Iterable[PageRange], mark: int) -> bool:
        for run in runs:
            self.pages_compared += run.count
            if pool[run.first : run.stop].count(mark) != run.count:
                return False
        return True

    @staticmethod
    def _held(core: PrefillCore | DecodeCore, request: RequestId, attempt: int, what: str) -> None:
        held = core.held_for(request)
        if not any(h.attempt == attempt for h in held):
            raise Found("step-on-unheld", f"{core.party}: {what} pages that {request} has not")


def _page_at(runs: tuple[PageRange, ...], place: int) -> int:
    """The page that holds that place of a sequence of pages."""
    for run in runs:
        if place < run.count:
            return run.first + place
        place -= run.count
    raise Found("step-on-unheld", f"a decode step writes {place} pages behind those it was given")


@lru_cache(maxsize=4096)
def _mark(request: RequestId, attempt: int) -> int:
    """The number of an attempt, which no other attempt has, and no page before it is written."""
    return (int(request[-SERIAL_DIGITS:], 16) << 8) + attempt
