"""The random search of `custody fuzz`: runs shared between processes, and what they bring home.

Owns: which process walks which seeds, when to stop, what is worth keeping.
Must not know: how anything is printed or filed.

Seeds are handed out in order; with a number of runs the finding of the least seed is reported,
however many processes there are. A world imports no torch, so a process starts in a moment.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import attrs

from engine.exhaust import nearest
from engine.explorer import walk
from engine.minimiser import minimise
from engine.scenarios import of_seed
from engine.trace import Trace, TraceFile, Worlds, name_actions, record, replay_names
from engine.world import World
from engine.world_values import Action, Scenario
from lifecycle.ids import Party
from transport.fuzz_values import Finding, Report, Settings, adapter_worlds

CHUNK_RUNS = 8
"""Runs that a process walks before it reports."""

Progress = Callable[[Report], None]


@attrs.frozen
class Chunk:
    """Some runs in order: counts, the first finding, runs that reached something new."""

    runs: int
    steps: int
    cpu_s: float
    sometimes: Counter[str]
    finding: Finding | None
    kept: tuple[tuple[TraceFile, frozenset[str]], ...]


def worlds_of(adapter: str, seed: int) -> tuple[str, Scenario, Worlds]:
    """Name, scenario and worlds of a run."""
    if adapter:
        return adapter, Scenario(), adapter_worlds(adapter)
    name, scenario = of_seed(seed)
    return name, scenario, World


def walk_chunk(seed: int, count: int, adapter: str, known: frozenset[str]) -> Chunk:
    """Walk so many seeds in order, until something is found."""
    start = time.process_time()
    sometimes: Counter[str] = Counter()
    seen, kept, steps = set(known), [], 0
    finding = None
    runs = 0
    for own in range(seed, seed + count):
        name, scenario, worlds = worlds_of(adapter, own)
        taken: list[Action] = []
        world, trace, moved = walk(scenario, own, worlds=worlds, taken=taken)
        runs, steps = runs + 1, steps + moved
        sometimes.update(world.sometimes)
        if trace is not None:
            finding = examine(trace, name, adapter)
            break
        features = frozenset(world.sometimes)
        if not features <= seen:
            kept.append((_keep(world, taken, own, adapter, worlds), features))
            seen |= features
    spent = time.process_time() - start
    return Chunk(runs, steps, spent, sometimes, finding, tuple(kept))


def _keep(world: World, taken: list[Action], seed: int, adapter: str, worlds: Worlds) -> TraceFile:
    scenario = getattr(world, "scenario", Scenario())
    names = name_actions(scenario, taken, worlds=worlds)
    title = "reached what no earlier run had reached"
    return TraceFile(scenario, names, calm=True, seed=seed, title=title, adapter=adapter)


def examine(trace: Trace, where: str, adapter: str = "", mutant: str = "") -> Finding:
    """Reduce a trace and say what it shows; of a mutant also how short it could be."""
    start = time.process_time()
    small = minimise(trace)
    spent = time.process_time() - start
    best = nearest(small) if mutant else None
    file = record(small, mutant=mutant, adapter=adapter)
    again = replay_names(
        small.scenario, file.actions, calm=small.calm, eager=small.eager, worlds=small.worlds
    )
    return Finding(
        where=where,
        seed=trace.seed,
        name=small.found.name,
        message=small.found.message,
        rule=small.rule,
        pages=pages_held(again.world),
        small=file,
        whole=record(trace, mutant=mutant, adapter=adapter),
        minimise_s=spent,
        optimum=None if best is None else len(best),
    )


def pages_held(world: object) -> str:
    """Who holds which page at this moment, by the engines' own books."""
    if not isinstance(world, World):
        return ""
    numbers = {request: f"r{n}" for n, request in enumerate(world.clients, start=1)}
    parts = []
    for party, core in world.cores.items():
        for holding in core.holdings.values():
            pages = ", ".join(
                str(r.first) if r.count == 1 else f"{r.first} to {r.stop - 1}"
                for r in holding.reserved.pages
            )
            whose = f"{numbers.get(holding.request, holding.request)}/{holding.attempt}"
            parts.append(f"{_label(party)} page {pages}: {whose}")
    return "; ".join(parts) or "nobody holds a page"


def _label(party: Party) -> str:
    return f"{party.engine}{party.rank}"


# --- the whole search -------------------------------------------------------------------------


def search(settings: Settings, *, known: frozenset[str], progress: Progress) -> Report:
    """Walk until something is found, or runs or seconds are used up."""
    report = Report(settings)
    began = time.monotonic()
    seen = set(known)
    for chunk in _chunks(settings, seen, began):
        report.runs += chunk.runs
        report.steps += chunk.steps
        report.cpu_s += chunk.cpu_s
        report.sometimes.update(chunk.sometimes)
        for file, features in chunk.kept:
            if not features <= seen:
                report.kept.append((file, features))
                seen |= features
        report.wall_s = time.monotonic() - began
        if chunk.finding is not None and (
            report.finding is None or chunk.finding.seed < report.finding.seed
        ):
            report.finding = chunk.finding
        progress(report)
    report.wall_s = time.monotonic() - began
    return report


def _starts(settings: Settings, began: float) -> Iterator[tuple[int, int]]:
    """First seed and number of runs of each chunk, as long as there is something left to do."""
    done = 0
    while settings.runs is None or done < settings.runs:
        if settings.seconds is not None and time.monotonic() - began >= settings.seconds:
            return
        left = CHUNK_RUNS if settings.runs is None else min(CHUNK_RUNS, settings.runs - done)
        yield settings.seed + done, left
        done += left


def _chunks(settings: Settings, seen: set[str], began: float) -> Iterator[Chunk]:
    starts = _starts(settings, began)
    if settings.jobs == 1:
        for seed, count in starts:
            chunk = walk_chunk(seed, count, settings.adapter, frozenset(seen))
            yield chunk
            if chunk.finding is not None:
                return
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(settings.jobs, mp_context=context) as pool:
        running: dict[Future[Chunk], int] = {}
        found: int | None = None
        while True:
            while found is None and len(running) < settings.jobs + 1:
                start = next(starts, None)
                if start is None:
                    break
                future = pool.submit(walk_chunk, *start, settings.adapter, frozenset(seen))
                running[future] = start[0]
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                chunk = future.result()
                found = chunk.finding.seed if chunk.finding is not None else found
                yield chunk
