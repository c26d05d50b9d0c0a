"""Simulated one-sided memory: pages that remember whose tokens they hold, and writes in flight.

Owns: cells, pools, staging, and what a read or a landing would really see.
Must not know: the log. It is the oracle beside the log: it asks the allocator's holder of a page
and the taint of its bytes, never a phase.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from engine.effects import DecodeSlice, Post, PrefillSlice
from engine.holdings import Holding
from engine.world_values import Core, Found
from lifecycle.events import Reserved
from lifecycle.ids import PageRange, Party, RequestId, TokenRange, pages_for

Taint = tuple[RequestId, int, int]
"""(request, attempt, token): whose byte this is."""


@attrs.frozen
class Cell:
    """What one page holds: a header (tag, logical position, filled) and tainted tokens."""

    tag: int
    position: int
    tokens: tuple[Taint, ...]

    @property
    def filled(self) -> int:
        """Valid tokens, as the header says."""
        return len(self.tokens)


Pool = tuple[Cell | None, ...]


@attrs.frozen
class Write:
    """A posted write: it reads staging when it lands, and may land more than once until it ended.

    `doubted` says that its writer was told `IN_DOUBT`; `ended` that the plane said `DONE` and
    lies; `orphan` that its writer's life is over; `silent` that nobody will ever be told.
    """

    party: Party
    post: Post
    landed: int = 0
    doubted: bool = False
    ended: bool = False
    orphan: bool = False
    silent: bool = False
    content: tuple[Cell, ...] = ()


def numbers(runs: Iterable[PageRange]) -> list[int]:
    """Page numbers of ranges, in their order."""
    return [page for run in runs for page in range(run.first, run.stop)]


def holder(core: Core, page: int) -> Holding | None:
    """Which grant the engine's own books give this page to."""
    for holding in core.holdings.values():
        for run in holding.reserved.pages:
            if run.first <= page < run.stop:
                return holding
    return None


def digest_of(cell: Cell) -> int:
    """A digest of a cell's tokens that differs between requests, attempts and places."""
    base = sum((token + 1) * 8191 + attempt * 31 for _, attempt, token in cell.tokens)
    return base + int(cell.tokens[0][0][-4:], 16) * 131 if cell.tokens else base


def put(pool: Pool, page: int, cell: Cell) -> Pool:
    """The pool with another cell on that page."""
    return (*pool[:page], cell, *pool[page + 1 :])


class Memory:
    """Pools and staging of every life; a life that is over has none."""

    def __init__(self, page_tokens: int) -> None:
        """Without any life yet."""
        self.page_tokens = page_tokens
        self.pools: dict[Party, Pool] = {}
        self.staging: dict[Party, Pool] = {}

    def copy(self) -> Memory:
        """An independent copy; pools are values."""
        other = Memory(self.page_tokens)
        other.pools = dict(self.pools)
        other.staging = dict(self.staging)
        return other

    # --- prefill ------------------------------------------------------------------------------

    def compute(self, core: Core, part: PrefillSlice) -> None:
        """A prefill step has written its tokens into its source pages."""
        pages, size, pool = numbers(part.pages), self.page_tokens, self.pools[core.party]
        for token in range(part.start, part.start + part.count):
            page = pages[token // size]
            self._own(core, page, part.request, part.attempt, "a prefill step wrote")
            before = pool[page]
            kept = before.tokens[: token % size] if before is not None and token % size else ()
            taint = (part.request, part.attempt, token)
            pool = put(pool, page, Cell(part.tag, token // size, (*kept, taint)))
        self.pools[core.party] = pool

    def pack(self, core: Core, post: Post) -> int:
        """Copy source pages into staging under the grant's tag; returns the range digest."""
        size, pool, staging = self.page_tokens, self.pools[core.party], self.staging[core.party]
        digest = 0
        first = post.tokens.start // size
        places = zip(numbers(post.source_pages), numbers(post.staging), strict=True)
        for index, (source, slot) in enumerate(places):
            self._own(core, source, post.request, post.attempt, "a pack read")
            start = (first + index) * size
            want = expected(post.request, post.attempt, start, min(start + size, post.tokens.stop))
            cell = pool[source]
            have = () if cell is None else cell.tokens[: len(want)]
            if have != want:
                raise Found("computed-before-sent", f"{core.party} sends {have}, not {want}")
            staged = Cell(post.tag, first + index, have)
            digest += digest_of(staged)
            staging = put(staging, slot, staged)
        self.staging[core.party] = staging
        return digest

    # --- the wire -----------------------------------------------------------------------------

    def content(self, write: Write) -> tuple[Cell, ...]:
        """What the write would place now: its staging, or what left before its writer ended."""
        if write.orphan or write.ended:
            return write.content
        cells = self.staging[write.party]
        return tuple(c for c in (cells[n] for n in numbers(write.post.staging)) if c is not None)

    def land(self, owner: Core, write: Write) -> None:
        """A write arrives in the owner's pages: they must still be the grant's that it names."""
        post, pool = write.post, self.pools[owner.party]
        for page, cell in zip(numbers(post.target_pages), self.content(write), strict=True):
            holding = holder(owner, page)
            if not write.ended:
                name = None if holding is None else holding.reserved.grant
                if name != post.grant:
                    whose = "a free page" if name is None else f"a page of {name}"
                    raise Found(
                        "late-write", f"ticket {post.ticket} for {post.grant} lands on {whose}"
                    )
                if cell.tag != post.tag:
                    raise Found("foreign-staging", f"ticket {post.ticket} ships tag {cell.tag}")
            pool = put(pool, page, cell)
        self.pools[owner.party] = pool

    # --- decode -------------------------------------------------------------------------------

    def verify(
        self, core: Core, reserved: Reserved, tokens: TokenRange, digest: int
    ) -> tuple[int, int | None]:
        """Compare what a write brought: pages compared, and the page that differs, if any."""
        size, pool = self.page_tokens, self.pools[core.party]
        pages = numbers(reserved.pages)[tokens.start // size : pages_for(tokens.stop, size)]
        total = 0
        for index, page in enumerate(pages):
            found = holder(core, page)
            if found is None or found.reserved.grant != reserved.grant:
                raise Found("read-unheld", f"{core.party} verifies page {page}, not its own")
            logical = tokens.start // size + index
            filled = min(size, tokens.stop - logical * size)
            cell = pool[page]
            if cell is None or (cell.tag, cell.position, cell.filled) != (
                reserved.tag,
                logical,
                filled,
            ):
                return len(pages), page
            total += digest_of(cell)
        return len(pages), None if total == digest else pages[0]

    def read(self, core: Core, part: DecodeSlice, count: int) -> int | None:
        """What a decode step reads: the page whose header differs, if any.

        Bytes that pass the headers and are not the attempt's own are the incident itself.
        """
        size, pool = self.page_tokens, self.pools[core.party]
        runs = list(zip(part.pages, part.tags, strict=True))
        table = [(page, tag) for run, tag in runs for page in numbers((run,))]
        for logical, (page, tag) in enumerate(table[: pages_for(count, size)]):
            self._own(core, page, part.request, part.attempt, "a decode step reads")
            cell, filled = pool[page], min(size, count - logical * size)
            if cell is None or (cell.tag, cell.position) != (tag, logical) or cell.filled < filled:
                return page
            want = expected(part.request, part.attempt, logical * size, logical * size + filled)
            if cell.tokens[:filled] != want:
                raise Found("observed-foreign", f"{part.request} reads {cell.tokens}, not {want}")
        return None

    def read_kinds(self, core: Core, part: DecodeSlice, count: int, kinds: Iterable[str]) -> None:
        """A decode step reads the prompt's other kinds of state, which bear no page headers."""
        want = expected(part.request, part.attempt, 0, count)
        for kind in kinds:
            have: tuple[Taint, ...] = ()
            for holding in core.holdings.values():
                mine = (holding.request, holding.attempt) == (part.request, part.attempt)
                if mine and holding.reserved.kind == kind:
                    cells = (self.pools[core.party][p] for p in numbers(holding.reserved.pages))
                    have = tuple(t for c in cells if c is not None for t in c.tokens)[:count]
            if have != want:
                raise Found("observed-foreign", f"{part.request} reads {have} as its {kind}")

    def append(self, core: Core, part: DecodeSlice) -> None:
        """A decode step has written the token that it ran."""
        size, pool = self.page_tokens, self.pools[core.party]
        logical = part.position // size
        runs = zip(part.pages, part.tags, strict=True)
        page, tag = [(p, tag) for run, tag in runs for p in numbers((run,))][logical]
        self._own(core, page, part.request, part.attempt, "a decode step wrote")
        taint = (part.request, part.attempt, part.position)
        before = pool[page]
        if part.position % size == 0 or before is None:
            cell = Cell(tag, logical, (taint,))
        else:
            cell = Cell(before.tag, before.position, (*before.tokens, taint))
        self.pools[core.party] = put(pool, page, cell)

    def _own(self, core: Core, page: int, request: RequestId, attempt: int, what: str) -> None:
        found = holder(core, page)
        if found is None or (found.request, found.attempt) != (request, attempt):
            whose = "free" if found is None else f"{found.request}'s"
            raise Found("step-on-unheld", f"{core.party}: {what} page {page}, which is {whose}")


def expected(request: RequestId, attempt: int, start: int, stop: int) -> tuple[Taint, ...]:
    """The taints of an attempt's own tokens in a range."""
    return tuple((request, attempt, token) for token in range(start, stop))


def count_reads(part: DecodeSlice, page_tokens: int) -> int:
    """Pages that a decode step reads."""
    return part.position // page_tokens + 1
