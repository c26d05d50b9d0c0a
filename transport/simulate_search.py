"""Many simulated runs, until something is found.

Owns: what a run brings home, and the reduction of a plan that found something.
Must not know: how anything is printed.

A run is a function of its seed and of nothing else; with a number of runs the finding of the
least seed is reported, however many processes there are.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import attrs
import structlog

from engine.store import Stored
from engine.world_values import Found
from transport.fuzz_pool import chunks, shared
from transport.jsonlines import jsonlines
from transport.simulated_engine import Parts
from transport.simulated_faults import Fault, Plan, draw_plan
from transport.simulated_world import Deployment

CHUNK_RUNS = 8
YOUNG_OBJECTS = 100_000
"""A run makes millions of small values and few circles, so these are looked for less often."""

REDUCTIONS_MAX = 60

T = TypeVar("T")


@attrs.frozen
class Outcome:
    """One run: what was found (empty: nothing), its log, and what it reached."""

    plan: Plan
    name: str
    message: str
    rule: str
    log: tuple[Stored, ...]
    sometimes: Counter[str]
    calls: int
    virtual_ns: int

    def text(self) -> str:
        """The log as JSON Lines, which is a function of the seed, byte for byte."""
        return "".join(jsonlines(self.log, complete=True))

    def digest(self) -> str:
        """A short name for the log's text."""
        return hashlib.sha256(self.text().encode()).hexdigest()


@attrs.frozen
class Chunk:
    """Some runs in order, up to the first finding."""

    runs: int
    requests: int
    entries: int
    virtual_s: float
    cpu_s: float
    sometimes: Counter[str]
    found: Outcome | None


@attrs.define
class Report:
    """What a search did and saw."""

    seed: int
    runs: int = 0
    requests: int = 0
    entries: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    sometimes: Counter[str] = attrs.Factory(Counter)
    found: Outcome | None = None

    @property
    def requests_per_cpu_s(self) -> float:
        """How fast it went."""
        return self.requests / self.cpu_s if self.cpu_s else 0.0

    def add(self, chunk: Chunk) -> None:
        """Count what some runs brought."""
        self.runs += chunk.runs
        self.requests += chunk.requests
        self.entries += chunk.entries
        self.virtual_s += chunk.virtual_s
        self.cpu_s += chunk.cpu_s
        self.sometimes.update(chunk.sometimes)
        if chunk.found is not None and (
            self.found is None or chunk.found.plan.seed < self.found.plan.seed
        ):
            self.found = chunk.found


@contextmanager
def silence() -> Iterator[None]:
    """Let parts that are simulated by the thousand write no log lines of their own."""
    known = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**known)


@contextmanager
def collected_less() -> Iterator[None]:
    """Let the search for unreachable circles of objects take less of a run's time."""
    known = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *known[1:])
    try:
        yield
    finally:
        gc.set_threshold(*known)


def run_plan(plan: Plan, parts: Parts = Parts()) -> Outcome:  # noqa: B008 - frozen
    """Go through a plan to its end, or to what was found."""
    with silence():
        deployment = Deployment(plan, parts)
        name = message = rule = ""
        try:
            deployment.run()
        except Found as found:
            name, message, rule = found.name, found.message, found.rule
        finally:
            deployment.close()
    return Outcome(
        plan,
        name,
        message,
        rule,
        tuple(deployment.scheduler.store.tail(1)),
        deployment.sometimes,
        deployment.clock.called,
        deployment.clock.now_ns,
    )


def run_chunk(seed: int, count: int) -> Chunk:
    """Run so many seeds in order, until something is found."""
    began = time.process_time()
    runs = requests = entries = 0
    virtual_ns = 0
    sometimes: Counter[str] = Counter()
    found = None
    with collected_less():
        for own in range(seed, seed + count):
            outcome = run_plan(draw_plan(own))
            runs, requests = runs + 1, requests + len(outcome.plan.wishes)
            entries, virtual_ns = entries + len(outcome.log), virtual_ns + outcome.virtual_ns
            sometimes.update(outcome.sometimes)
            if outcome.name:
                found = outcome
                break
    spent = time.process_time() - began
    return Chunk(runs, requests, entries, virtual_ns / 1e9, spent, sometimes, found)


def search(
    seed: int,
    *,
    runs: int | None,
    seconds: float | None,
    jobs: int,
    progress: Callable[[Report], object] = lambda _: None,
) -> Report:
    """Run seeds from the first on, until something is found or runs or seconds are used up.

    `progress` hears of the report whenever it has grown.
    """
    report = Report(seed)

    def calls() -> Iterator[Callable[[], Chunk]]:
        for start, count in chunks(seed, runs=runs, seconds=seconds, size=CHUNK_RUNS):
            if report.found is not None:
                return
            yield partial(run_chunk, start, count)

    for chunk in shared(calls(), jobs):
        report.add(chunk)
        progress(report)
    return report


# --- reduction --------------------------------------------------------------------------------


def reduce_plan(outcome: Outcome) -> Outcome:
    """A smaller plan that finds the same: without faults and clients that it does not need."""
    best, left = outcome, REDUCTIONS_MAX

    def still(plan: Plan) -> bool:
        nonlocal best, left
        left -= 1
        again = run_plan(plan)
        if again.name != outcome.name or again.rule != outcome.rule:
            return False
        best = again
        return True

    def shrunk(items: tuple[T, ...], put: Callable[[tuple[T, ...]], Plan]) -> tuple[T, ...]:
        size = max(1, len(items) // 2)
        while left > 0:
            at = 0
            while at < len(items) and left > 0:
                fewer = items[:at] + items[at + size :]
                if still(put(fewer)):
                    items = fewer
                else:
                    at += size
            if size == 1:
                break
            size //= 2
        return items

    def without_faults(faults: tuple[Fault, ...]) -> Plan:
        return attrs.evolve(best.plan, faults=faults)

    shrunk(best.plan.faults, without_faults)
    shrunk(best.plan.wishes, lambda wishes: attrs.evolve(best.plan, wishes=wishes))
    return best
