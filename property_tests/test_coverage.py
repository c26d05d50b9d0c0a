"""The power of the search itself: where it was, and why not elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import pytest

from engine.coverage import (
    GUARD_NAMES,
    ILLEGAL,
    LEGAL,
    REASONS,
    SOMETIMES,
    Coverage,
    aim,
    measure,
    name_pair,
)
from engine.explorer import walk
from engine.log_changes import changed
from engine.scenarios import SCENARIOS
from engine.world import World
from engine.world_values import Action, Asked
from lifecycle.events import REQUEST_EVENTS
from lifecycle.ids import Party
from lifecycle.state import Phase
from property_tests.mutants import CROWDED, focus
from tests import handmade as hand

RUNS = 48
CHANGES = 8
AIMED = (
    CROWDED,
    attrs.evolve(CROWDED, placing=True),
    attrs.evolve(CROWDED, ranks=1, staging=1),
    attrs.evolve(
        CROWDED,
        asked=(Asked(2, 5), Asked(2, 5), Asked(2, 5)),
        decode_pages=5,
        growth_tokens=2,
        attempts_max=3,
    ),
    attrs.evolve(
        focus(crash=4),
        asked=(Asked(1, 1),) * 9,
        eager=frozenset({"connect", "answer", "down", "up", "step"}),
    ),
    attrs.evolve(focus(restart=4, declare_lost=2, doubt=2), placing=True),
    focus(declare_lost=2),
    attrs.evolve(focus(cancel=2), slots=1),
    attrs.evolve(focus(cancel=1, fail=1), kinds=2, decode_pages=40, attempts_max=1),
    focus(restart=4),
    focus(lie=6, cancel=2),
    SCENARIOS["two of each"],
    SCENARIOS["torn logs"],
    SCENARIOS["slow steps"],
)
"""Scenarios in which everything is met that can be met in a world."""


LATE = attrs.evolve(
    focus(doubt=2, step_fails=2, tick=2), asked=(Asked(5, 4),), decode_pages=8, attempts_max=4
)


class LateProof(World):
    """A schedule: a write that is in doubt stays so until a later attempt decodes."""

    def enabled(self) -> tuple[Action, ...]:
        possible = super().enabled()
        timely = tuple(action for action in possible if self._timely(action))
        return timely or possible

    def _timely(self, action: Action) -> bool:
        name, *whom = action
        phases = {state.phase for state in self.scheduler.log.requests.values()}
        if name == "tick":
            return Phase.REQUEUED in phases
        if name == "step-fails":
            return any(write.doubted for write in self.writes.values())
        if name in {"land", "done", "failed"}:
            party, ticket = whom
            assert isinstance(party, Party)
            assert isinstance(ticket, int)
            return not self.writes[party, ticket].doubted or Phase.DECODING in phases
        return True


@pytest.fixture(scope="module")
def coverage() -> Coverage:
    """A fixed budget: the same runs and changes every time."""
    reached = measure(AIMED, runs=RUNS, changes=CHANGES)
    return measure([LATE], runs=RUNS, changes=CHANGES, coverage=reached, worlds=LateProof)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_not_reached_has_a_reason(
    coverage: Coverage, record_property: Callable[[str, object], None]
) -> None:
    """Pairs, guards and situations that a fixed budget does not reach stand in the table."""
    record_property("summary", f"search: {coverage}")
    assert coverage.unexplained() == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_pair_of_phase_and_event_is_reached(coverage: Coverage) -> None:
    """Each legal pair was accepted somewhere, and each illegal one refused."""
    assert [name_pair(p) for p in LEGAL if not coverage.legal[p]] == []
    assert [name_pair(p) for p in ILLEGAL if not coverage.illegal[p]] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_reason_is_given_for_what_is_reached(coverage: Coverage) -> None:
    """A reason that has become false is taken out of the table."""
    assert sorted(set(REASONS) - set(coverage.missing())) == []


def test_reasons_name_what_exists() -> None:
    """A reason for something that is no longer there would hide nothing, but mislead."""
    known = set(Coverage().missing())
    assert set(REASONS) <= known
    assert len(known) == len(LEGAL) + len(ILLEGAL) + len(GUARD_NAMES) + len(SOMETIMES)
    assert all(reason.endswith(".") for reason in REASONS.values())


def test_legal_and_illegal_pairs_are_all_pairs() -> None:
    """Every event in every phase is one or the other."""
    assert not LEGAL & ILLEGAL
    assert len(LEGAL | ILLEGAL) == len(Phase) * len(REQUEST_EVENTS)


def test_an_empty_search_reaches_nothing() -> None:
    """Coverage can fail: what was never tried is missing and unexplained."""
    nothing = Coverage()
    assert "legal new Admitted" in nothing.unexplained()
    assert "illegal closed Finished" in nothing.unexplained()
    assert "guard drained-before-released/parties" in nothing.unexplained()


def test_an_accepted_and_a_refused_entry_are_told_apart() -> None:
    """A log by hand: its own entries are legal, and one event out of its place is not."""
    log = hand.closed(hand.Log())
    coverage = Coverage()
    coverage.take([*log.entries, (99, log.entry(hand.ABORTED))])
    assert coverage.legal[Phase.ADMITTED, type(hand.ABORTED)] == 1
    assert coverage.illegal[Phase.CLOSED, type(hand.ABORTED)] == 1
    assert sum(coverage.illegal.values()) == 1


def test_changes_aim_at_what_was_not_seen() -> None:
    """Each aimed change of one log refuses a pair that was not refused before, until none is left."""
    log = hand.second_decoding(hand.Log()).entries
    coverage = Coverage()
    coverage.take(log)
    aimed = 0
    while (other := aim(log, coverage)) is not None:
        before = set(coverage.illegal)
        coverage.take(other, renumber=True)
        assert set(coverage.illegal) > before
        aimed += 1
    assert aimed > 10


def test_a_changed_log_differs_in_one_thing() -> None:
    """Changes leave the original alone, and are the same for the same seed."""
    world, _, _ = walk(CROWDED, 3)
    before = list(world.stored)
    for seed in range(40):
        one = changed(world.stored, random.Random(seed))
        assert one == changed(world.stored, random.Random(seed))
        assert abs(len(one) - len(before)) <= 1
        assert world.stored == before
    with pytest.raises(ValueError, match="0 entries"):
        changed([], random.Random(1))
