"""The Hypothesis front end hunts every mutant: in how many trials it finds each, and how soon.

Owns: the profile of a hunt, and the table.
Must not know: any mutant.

The worlds are those of the walk, and so is the most that a trial may run.
Hypothesis draws the world, the manner of the walk and one number a step; nothing is shrunk.

    python -m property_tests.hypothesis_hunt [--trials N] [--seed N] [NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from engine.pytest_plugin import WalkFailure, choices, manners, walk_by
from property_tests.mutants import BY_NAME, MUTANTS, WORLDS, Mutant
from property_tests.mutants_base import RUNS_MAX, STEPS_MAX
from transport.fuzz_mutants import quantile

CPU_S_MAX = 60.0
SHARE_MIN = 0.95
"""In how many trials of all a mutant must be found."""


class OutOfTime(Exception):
    """A trial has used its seconds."""


@attrs.frozen
class Trial:
    """One hunt: walks and CPU seconds until something was found, and whether it was foretold."""

    runs: int
    cpu_s: float
    said: str = ""
    expected: bool = False


def trial(mutant: Mutant, seed: int, *, runs: int = RUNS_MAX) -> Trial:
    """Let Hypothesis look for one mutant from one seed on."""
    made = {name: mutant.put_into(scenario) for name, scenario in WORLDS.items()}
    start, count = time.process_time(), 0
    ended = start
    found: list[WalkFailure] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=runs,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(tuple(made)), manners(), choices(STEPS_MAX))
    def look(name: str, manner: int, numbers: list[int]) -> None:
        nonlocal count, ended
        count += not found
        if time.process_time() - start > CPU_S_MAX:
            raise OutOfTime
        try:
            walk_by(numbers, scenario=made[name], worlds=mutant.worlds, manner=manner)
        except WalkFailure as failure:
            if not found:
                ended = time.process_time()
            found.append(failure)
            raise

    with contextlib.suppress(WalkFailure, OutOfTime):
        look()
    if not found:
        return Trial(count, time.process_time() - start)
    trace = found[0].trace
    expected = mutant.expects(trace.found, trace.rule)
    return Trial(count, ended - start, f"{trace.found.name} ({trace.rule})", expected)


def hunts(names: Sequence[str], *, trials: int, seed: int) -> Iterator[tuple[str, list[Trial]]]:
    """Every named mutant, or all, with its trials."""
    for mutant in [BY_NAME[name] for name in names] or MUTANTS:
        yield mutant.name, [trial(mutant, seed + number) for number in range(trials)]


def line(name: str, done: list[Trial]) -> str:
    """One line of the table, in Markdown; pairs are median and 95th percentile."""
    good = sum(one.expected for one in done)
    runs, spent = [one.runs for one in done], [one.cpu_s for one in done]
    said = ", ".join(sorted({one.said or "nothing" for one in done}))
    return (
        f"| {name} | {good} of {len(done)} | {said} "
        f"| {quantile(runs, 0.5):.0f} / {quantile(runs, 0.95):.0f} "
        f"| {quantile(spent, 0.5):.2f} / {quantile(spent, 0.95):.2f} |"
    )


def main(arguments: list[str]) -> int:
    """Print the table; 1 when some mutant is found in too few trials."""
    parser = argparse.ArgumentParser(prog="python -m property_tests.hypothesis_hunt")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print("| mutant | found | oracle (rule) | runs | CPU s |\n| --- | --- | --- | --- | --- |")
    good = total = 0
    for name, done in hunts(options.names, trials=options.trials, seed=options.seed):
        print(line(name, done), flush=True)
        good, total = good + sum(one.expected for one in done), total + len(done)
    print(f"\nfound as foretold in {good} of {total} trials ({good / total:.1%})")
    return 0 if good >= SHARE_MIN * total else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
