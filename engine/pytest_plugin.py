"""A pytest plugin: Hypothesis drives a world, and a failure becomes a small trace file.

Owns: the strategy of choices, the fixture `custody_walk`, and where a failure's trace is written.
Must not know: any world; whoever uses it brings one, or takes this project's.

In anybody's tests, with `pytest_plugins = ["engine.pytest_plugin"]` in the topmost conftest.py or
`-p engine.pytest_plugin` on the command line::

    @given(numbers=choices())
    def test_my_engine_keeps_its_pages_apart(custody_walk, numbers):
        custody_walk(numbers, worlds=lambda _scenario: ForeignWorld(MyEngine()))

Hypothesis draws numbers of a fixed count; each picks among what is enabled (large ones a fault),
and 0 does nothing, so that it can shrink a failure by zeros. What it is left with is reduced by this project's minimiser,
written to `custody-traces/` (`--custody-traces DIR`), and named in the report.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from engine.explorer import Manner
from engine.minimiser import minimise
from engine.trace import SUFFIX, Trace, Worlds, dumps, record
from engine.world import World
from engine.world_values import FAULTS, Action, Found, Scenario

STEPS = 100
CHOICE_MAX = 255
MANNER_MAX = 65_535
FAULTS_FROM = 232
"""Numbers from here on pick a fault, if one may happen: one in ten, as rare as in a walk."""


class WalkFailure(AssertionError):
    """A world's oracle saw something; `trace` is the way there."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(str(trace.found))
        self.trace = trace


class Walk(Protocol):
    """What the fixture gives: a walk that numbers choose."""

    def __call__(
        self,
        numbers: Sequence[int],
        *,
        scenario: Scenario = ...,
        worlds: Worlds = ...,
        calm: bool = ...,
        adapter: str = ...,
        manner: int = ...,
    ) -> Any:
        """The world after the walk. Raises WalkFailure."""


def choices(steps: int = STEPS) -> SearchStrategy[list[int]]:
    """Numbers for one walk: always as many, so that leaving one out moves no other."""
    return st.lists(st.integers(0, CHOICE_MAX), min_size=steps, max_size=steps)


def manners() -> SearchStrategy[int]:
    """How a walk is walked; 0 is plain, and what a failure shrinks to if it can."""
    return st.integers(0, MANNER_MAX)


def walk_by(
    numbers: Sequence[int],
    *,
    scenario: Scenario | None = None,
    worlds: Worlds = World,
    calm: bool = True,
    manner: int = 0,
) -> Any:
    """Let each number pick what happens next; then leave the world alone, if `calm` is wanted.

    A `manner` other than 0 leaves out kinds of faults and makes actors slow, as the random walk
    does from such a seed; the numbers are then drawn with.
    Returns the world. Raises WalkFailure.
    """
    scenario = Scenario() if scenario is None else scenario
    walked = Manner(scenario, manner) if manner else None
    scenario = scenario if walked is None else walked.scenario
    world = worlds(scenario)
    actions: list[Action] = []
    resting = False
    try:
        for place, number in enumerate(numbers):
            if number == 0:
                continue
            possible = world.enabled()
            if not possible:
                break
            if walked is None:
                actions.append(pick(possible, number))
            else:
                chance = random.Random((manner << 32) + (place << 8) + number)
                actions.append(walked.draw(chance, possible))
            world.step(actions[-1])
        if calm:
            resting = True
            world.calm()
    except Found as found:
        rule = found.rule or world.broken_rule()
        trace = Trace(0, scenario, tuple(actions), resting, found, rule, worlds)
        raise WalkFailure(trace) from found
    return world


def pick(possible: Sequence[Action], number: int) -> Action:
    """The action that a number above 0 means among those that can happen; faults are rare."""
    faults = [a for a in possible if a[0] in FAULTS or a[0].startswith("fault:")]
    common = [a for a in possible if a not in faults]
    if not common or (faults and number >= FAULTS_FROM):
        return faults[(number - FAULTS_FROM) % len(faults)]
    return common[(number - 1) % len(common)]


# --- pytest -----------------------------------------------------------------------------------

FAILED = pytest.StashKey[dict[str, tuple[Trace, str]]]()
"""The last failing walk of each test, by the test's name, and its adapter."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where traces go."""
    group = parser.getgroup("custody", "walks through worlds of pages and hand-offs")
    group.addoption(
        "--custody-traces",
        metavar="DIR",
        default="custody-traces",
        help="directory for the minimised traces of failed walks (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin without any failure."""
    config.stash[FAILED] = {}


@pytest.fixture(scope="session")
def custody_walk(pytestconfig: pytest.Config) -> Walk:
    """A walk that numbers choose; the last failing one of each test becomes a trace file."""

    def walk(
        numbers: Sequence[int],
        *,
        scenario: Scenario | None = None,
        worlds: Worlds = World,
        calm: bool = True,
        adapter: str = "",
        manner: int = 0,
    ) -> Any:
        try:
            return walk_by(numbers, scenario=scenario, worlds=worlds, calm=calm, manner=manner)
        except WalkFailure as failure:
            # Hypothesis tries its smallest failure last.
            name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            pytestconfig.stash[FAILED][name] = (failure.trace, adapter)
            raise

    return walk


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reduce and write what a failed test walked, and say where it is."""
    report = yield
    kept = item.config.stash[FAILED].pop(item.nodeid, None) if call.when == "call" else None
    if kept is not None and report.failed:
        small = minimise(kept[0])
        folder = Path(item.config.getoption("--custody-traces"))
        path = folder / (re.sub(r"[^A-Za-z0-9]+", "-", item.nodeid).strip("-") + SUFFIX)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(dumps(record(small, adapter=kept[1])), encoding="utf-8")
        report.sections.append(
            ("custody trace", f"{small}\nwritten to {path}; again: custody replay {path}")
        )
    return report


__all__ = ["Walk", "WalkFailure", "choices", "custody_walk", "manners", "walk_by"]
