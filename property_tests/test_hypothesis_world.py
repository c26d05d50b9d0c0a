"""Hypothesis as the front end of the search, and the plugin by which others use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, Phase, example, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from engine.pytest_plugin import WalkFailure, choices, manners, walk_by
from engine.trace import loads, replay_names
from engine.world import World
from engine.world_values import Asked, Scenario
from property_tests.hypothesis_hunt import trial
from property_tests.mutants import BY_NAME, CROWDED, focus

ROOT = Path(__file__).resolve().parent.parent
STEPS = 120
SCENARIOS = (
    CROWDED,
    attrs.evolve(CROWDED, placing=True),
    attrs.evolve(CROWDED, ranks=1, staging=1, asked=(Asked(3, 1), Asked(3, 2))),
    focus(crash=2, restart=1),
)


@given(st.sampled_from(SCENARIOS), manners(), choices(STEPS))
@example(CROWDED, 0, [0] * STEPS)
def test_no_numbers_lead_the_cores_astray(
    scenario: Scenario, manner: int, numbers: list[int]
) -> None:
    """Whatever is picked among the enabled actions, no oracle sees anything, in the end neither."""
    walk_by(numbers, scenario=scenario, manner=manner)


@pytest.mark.parametrize("name", ["double-release", "read-before-drain"])
def test_a_trial_of_hypothesis_finds_mutants(name: str) -> None:
    """The profile with which all mutants are hunted finds these at once, as foretold."""
    one = trial(BY_NAME[name], 1, runs=400)
    assert one.expected, one.said


@pytest.mark.parametrize("manner", [0, 6, 7])
def test_zeros_do_nothing_in_any_manner(manner: int) -> None:
    """Whatever the manner, a number does the same wherever zeros stand beside it."""
    still = walk_by([0] * 9, scenario=CROWDED, calm=False, manner=manner)
    assert not still.clients
    one = walk_by([3, 0, 5, 0], scenario=CROWDED, calm=False, manner=manner)
    other = walk_by([3, 0, 5], scenario=CROWDED, calm=False, manner=manner)
    assert one.key() == other.key()


def test_zeros_do_nothing() -> None:
    """A walk of zeros is a world at its start, so that shrinking towards zero drops actions."""
    still = walk_by([0] * 9, scenario=CROWDED, calm=False)
    assert still.key() == World(CROWDED).key()
    one = walk_by([0, 1, 0, 0, 5, 0], scenario=CROWDED, calm=False)
    other = walk_by([1, 5], scenario=CROWDED, calm=False)
    assert one.key() == other.key()


def fails(name: str, numbers: list[int]) -> bool:
    """Whether a mutant is found by these numbers."""
    mutant = BY_NAME[name]
    scenario = mutant.put_into(focus(cancel=3))
    try:
        walk_by(numbers, scenario=scenario, worlds=mutant.worlds)
    except WalkFailure as failure:
        return mutant.expects(failure.trace.found, failure.trace.rule)
    return False


@pytest.mark.parametrize("name", ["free-on-abort", "double-release"])
def test_hypothesis_finds_mutants(name: str) -> None:
    """The front end can fail: a hole in the cores is found within its examples, by its oracle."""
    quick = settings(
        max_examples=300,
        phases=(Phase.generate,),
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        numbers = find(choices(STEPS), lambda drawn: fails(name, drawn), settings=quick)
    except NoSuchExample:
        pytest.fail(f"{name} was not found")
    assert len(numbers) == STEPS


USERS_CONFTEST = 'pytest_plugins = ["engine.pytest_plugin"]\n'
USERS_TEST = '''
from hypothesis import given, settings

from engine.foreign import Ended, ForeignWorld, Freed, Held, Read, Wrote
from engine.pytest_plugin import choices
from property_tests.mutants import BY_NAME, focus


class Engine:
    """Two requests, one page; a cancelled request's page is free while its write is under way."""

    def __init__(self):
        self.facts, self.flying, self.owner, self.next = [], [], "", 1

    def enabled(self):
        names = [f"land r{n}" for n in self.flying]
        if self.owner:
            return [*names, f"cancel {self.owner}", f"read {self.owner}"]
        return [*names, f"start r{self.next}"] if self.next < 3 else names

    def apply(self, name):
        verb, who = name.split(" ")
        if verb == "start":
            self.owner, self.next = who, self.next + 1
            self.flying.append(int(who[1:]))
            self.facts += [Held(who, 0), Wrote(who, 0)]
        elif verb == "land":
            self.flying.remove(int(who[1:]))
            self.facts.append(Wrote(who, 0))
        elif verb == "read":
            self.facts += [Read(who, 0), Freed(who, 0), Ended(who, True)]
            self.owner = ""
        else:
            self.facts += [Freed(who, 0), Ended(who, False)]
            self.owner = ""

    def observe(self):
        facts, self.facts = self.facts, []
        return facts


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(numbers=choices(30))
def test_foreign(custody_walk, numbers):
    custody_walk(numbers, worlds=lambda _: ForeignWorld(Engine()), calm=False, adapter="test_users:Engine")


def test_ours(custody_walk):
    mutant = BY_NAME["free-on-abort"]
    scenario = mutant.put_into(focus(cancel=3))
    for seed in range(1, 200):
        custody_walk([(seed * n * n + n) % 251 for n in range(1, 150)], scenario=scenario)


def test_harmless(custody_walk):
    custody_walk([1, 2, 3, 4])
'''


def test_users_run_walks_in_their_own_pytest(tmp_path: Path) -> None:
    """A project with one line in its conftest gets reduced traces of its own and of our worlds."""
    (tmp_path / "conftest.py").write_text(USERS_CONFTEST)
    (tmp_path / "test_users.py").write_text(USERS_TEST)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--custody-traces",
            "kept",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    foreign = loads((tmp_path / "kept/test-users-py-test-foreign.trace.toml").read_text())
    assert foreign.adapter == "test_users:Engine"
    assert 0 < len(foreign.actions) <= 4
    ours = loads((tmp_path / "kept/test-users-py-test-ours.trace.toml").read_text())
    assert "custody replay kept/test-users-py-test-ours.trace.toml" in done.stdout
    scenario = BY_NAME["free-on-abort"].put_into(ours.scenario)
    again = replay_names(scenario, ours.actions, calm=ours.calm, eager=ours.eager)
    assert again.found is not None
    assert again.found.name == ours.finding
    assert len(list((tmp_path / "kept").iterdir())) == 2
