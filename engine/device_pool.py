"""A KV pool on a GPU, and the memory on the host through which pages come and go.

Owns: the way of a page between host and device.
Must not know: who holds a page, how bytes travel between hosts.

The data plane writes into host memory. A decode engine exposes *landing* memory that has the shape of
its pool, so that page numbers and offsets mean the same there; pages that have arrived are checked on
the host, byte by byte, and then unpacked into the pool, where the device checks them again and seals
them. A prefill engine packs on the device and copies the sealed blocks into its staging slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.allocator import PageRun, pages_of
from engine.pool import KVPool, PoolCounters, filled_counts
from kernels import dispatch, pack
from kernels.digest import range_digest
from kernels.headers import HeaderMismatch, tag_tensor
from kernels.layout import PageLayout, PageMemory
from kernels.pack import VerifyReport
from kernels.tables import PageLabels, new_flags


class ForeignSourceError(RuntimeError):
    """A page changed hands between the check of its header and its copy; nothing was shipped."""

    def __init__(self, mismatch: HeaderMismatch) -> None:
        super().__init__(
            f"page {mismatch.page} was not what its grant says when it was copied: "
            f"fault {mismatch.found:#x}"
        )
        self.mismatch = mismatch


class DevicePool(KVPool):
    """Pages in a device's memory.

    landing: host memory of as many pages, which others may write; None where nobody writes.
    """

    on_device = True

    def __init__(
        self,
        layout: PageLayout,
        pages: int,
        *,
        device: torch.device,
        landing: PageMemory | None = None,
    ) -> None:
        self.memory = PageMemory.allocate(layout, pages, device)
        self.counters = PoolCounters()
        self.landing = landing

    def pack(
        self,
        runs: Sequence[PageRun],
        staging: PageMemory,
        slots: Sequence[PageRun],
        *,
        tag: int,
        first_position: int,
        tokens: int,
        source_tag: int,
    ) -> int:
        """As `KVPool.pack`; the staging slots are on the host.

        Raises ForeignSourceError: a page does not bear `source_tag`, or by now not its place.
        """
        pages = pages_of(runs)
        labels = self._labels(pages, source_tag, first_position=first_position, tokens=tokens)
        buffer, flags = self._buffer(len(pages)), new_flags(len(pages), labels.pages.device)
        digests = dispatch.copy_pages(
            self.memory,
            buffer,
            labels,
            flags,
            target_pages=torch.arange(len(pages), dtype=torch.int32, device=flags.device),
            target_tags=tag_tensor(tag, len(pages), flags.device),
            sealed=False,
        )
        for page, fault in zip(pages, flags.tolist(), strict=True):
            if fault:
                raise ForeignSourceError(
                    HeaderMismatch(
                        page=page, layer=0, field="head_tag", expected=source_tag, found=fault
                    )
                )
        staging.words[:, pages_of(slots)] = buffer.words.cpu()
        return range_digest(digests)

    def verify(
        self, runs: Sequence[PageRun], *, tag: int, first_position: int, tokens: int
    ) -> VerifyReport:
        """As `KVPool.verify`, of pages that landed on the host; sound ones are then in the pool."""
        if self.landing is None:
            return super().verify(runs, tag=tag, first_position=first_position, tokens=tokens)
        pages = pages_of(runs)
        report = pack.verify(
            self.landing,
            torch.tensor(pages),
            tag=tag,
            positions=first_position + torch.arange(len(pages)),
            filled=filled_counts(self.layout, len(pages), tokens),
        )
        mismatch = report.mismatch
        if mismatch is None:
            mismatch = self._take_in(pages, tag, first_position=first_position, tokens=tokens)
        else:
            # What was met lies where those who report it look; no header of it passes for another.
            page = mismatch.page
            self.memory.words[:, page] = self._moved(self.landing.words[:, page])
        self.counters.mismatches += mismatch is not None
        return VerifyReport(checked=report.checked, digest=report.digest, mismatch=mismatch)

    def _take_in(
        self, pages: list[int], tag: int, *, first_position: int, tokens: int
    ) -> HeaderMismatch | None:
        """Unpack pages from the landing memory; the first that changed since it was checked."""
        assert self.landing is not None, "only called where pages land"
        buffer = self._buffer(len(pages))
        buffer.words.copy_(self._moved(self.landing.words[:, pages]))
        labels = self._labels(pages, tag, first_position=first_position, tokens=tokens)
        flags = new_flags(len(pages), labels.pages.device)
        slots = torch.arange(len(pages), dtype=torch.int32, device=flags.device)
        dispatch.copy_pages(
            buffer,
            self.memory,
            PageLabels(
                pages=slots, tags=labels.tags, positions=labels.positions, filled=labels.filled
            ),
            flags,
            target_pages=labels.pages,
            target_tags=labels.tags,
            sealed=True,
        )
        for page, fault in zip(pages, flags.tolist(), strict=True):
            if fault:
                return HeaderMismatch(page=page, layer=0, field="digest", expected=0, found=fault)
        return None

    def _labels(
        self, pages: list[int], tag: int, *, first_position: int, tokens: int
    ) -> PageLabels:
        return PageLabels.of(
            pages,
            [tag] * len(pages),
            positions=range(first_position, first_position + len(pages)),
            filled=filled_counts(self.layout, len(pages), tokens).tolist(),
            device=self.memory.octets.device,
        )

    def _buffer(self, pages: int) -> PageMemory:
        return PageMemory.allocate(self.layout, pages, self.memory.octets.device)

    def _moved(self, words: Tensor) -> Tensor:
        return words.to(self.memory.octets.device)
