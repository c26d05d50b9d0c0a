"""What the prefill and decode runners share: values, and how a fault in memory is reported.

Owns: the words in which runners answer, and the way from page ranges to addresses.
Must not know: cores, streams, planes' back ends, when anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from engine.allocator import PageRun
from engine.dataplane import Span, Write
from engine.pool import KVPool
from kernels.digest import to_unsigned
from kernels.headers import HeaderMismatch
from kernels.layout import PageLayout
from lifecycle.events import Cause, Failed, Finished
from lifecycle.ids import PageRange, RequestId
from lifecycle.wording import counted

Life = tuple[RequestId, int]
"""A request and its attempt: what a runner keeps state for."""


@attrs.frozen
class Packed:
    """Staged pages that are ready to be posted.

    writes: offsets in the writer's staging region and in the owner's pool;
    digest: the unsigned range digest over the sealed blocks.
    """

    writes: tuple[Write, ...]
    size_bytes: int
    digest: int


@attrs.frozen
class NewToken:
    """One new token: the text that became whole with it, and what made the answer stop, if so.

    `stop` is the stop string, or the id of the stop token; `logprob` is there if asked for.
    """

    index: int
    token: int
    text: str
    logprob: float | None
    stop: str | int | None = None


@attrs.frozen
class StepResult:
    """What a decode step gave: each request of the step is in `tokens` or in `failed`.

    A request in `finished` is in `tokens` too.
    """

    tokens: dict[RequestId, NewToken]
    finished: dict[RequestId, Finished]
    failed: dict[RequestId, Failed]


class GeometryMismatchError(ValueError):
    """Source and target of a copy name different numbers of pages: a defect of the caller."""

    def __init__(self, *, source_pages: int, target_pages: int) -> None:
        super().__init__(
            f"{counted(source_pages, 'source page')}, {counted(target_pages, 'target page')}"
        )
        self.source_pages = source_pages
        self.target_pages = target_pages


def page_runs(ranges: Iterable[PageRange]) -> tuple[PageRun, ...]:
    """The ranges as the pool and the steps take them."""
    return tuple((r.first, r.count) for r in ranges)


def isolation_failure(pool: KVPool, mismatch: HeaderMismatch, *, expected_tag: int) -> Failed:
    """The failure of a request that met a block which is not what its grant says.

    The tag that is reported is the one that stands there: it names whose bytes were met.
    """
    words = pool.memory.words[mismatch.layer, mismatch.page]
    head, tail = to_unsigned(int(words[0])), to_unsigned(int(words[-1]))
    found = tail if mismatch.field == "tail_tag" else head
    message = (
        f"page {mismatch.page} layer {mismatch.layer}: {mismatch.field} is "
        f"{mismatch.found:#x}, expected {mismatch.expected:#x}"
    )
    return Failed(
        Cause.ISOLATION_VIOLATION,
        message,
        page=mismatch.page,
        tag_expected=expected_tag,
        tag_found=found,
    )


def copy_plan(
    layout: PageLayout,
    *,
    staging: tuple[PageRange, ...],
    staging_pages: int,
    target: tuple[PageRange, ...],
    target_pages: int,
) -> tuple[Write, ...]:
    """The writes that carry staged pages to the target's pages, in order, one a run and layer.

    staging_pages, target_pages: how many pages the two memories have.
    Raises GeometryMismatchError.
    """
    pieces = tuple(_pieces(staging, target))
    return tuple(
        Write(
            source_offset=layout.block_offset(pages=staging_pages, layer=layer, page=source),
            target_offset=layout.block_offset(pages=target_pages, layer=layer, page=wanted),
            length=count * layout.block_bytes,
        )
        for layer in range(layout.layers)
        for source, wanted, count in pieces
    )


def grant_spans(
    layout: PageLayout, pages: tuple[PageRange, ...], *, pool_pages: int
) -> tuple[Span, ...]:
    """The bytes of a grant's pages in a pool of `pool_pages` pages, one span a run and layer."""
    return tuple(
        Span(offset=offset, length=length)
        for run in pages
        for offset, length in layout.run_spans(pages=pool_pages, start=run.first, count=run.count)
    )


def _pieces(
    source: tuple[PageRange, ...], target: tuple[PageRange, ...]
) -> Iterator[tuple[int, int, int]]:
    """(source page, target page, count) of the longest runs that are contiguous on both sides."""
    counts = sum(r.count for r in source), sum(r.count for r in target)
    if counts[0] != counts[1]:
        raise GeometryMismatchError(source_pages=counts[0], target_pages=counts[1])
    sources, targets = list(source), list(target)
    while sources:
        here, there = sources.pop(0), targets.pop(0)
        count = min(here.count, there.count)
        yield here.first, there.first, count
        if here.count > count:
            sources.insert(0, PageRange(here.first + count, here.count - count))
        if there.count > count:
            targets.insert(0, PageRange(there.first + count, there.count - count))
