"""The random search of `custody fuzz`: what its runs bring home.

Owns: what a chunk of runs does, and what is worth keeping of it.
Must not know: how anything is printed or filed.

Seeds are handed out in order; with a number of runs the finding of the least seed is reported,
however many processes there are. A world imports no torch, so a process starts in a moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import attrs

from engine.exhaust import nearest
from engine.explorer import walk
from engine.minimiser import minimise
from engine.scenarios import of_seed
from engine.trace import Trace, TraceFile, Worlds, name_actions, record, replay_names
from engine.trace_names import label
from engine.world import World
from engine.world_values import Action, Scenario
from transport.fuzz_pool import chunks, shared
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
            parts.append(f"{label(party)} page {pages}: {whose}")
    return "; ".join(parts) or "nobody holds a page"


# --- the whole search -------------------------------------------------------------------------


def search(settings: Settings, *, known: frozenset[str], progress: Progress) -> Report:
    """Walk until something is found, or runs or seconds are used up."""
    report = Report(settings)
    began = time.monotonic()
    seen = set(known)

    def calls() -> Iterator[Callable[[], Chunk]]:
        drawn = chunks(settings.seed, runs=settings.runs, seconds=settings.seconds, size=CHUNK_RUNS)
        for start, count in drawn:
            if report.finding is not None:
                return
            yield partial(walk_chunk, start, count, settings.adapter, frozenset(seen))

    for chunk in shared(calls(), settings.jobs):
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
