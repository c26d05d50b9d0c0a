"""The search finds what it must: every registered mutant, by an oracle and a rule foretold."""

from __future__ import annotations

import attrs
import pytest

from engine.decode import DecodeCore
from engine.explorer import explore
from engine.holdings import Job
from engine.scenarios import SCENARIOS
from engine.trace import loads
from engine.world_values import FAULTS, Found
from lifecycle.crossguards import CROSS_GUARDS
from lifecycle.guards import GUARDS, TABLE_PLACE
from lifecycle.rules import RULES
from lifecycle.state import LIVE
from property_tests.bug_pages import stale, trace_path
from property_tests.changed_logs import caught_by_changes
from property_tests.guard_removal import RULE_NAMES, Site, plain, sites, walk_without
from property_tests.guard_survivors import (
    CODE_HARMLESS,
    CODE_UNREACHED,
    RULES_BACKED_UP,
    harmless,
    unreached,
)
from property_tests.mutants import BY_NAME, CANARY, HARMLESS, MUTANTS, WORLDS, Mutant, hunt

QUICK_RUNS = 60
"""What most mutants need; the others are hunted at night, and their kept traces always."""
SLOW = frozenset(
    {
        "aba",
        "answer-before-durable",
        "forgets-backfill",
        "free-on-abort",
        "free-on-failure",
        "free-under-compute",
        "free-under-step",
        "ok-before-last-token",
        "old-incarnation",
        "one-shot-fence",
        "owner-lost-forgotten",
        "published-not-durable",
        "repeat-dropped",
        "same-memory",
        "shared-flag",
        "stale-ack",
        "success-overwrites-abort",
        "token-after-end",
        "token-before-verified",
    }
)


def check(mutant: Mutant, runs: int) -> None:
    """Hunt, and insist on a finding that names the fault."""
    result = hunt(mutant, runs=runs, cpu_s_max=1_000.0)
    trace = result.outcome.trace
    assert trace is not None, f"{mutant.name} was not found in {result.outcome.runs} runs"
    print(f"{mutant.name}: run {result.outcome.runs} of {result.world}, {trace.found}")
    assert mutant.expects(trace.found, trace.rule), f"{trace.found} ({trace.rule})"


@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.name not in SLOW], ids=lambda mutant: mutant.name
)
def test_most_mutants_are_found_at_once(mutant: Mutant) -> None:
    """A removed guard is found within a few runs of the one set of worlds."""
    check(mutant, QUICK_RUNS)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.name in SLOW], ids=lambda mutant: mutant.name
)
def test_every_other_mutant_is_found(mutant: Mutant) -> None:
    """The rarer ones are found, too, with the very same worlds and settings."""
    check(mutant, 2_000)


def test_the_product_and_a_harmless_change_stay_green() -> None:
    """The worlds in which mutants are hunted show nothing where nothing is wrong."""
    result = hunt(HARMLESS, runs=3 * len(WORLDS))
    assert result.outcome.trace is None, str(result.outcome.trace)
    assert result.outcome.runs == 3 * len(WORLDS)


def test_a_prompt_of_two_kinds_keeps_its_source_until_both_are_written() -> None:
    """The source is given back when every destination is drained, not when the first one is."""
    outcome = explore(WORLDS["two kinds"], runs=10)
    assert outcome.trace is None, str(outcome.trace)
    assert outcome.sometimes["Verified"] > 0


@pytest.mark.parametrize("seed", range(len(WORLDS)))
def test_the_canary_is_always_red(seed: int) -> None:
    """Whatever world comes first, the canary is found in its first run."""
    result = hunt(CANARY, runs=1, first_seed=seed)
    trace = result.outcome.trace
    assert trace is not None
    assert CANARY.expects(trace.found, trace.rule)


def test_the_registry_speaks_of_what_exists() -> None:
    """Names are unique; rules and guards that are taken away exist; every mutant has a story."""
    assert len(BY_NAME) == len(MUTANTS) + 2
    guards = {g.name for g in GUARDS} | {g.name for g in CROSS_GUARDS} | {TABLE_PLACE}
    for mutant in MUTANTS:
        assert mutant.rules <= set(RULES), mutant.name
        assert set(mutant.without) <= guards, mutant.name
        assert mutant.oracles, mutant.name
        assert len(mutant.story.split()) > 8, mutant.name
        assert mutant.guard, mutant.name


@pytest.mark.timeout(300)
def test_the_pages_of_bugs_are_up_to_date() -> None:
    """Every mutant has a kept trace that says what was foretold, and a page made from it."""
    for mutant in MUTANTS:
        file = loads(trace_path(mutant).read_text())
        assert file.mutant == mutant.name
        assert mutant.expects(Found(file.finding, ""), file.rule), mutant.name
    assert stale() == []


def test_the_number_of_worlds_shares_nothing_with_the_modes_of_seeds() -> None:
    """Every world is walked in all four modes, and every fault occurs in some scenario."""
    assert len(WORLDS) % 2 == len(SCENARIOS) % 2 == 1
    used = {kind for world in SCENARIOS.values() for kind, count in world.faults.items() if count}
    assert used == set(FAULTS)


def test_a_changed_log_shows_every_rule_guard_that_is_not_backed_up() -> None:
    """A reducer without a guard accepts something to which a second model objects.

    A guard that others back up is missed as soon as these are gone as well.
    """
    caught = caught_by_changes(RULES_BACKED_UP)
    missed = {name for name in RULE_NAMES if (name,) not in caught}
    assert missed == set(RULES_BACKED_UP)
    together = {(name, *others) for name, others in RULES_BACKED_UP.items()}
    assert together <= set(caught)


def test_survivors_are_guards_that_exist() -> None:
    """No reason is kept for a guard that is gone."""
    explained = {unreached(site.name) for site in sites()}
    explained |= {harmless(site.name) for site in sites()}
    assert {*CODE_UNREACHED.values(), *CODE_HARMLESS.values()} <= explained


UNREACHED = [site for site in sites() if unreached(site.name)]


@pytest.mark.parametrize("site", UNREACHED, ids=lambda site: site.function)
def test_no_walk_comes_to_a_guard_that_is_called_unreachable(site: Site) -> None:
    """Nothing could notice its removal: in a walk through all scenarios it never leaves."""
    assert not walk_without(site, runs=3 * len(SCENARIOS), fires=True)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("site", UNREACHED, ids=lambda site: site.function)
def test_no_long_walk_comes_there_either(site: Site) -> None:
    """The same for as long as its removal is hunted."""
    assert not walk_without(site, fires=True)


def test_a_walk_that_comes_to_a_guard_says_so() -> None:
    """The alarm in place of a guard is heard."""
    site = next(site for site in sites() if "Scheduler._seen: if request == FLEET" in site.name)
    assert walk_without(site, runs=3, fires=True) == "AssertionError"


SEEN = {
    "dropped-though-taken": "Judge._take_failure: if self.position > before",
    "fenced-the-living": "DecodeCore._fence_lost: if life is None",
    "forgotten": "Sequencer._forget: if any(",
    "gave-way": "victim: if state.attempt <",
    "hoards": "DecodeCore._grow: if admitted is None",
    "left-open": "EngineCore.receive: if entry.request == FLEET",
    "log-diverged": "Scheduler._seen: if request == FLEET",
    "no-room-to-grow": "_leg: if booked > free_after",
    "step-on-unheld": "EngineCore._take_back: if self.touched",
    "too-many-proposals": "EngineCore.propose: if self._full()",
    "works-uninvited": "DecodeCore._begin: if admitted is None",
    "wrong-prompt": "PrefillCore._advance: if not self._same_prompt",
}
SEEN_LATE = {
    "failed-another": "PrefillCore.step_ended: if job is None",
    "repeat-refused": "Judge._take: if first is not None",
}
"""Oracles, each with a guard of the decision code; the latter need most of their seconds."""


@pytest.mark.parametrize(
    ("oracle", "begins"),
    [
        *SEEN.items(),
        *(
            pytest.param(*row, marks=[pytest.mark.slow, pytest.mark.nightly])
            for row in SEEN_LATE.items()
        ),
    ],
)
def test_a_removed_guard_of_the_decision_code_is_noticed(oracle: str, begins: str) -> None:
    """Cut out of its function's syntax tree, in a process of its own, a guard is missed.

    The oracle that looks at what the guard keeps is the one that sees it.
    """
    site = next(site for site in sites() if begins in site.name)
    assert walk_without(site).startswith(f"{oracle} (")


class WorksOn(DecodeCore):
    """Decode goes on with an attempt that it has reported as failed."""

    def is_live(self, job: Job) -> bool:
        """As if it had never said so."""
        state = self.log.state(job.request)
        return state.phase in LIVE and state.attempt == job.attempt


def test_work_for_an_attempt_that_was_given_up_is_seen() -> None:
    """A failure that was proposed ends an engine's work before the scheduler has decided."""
    broken = attrs.evolve(plain(), decode=WorksOn)
    trace = hunt(broken, runs=120, scenarios=SCENARIOS).outcome.trace
    assert trace is not None
    assert trace.found.name == "works-on"
