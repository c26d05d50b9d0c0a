"""The hunt for mutants: how soon each is found, by whom, and how short its trace gets.

Owns: trials shared between processes, and the table of figures.
Must not know: any mutant; the registry of a checkout is asked.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs

from transport.fuzz_search import examine
from transport.fuzz_values import Finding, mutant, registry

WHAT = "custody fuzz --mutants"
TRIALS = 20
RUNS_MAX = 5_000
CPU_S_MAX = 60.0
GREEN_RUNS = 200
"""Runs of a trial of code that must not be found: each would go on to the end."""
SEEDS_APART = 100_000
"""Seeds between two trials: more than a trial may walk."""


@attrs.frozen
class Trial:
    """One hunt: what was found first, after how many runs and CPU seconds."""

    runs: int
    cpu_s: float
    finding: Finding | None
    expected: bool


@attrs.frozen
class Row:
    """All trials of one mutant; `green` ones must not be found."""

    name: str
    green: bool
    reports: tuple[str, ...]
    trials: tuple[Trial, ...]

    @property
    def found(self) -> int:
        """In how many trials something was found."""
        return sum(trial.finding is not None for trial in self.trials)

    @property
    def good(self) -> bool:
        """Whether it is as it has to be: found every time by an expected rule, or never."""
        if self.green:
            return self.found == 0
        return all(trial.finding is not None and trial.expected for trial in self.trials)

    @property
    def shortest(self) -> Finding | None:
        """The finding with the shortest trace, of those that were foretold if there are any."""
        foretold = [t.finding for t in self.trials if t.finding is not None and t.expected]
        found = foretold or [t.finding for t in self.trials if t.finding is not None]
        return min(found, key=lambda one: (len(one.small.actions), one.seed), default=None)

    @property
    def optimum(self) -> int | None:
        """How short the shortest trace could be, where that is known."""
        return None if self.shortest is None else self.shortest.optimum

    @property
    def lengths(self) -> list[int]:
        """Actions of every reduced trace."""
        return [len(t.finding.small.actions) for t in self.trials if t.finding is not None]

    @property
    def above(self) -> list[int]:
        """By how many actions each reduced trace is longer than it could be, where known."""
        found = [t.finding for t in self.trials if t.finding is not None]
        return [len(f.small.actions) - f.optimum for f in found if f.optimum is not None]

    @property
    def minimise_s(self) -> float:
        """The longest reduction."""
        return max(
            (t.finding.minimise_s for t in self.trials if t.finding is not None), default=0.0
        )

    @property
    def rules(self) -> list[str]:
        """The rules that were named."""
        return sorted({t.finding.rule for t in self.trials if t.finding is not None})

    @property
    def oracles(self) -> list[str]:
        """The oracles that saw it."""
        return sorted({t.finding.name for t in self.trials if t.finding is not None})


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of the values does not exceed."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def one_trial(name: str, trial: int, seed: int, runs: int) -> Trial:
    """Hunt one mutant from one seed on, and reduce what is found."""
    one = mutant(name, WHAT)
    first = seed + trial * SEEDS_APART
    runs = min(runs, GREEN_RUNS) if one.green else runs
    hunt = registry(WHAT).hunt(one, runs=runs, first_seed=first, cpu_s_max=CPU_S_MAX)
    trace = hunt.outcome.trace
    if trace is None:
        return Trial(hunt.outcome.runs, hunt.cpu_s, None, expected=False)
    finding = examine(trace, hunt.world, mutant=name)
    return Trial(hunt.outcome.runs, hunt.cpu_s, finding, one.expects(trace.found, trace.rule))


def chosen(names: Sequence[str]) -> list[Any]:
    """The named mutants, or all; also the harmless one and the canary."""
    if names:
        return [mutant(name, WHAT) for name in names]
    return list(registry(WHAT).BY_NAME.values())


def hunts(
    names: Sequence[str],
    *,
    trials: int,
    seed: int,
    runs: int,
    jobs: int,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Every chosen mutant, one after another, with its trials shared between processes."""
    mutants = chosen(names)
    if jobs == 1:
        for one in mutants:
            progress(one.name)
            done = tuple(one_trial(one.name, trial, seed, runs) for trial in range(trials))
            yield _row(one, done)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = [
            (one, [pool.submit(one_trial, one.name, trial, seed, runs) for trial in range(trials)])
            for one in mutants
        ]
        for one, futures in waiting:
            progress(one.name)
            yield _row(one, tuple(future.result() for future in futures))


def _row(one: Any, trials: tuple[Trial, ...]) -> Row:
    return Row(one.name, one.green, tuple(one.reports), trials)


HEAD = ("mutant", "found", "rule", "oracle", "runs", "CPU s", "length", "optimum", "above")


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table; pairs are median and 95th percentile.

    The length and its optimum are those of the shortest trace; `above` is the most by which any
    reduced trace exceeds its own optimum, and in how many trials that is known.
    """
    runs = [trial.runs for trial in row.trials]
    spent = [trial.cpu_s for trial in row.trials]
    small = row.shortest
    mark = "" if row.good else "  WRONG"
    return (
        row.name,
        f"{row.found} of {len(row.trials)}{mark}",
        ", ".join(row.rules) or "-",
        ", ".join(row.oracles) or "-",
        f"{quantile(runs, 0.5):.0f} / {quantile(runs, 0.95):.0f}",
        f"{quantile(spent, 0.5):.2f} / {quantile(spent, 0.95):.2f}",
        "-" if small is None else str(len(small.small.actions)),
        "-" if row.optimum is None else str(row.optimum),
        f"{max(row.above)} ({len(row.above)})" if row.above else "-",
    )


def row_object(row: Row) -> dict[str, Any]:
    """One mutant as JSON."""
    runs = [trial.runs for trial in row.trials]
    spent = [trial.cpu_s for trial in row.trials]
    small = row.shortest
    return {
        "mutant": row.name,
        "reports": list(row.reports),
        "harmless": row.green,
        "as_it_should_be": row.good,
        "found": row.found,
        "trials": len(row.trials),
        "rules": row.rules,
        "oracles": row.oracles,
        "runs_median": quantile(runs, 0.5),
        "runs_p95": quantile(runs, 0.95),
        "cpu_s_median": round(quantile(spent, 0.5), 3),
        "cpu_s_p95": round(quantile(spent, 0.95), 3),
        "length": None if small is None else len(small.small.actions),
        "optimum": row.optimum,
        "lengths": sorted(row.lengths),
        "above_optimum": sorted(row.above),
        "minimise_s_max": round(row.minimise_s, 3),
    }
