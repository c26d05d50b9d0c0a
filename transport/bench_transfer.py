"""Figures of moving pages: packing and a data plane against a plain copy of memory.

Owns: what a transfer consists of, and what it is compared with.
Must not know: deployments; nothing here serves a request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs
import torch

from engine.dataplane import Answer, DataPlane
from engine.pool import filled_counts
from engine.runner import copy_plan
from kernels.layout import PageLayout, PageMemory
from kernels.pack import pack
from lifecycle.ids import PageRange
from transport.bench_context import PAGE_TOKENS, Context
from transport.bench_pages import GRANT, PARTY, PagesChild
from transport.bench_stats import Figure, Target, UnusableSample, interleave
from transport.planes.grpc_stream import GrpcStreamPlane
from transport.planes.segment import create_segment
from transport.planes.shared_memory import SharedMemoryPlane

TRANSFERS = 8
GIGA = 1e9


@attrs.frozen
class _Compared:
    """Ours and theirs in GB/s, measured next to each other, and what packing takes of ours."""

    rounds: tuple[tuple[float, float], ...]
    packing_share: float


@attrs.define
class _Mover:
    """Packs the pages of one prompt into staging and moves them into an owner's pool."""

    source: PageMemory
    staging: PageMemory
    tokens: int
    plane: DataPlane
    changed: threading.Event

    def pack(self) -> None:
        """Sealed copies of all pages in staging: the part of a transfer before its bytes move."""
        numbers = torch.arange(self.source.pages)
        pack(
            self.source,
            numbers,
            self.staging,
            numbers,
            tag=7,
            positions=numbers,
            filled=filled_counts(self.source.layout, self.source.pages, self.tokens),
        )

    def move(self, descriptor: str) -> Callable[[], None]:
        """One whole transfer: pack, post, wait for the proof that every byte is placed."""
        peer = self.plane.open_peer(descriptor)
        pages = (PageRange(0, self.source.pages),)
        writes = copy_plan(
            self.source.layout,
            staging=pages,
            staging_pages=self.staging.pages,
            target=pages,
            target_pages=self.source.pages,
        )

        def once() -> None:
            self.pack()
            self.changed.clear()
            ticket = self.plane.post(peer, writes, GRANT)
            while (answer := self.plane.poll(ticket)) is Answer.IN_FLIGHT:
                self.changed.wait()
                self.changed.clear()
            if answer is not Answer.DONE:
                raise UnusableSample(figure="transfer", reason=self.plane.explain(ticket))

        return once


def _mover(layout: PageLayout, tokens: int, make: Callable[[threading.Event], DataPlane]) -> _Mover:
    pages = layout.pages_for_tokens(tokens)
    source, staging = (PageMemory.allocate(layout, pages) for _ in range(2))
    # Pages of zeros would be read from one page of the kernel's.
    source.octets.fill_(1)
    staging.octets.fill_(1)
    changed = threading.Event()
    plane = make(changed)
    plane.register(staging.octets.numpy().data)
    return _Mover(source, staging, tokens, plane, changed)


def _seconds(work: Callable[[], None]) -> float:
    """The quickest of several: whoever else runs on the machine can only slow one down."""
    took = []
    for _ in range(TRANSFERS):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took)


def _copier(size_bytes: int) -> Callable[[], None]:
    """A plain copy of as many bytes."""
    source, target = (torch.ones(size_bytes, dtype=torch.uint8) for _ in range(2))
    return lambda: _discard(target.copy_(source))


def _discard(_: object) -> None:
    """A copy's result is its target."""


def transfer(context: Context) -> tuple[Figure, ...]:
    """Packing and moving the pages of one prompt, against a plain copy of as many bytes."""
    config, tokens = context.config, context.settings.prompt_tokens
    layout = PageLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_tokens=PAGE_TOKENS,
    )
    size = layout.pages_for_tokens(tokens) * layout.page_bytes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = tuple(
            Figure(
                name=f"transfer-{name}",
                says=f"pages of a prompt of {tokens} tokens packed, moved by {name} and "
                "acknowledged, one thread, against a plain copy of as many bytes; the quickest of "
                f"{TRANSFERS} counts on both sides",
                unit="GB/s",
                ours=tuple(ours for ours, _ in found.rounds),
                theirs=tuple(theirs for _, theirs in found.rounds),
                peer="plain memory copy",
                target=Target(value=0.5, better="higher") if name == "shared-memory" else None,
                notes={"bytes": size, "packing_share": round(found.packing_share, 2)},
            )
            for name, found in (
                ("shared-memory", _move_shared(context, layout, size)),
                ("grpc", _move_grpc(context, layout, size)),
            )
        )
    finally:
        torch.set_num_threads(threads)
    return figures


def _alternate(context: Context, size: int, mover: _Mover, descriptor: str) -> _Compared:
    once, copy = mover.move(descriptor), _copier(size)
    for work in (once, copy):
        work()
    rounds = interleave(
        context.settings.runs,
        lambda _: size / _seconds(once) / GIGA,
        lambda _: size / _seconds(copy) / GIGA,
    )
    best = max(ours for ours, _ in rounds)
    return _Compared(rounds, packing_share=_seconds(mover.pack) * best * GIGA / size)


def _move_shared(context: Context, layout: PageLayout, size: int) -> _Compared:
    segment = create_segment(size, incarnation="owner/1")
    owner = SharedMemoryPlane(segment=segment)
    owner.register(segment.buffer)
    mover = _mover(layout, context.settings.prompt_tokens, lambda e: SharedMemoryPlane(wake=e.set))
    try:
        return _alternate(context, size, mover, owner.descriptor())
    finally:
        mover.plane.shutdown()
        owner.shutdown()
        segment.close()


def _move_grpc(context: Context, layout: PageLayout, size: int) -> _Compared:
    with PagesChild(size_bytes=size, folder=context.folder) as child:
        mover = _mover(
            layout,
            context.settings.prompt_tokens,
            lambda e: GrpcStreamPlane(party=PARTY, incarnation="prefill/1", wake=e.set),
        )
        try:
            return _alternate(context, size, mover, child.descriptor)
        finally:
            mover.plane.shutdown()
