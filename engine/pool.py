"""The KV pool of one rank: tensor views over a given buffer, counters, and its size.

It owns the memory's shape and the counts of checked reads.
It must not know who holds a page (the allocator and the log do) or how the buffer came to be.
Memory is never cleared between requests: headers, not zeros, keep requests apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap

import attrs
import torch
from torch import Tensor

from engine.allocator import PageRun, pages_of
from kernels import headers, pack
from kernels.headers import HeaderReport, tag_tensor
from kernels.layout import BufferUnsuitableError, PageLayout, PageMemory
from kernels.pack import VerifyReport


class PoolTooSmallError(ValueError):
    """The memory does not hold a single page."""

    def __init__(self, *, memory_bytes: int, page_bytes: int) -> None:
        super().__init__(
            f"KV memory of {memory_bytes} bytes is smaller than one page of {page_bytes} bytes"
        )
        self.memory_bytes = memory_bytes
        self.page_bytes = page_bytes


def bytes_needed(layout: PageLayout, pages: int) -> int:
    """Bytes of a pool of `pages` pages."""
    return layout.page_bytes * pages


def pages_for(memory_bytes: int, layout: PageLayout) -> int:
    """Whole pages that fit into `memory_bytes`.

    Raises:
        PoolTooSmallError: not even one does.
    """
    pages = memory_bytes // layout.page_bytes
    if pages < 1:
        raise PoolTooSmallError(memory_bytes=memory_bytes, page_bytes=layout.page_bytes)
    return pages


@attrs.define
class PoolCounters:
    """How many block reads (pages * layers) were guarded; they only grow.

    reads_checked: blocks compared before the loads of a step.
    reads_rechecked: blocks compared again before the tokens of a step may leave.
    mismatches: sequences whose compare failed.
    reads_unchecked: blocks that attention read without a compare; anything but 0 is a defect.
    """

    reads_checked: int = 0
    reads_rechecked: int = 0
    mismatches: int = 0
    reads_unchecked: int = 0


class KVPool:
    """Pages of one rank over a writable buffer, for example an anonymous file mapped shared.

    The buffer stays exported while the pool lives: drop the pool before closing the buffer.
    `on_device` says whether steps are computed by a device's kernels.

    Raises:
        BufferUnsuitableError: the buffer is read-only, too small, or not aligned to 64 bytes.
    """

    on_device = False

    def __init__(
        self, layout: PageLayout, pages: int, buffer: bytearray | memoryview | mmap
    ) -> None:
        view = memoryview(buffer)
        needed = bytes_needed(layout, pages)
        if view.readonly:
            raise BufferUnsuitableError(quantity="writable", value=0, required=1)
        if view.nbytes < needed or needed < 1:
            raise BufferUnsuitableError(
                quantity="length in bytes", value=view.nbytes, required=needed
            )
        octets = torch.frombuffer(view, dtype=torch.uint8, count=needed)
        self.memory = PageMemory.over(octets, layout, pages)
        self.counters = PoolCounters()

    @classmethod
    def allocate(cls, layout: PageLayout, pages: int, device: torch.device | None = None) -> KVPool:
        """A pool over private memory that nobody else can write, on a CPU or another device."""
        pool = cls.__new__(cls)
        pool.memory = PageMemory.allocate(layout, pages, device)
        pool.counters = PoolCounters()
        return pool

    @property
    def layout(self) -> PageLayout:
        return self.memory.layout

    @property
    def pages(self) -> int:
        return self.memory.pages

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds when every page is full."""
        return self.pages * self.layout.page_tokens

    def open_pages(self, runs: Sequence[PageRun], *, tag: int, first_position: int) -> None:
        """Stamp pages that their owner is going to fill: filled 0, no digest.

        first_position: logical page number in the request of the first page of the runs.
        """
        pages = self._pages(runs)
        headers.stamp(
            self.memory,
            pages,
            tags=tag_tensor(tag, pages.numel(), pages.device),
            positions=first_position + torch.arange(pages.numel(), device=pages.device),
            filled=torch.zeros_like(pages),
        )

    def check(
        self, runs: Sequence[PageRun], *, tag: int, first_position: int, tokens: int
    ) -> HeaderReport:
        """Compare the headers of pages that hold `tokens` tokens from their first row on.

        Counted as checked reads, mismatches included.
        """
        pages = self._pages(runs)
        report = headers.check(
            self.memory,
            pages,
            tag_tensor(tag, pages.numel(), pages.device),
            first_position + torch.arange(pages.numel(), device=pages.device),
            filled_counts(self.layout, pages.numel(), tokens, pages.device),
        )
        self.counters.reads_checked += report.checked
        self.counters.mismatches += bool(report.mismatches)
        return report

    def pack(
        self,
        runs: Sequence[PageRun],
        staging: PageMemory,
        slots: Sequence[PageRun],
        *,
        tag: int,
        first_position: int,
        tokens: int,
        source_tag: int,  # noqa: ARG002 - for pools on a device
    ) -> int:
        """Sealed copies of pages in staging slots, under the destination's tag.

        tokens: valid tokens from the first row of the first page on.
        source_tag: what the pages bear, which `check` has compared; a device compares it again.
        Returns the unsigned range digest.
        """
        pages = self._pages(runs)
        return pack.pack(
            self.memory,
            pages,
            staging,
            self._pages(slots),
            tag=tag,
            positions=first_position + torch.arange(pages.numel(), device=pages.device),
            filled=filled_counts(self.layout, pages.numel(), tokens, pages.device),
        )

    def verify(
        self, runs: Sequence[PageRun], *, tag: int, first_position: int, tokens: int
    ) -> VerifyReport:
        """Check every byte of pages that a remote writer has filled with `tokens` tokens."""
        pages = self._pages(runs)
        report = pack.verify(
            self.memory,
            pages,
            tag=tag,
            positions=first_position + torch.arange(pages.numel(), device=pages.device),
            filled=filled_counts(self.layout, pages.numel(), tokens, pages.device),
        )
        self.counters.mismatches += report.mismatch is not None
        return report

    def _pages(self, runs: Sequence[PageRun]) -> Tensor:
        device = self.memory.octets.device
        return torch.tensor(pages_of(runs), dtype=torch.int64, device=device)


def filled_counts(
    layout: PageLayout, pages: int, tokens: int, device: torch.device | None = None
) -> Tensor:
    """int64 `[pages]`: tokens in each of the pages that `tokens` tokens fill in order."""
    first = torch.arange(pages, device=device) * layout.page_tokens
    return (tokens - first).clamp_(0, layout.page_tokens)
