"""Figures of single mechanisms, taken inside this process.

Owns: what each figure compares.
Must not know: deployments; nothing here serves a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import torch

from engine.decode_step import DecodeSteps, PlainSteps, make_steps
from engine.effects import Append
from engine.model import Model
from engine.paged import PagedBatch, SequenceSlice
from engine.pool import KVPool
from engine.weights import load_model
from kernels.headers import HeaderMismatch
from kernels.layout import PageLayout
from lifecycle.events import ByScheduler, Cause, Entry, Requeued
from lifecycle.ids import RequestId, request_id
from transport.bench_context import PAGE_TOKENS, Context
from transport.bench_stats import Figure, Target, UnusableSample, interleave, percentile
from transport.journal import Journal
from transport.stores.segments import SegmentStore

EVENTS_PER_SECOND = 5_000
TICK_SECONDS = 0.002
WATCHED_SECONDS = 3.0
HEADER_STEPS = 12


# --- The scheduler's event loop -------------------------------------------------------------------


def loop(context: Context) -> tuple[Figure, ...]:
    """How late the event loop wakes while the log grows, against idle."""

    def lateness(events_per_second: int, number: int) -> float:
        folder = context.folder / f"loop-{events_per_second}-{number}"
        return percentile(anyio.run(_lateness, folder, events_per_second), 0.99) * 1e3

    rounds = interleave(
        context.settings.runs,
        lambda number: lateness(EVENTS_PER_SECOND, number),
        lambda number: lateness(0, number),
    )
    return (
        Figure(
            name="loop-lateness",
            says=f"99th percentile of the event loop's lateness while {EVENTS_PER_SECOND} events a "
            "second are appended to segment files and made durable, against idle",
            unit="ms",
            ours=tuple(busy for busy, _ in rounds),
            theirs=tuple(idle for _, idle in rounds),
            peer="the same loop, idle",
        ),
    )


async def _lateness(folder: Path, events_per_second: int) -> list[float]:
    """Seconds that each of many short timers came late."""
    store = SegmentStore(folder)
    journal = Journal(store, lambda: None)
    late: list[float] = []

    async def tell(work: Callable[[], None]) -> None:
        work()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.run, tell)
        begin = due = time.perf_counter()
        made = 0
        while due < begin + WATCHED_SECONDS:
            due += TICK_SECONDS
            await anyio.sleep(max(0.0, due - time.perf_counter()))
            late.append(max(0.0, time.perf_counter() - due))
            wanted = int((due - begin) * events_per_second)
            if wanted > made:
                journal.append(_appends(journal.appended, made, wanted))
                made = wanted
        tasks.cancel_scope.cancel()
    if made and journal.appended < made:
        raise UnusableSample(figure="loop-lateness", reason=f"{made} events were not all appended")
    store.close()
    return late


def _appends(position: int, start: int, stop: int) -> list[Append]:
    request = request_id(epoch=1, serial=1)
    return [Append(position + 1 + n - start, _entry(request, n)) for n in range(start, stop)]


def _entry(request: RequestId, sequence: int) -> Entry:
    event = Requeued(Cause.DEADLINE, "benchmark", sequence)
    return Entry(request, sequence, 1, ByScheduler(1), 1 + sequence, event)


# --- Header checks --------------------------------------------------------------------------------


class _UncheckedBatch(PagedBatch):
    """A plain step without header checks."""

    def _compare(self) -> tuple[int, dict[int, HeaderMismatch]]:
        return 0, {}


def unchecked(model: Model, pool: KVPool, *, threads: int) -> DecodeSteps:
    """Steps without header checks.  They exist here alone, and nothing that serves can reach them."""
    steps = make_steps(model, pool, threads=threads)
    if isinstance(steps, PlainSteps):
        steps.batch = _UncheckedBatch
    else:
        vars(steps)["_checked"] = 0
    return steps


def headers(context: Context) -> tuple[Figure, ...]:
    """A decode step with the header checks, against the same step without them."""
    settings = context.settings
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        model = load_model(settings.model)
        room = Room(model, batch=settings.batch, tokens=settings.prompt_tokens)
        ways = [
            make(model, room.pool, threads=settings.threads) for make in (make_steps, unchecked)
        ]
        for way in ways:
            room.seconds(way)
        # Single steps alternate, so that a busy moment meets both sides.
        rounds = [
            interleave(
                HEADER_STEPS,
                lambda _: room.seconds(ways[0]),
                lambda _: room.seconds(ways[1]),
            )
            for _ in range(settings.runs)
        ]
    finally:
        torch.set_num_threads(threads)
    sums = [tuple(min(side) for side in zip(*round_, strict=True)) for round_ in rounds]
    return (
        Figure(
            name="header-check",
            says=f"{settings.batch} streams over {settings.prompt_tokens} tokens: decode steps a "
            "second with the header checks, against a build of the step without them; the "
            f"quickest of {HEADER_STEPS} alternating steps counts",
            unit="steps/s",
            ours=tuple(1 / checked for checked, _ in sums),
            theirs=tuple(1 / plain for _, plain in sums),
            peer="the step without header checks",
            target=Target(value=0.99, better="higher"),
            notes={"path": ways[0].path},
        ),
    )


class Room:
    """A filled pool, and the same decode step over it again and again."""

    def __init__(self, model: Model, *, batch: int, tokens: int) -> None:
        config = model.config
        layout = PageLayout(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page_tokens=PAGE_TOKENS,
            dtype=model.dtype,
        )
        each = layout.pages_for_tokens(tokens + 1)
        self.pool = KVPool.allocate(layout, batch * each)
        self.pool.memory.octets.fill_(0)
        self._slices = []
        for number in range(batch):
            runs = ((number * each, each),)
            self.pool.open_pages(runs, tag=number + 1, first_position=0)
            self._slices.append(SequenceSlice(runs, number + 1, tokens, 1))
            first = SequenceSlice(runs, number + 1, 0, tokens)
            filling = PagedBatch(self.pool, [first])
            filling.begin_step()
            for layer in range(layout.layers):
                rows = torch.randn(tokens, layout.kv_heads, layout.head_dim)
                filling.append(layer, rows, rows)
            filling.end_step()
        self._inputs = [number % config.vocabulary for number in range(batch)]

    def seconds(self, steps: DecodeSteps) -> float:
        """One step, sampling left out."""
        start = time.perf_counter()
        mismatches = steps.run(self._inputs, self._slices).mismatches
        took = time.perf_counter() - start
        if mismatches:
            raise UnusableSample(figure="header-check", reason=f"headers differ: {mismatches}")
        return took
