"""The fleet's log: lives join once, end once, and only in order."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from lifecycle.events import (
    FLEET_EVENTS,
    ByEngine,
    ByScheduler,
    Draining,
    Entry,
    Event,
    FenceScope,
    FleetEvent,
    Lost,
    LostCause,
    Recovered,
    RecoveryProof,
    Resumed,
    Role,
)
from lifecycle.fleet import FleetState, may_fence, reduce_fleet
from lifecycle.ids import FLEET, GrantId, Party
from lifecycle.rules import RULES
from lifecycle.state import Violation
from tests import handmade as hand
from tests.handmade import DECODE, DESTINATION, EPOCH, ONE, PREFILL, Log

LOST = Lost(DECODE.engine, DECODE.incarnation, LostCause.LEASE)
NEXT = attrs.evolve(DECODE, incarnation=2)


def _reduced(*events: Event) -> FleetState:
    return Log().add(*events, request=FLEET).history.fleet


def test_a_life_joins_drains_and_is_lost() -> None:
    """Draining keeps a life but gives it nothing new; losing it ends it; a new one may follow."""
    fleet = _reduced()
    assert [life.attached.engine for life in fleet.alive()] == [PREFILL.engine, DECODE.engine]
    fleet = _reduced(Draining(DECODE.engine, 1))
    life = fleet.current(DECODE.engine)
    assert life is not None
    assert (life.usable, life.lost, len(fleet.alive())) == (False, None, 2)
    fleet = _reduced(LOST, hand.attached(NEXT, Role.DECODE))
    old, new = fleet.life(DECODE.engine, 1), fleet.life(DECODE.engine, 2)
    assert old is not None
    assert new is not None
    assert (old.lost, new.usable) == (LostCause.LEASE, True)
    assert fleet.current(DECODE.engine) == new
    assert fleet.life(DECODE.engine, 3) is None
    assert fleet.current(hand.STRANGER.engine) is None


# What the fleet refuses: the events before it, the event, its proposer's epoch, and the rule.
REFUSED: dict[str, tuple[tuple[FleetEvent, ...], Event, str]] = {
    "joined twice": ((), hand.attached(NEXT, Role.DECODE), "incarnation-fences"),
    "an older life": (
        (LOST,),
        hand.attached(DECODE, Role.DECODE),
        "incarnation-fences",
    ),
    "endpoints do not match ranks": (
        (LOST,),
        attrs.evolve(hand.attached(NEXT, Role.DECODE), ranks=2),
        "incarnation-fences",
    ),
    "lost twice": ((LOST,), LOST, "incarnation-fences"),
    "draining a lost life": ((LOST,), Draining(DECODE.engine, 1), "incarnation-fences"),
    "draining another life": ((), Draining(DECODE.engine, 2), "incarnation-fences"),
    "losing a stranger": (
        (),
        Lost(hand.STRANGER.engine, 1, LostCause.LEFT),
        "incarnation-fences",
    ),
    "recovered from a life that is gone": (
        (LOST, hand.attached(NEXT, Role.DECODE)),
        Recovered(DESTINATION, RecoveryProof.FENCED),
        "incarnation-fences",
    ),
    "recovered from a stranger": (
        (),
        Recovered(GrantId(hand.STRANGER, 1), RecoveryProof.FENCED),
        "incarnation-fences",
    ),
    "the same epoch": ((), Resumed(EPOCH, 0), "unbroken-log"),
    "a request's event": ((), hand.admitted(), "one-decision"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_fleet_refuses_by_name_and_stays_as_it_was(name: str) -> None:
    """An illegal fleet event names a rule of the list and changes neither lives nor pages."""
    before, event, rule = REFUSED[name]
    log = Log().add(*before, request=FLEET)
    fleet, ledger = log.history.fleet, dict(log.history.ledger)
    violation = log.history.apply(log.entry(event, request=FLEET))
    assert violation is not None
    assert violation.rule == rule
    assert violation.rule in RULES
    assert log.history.fleet == fleet
    assert log.history.ledger == ledger


def _entry(**changes: Any) -> Entry:
    log = Log()
    return attrs.evolve(log.entry(LOST, request=FLEET), **changes)


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        (_entry(sequence=9), "unbroken-log"),
        (_entry(time_ns=0), "unbroken-log"),
        (_entry(proposer=ByEngine(DECODE, 1)), "one-decision"),
        (_entry(proposer=ByScheduler(2)), "unbroken-log"),
        (_entry(request=ONE), "one-decision"),
    ],
)
def test_the_fleets_log_is_unbroken_and_the_schedulers_alone(entry: Entry, rule: str) -> None:
    """Sequence, time, proposer, epoch and log are checked for the fleet as for a request."""
    result = reduce_fleet(Log().history.fleet, entry)
    assert isinstance(result, Violation)
    assert result.rule == rule


def test_a_new_epoch_must_be_spoken_by_itself() -> None:
    """Resumed counts epochs up, and its proposer is the epoch that it begins."""
    log = Log()
    assert log.judge(Resumed(2, 3), request=FLEET) is not None
    assert log.judge(Resumed(2, 3), request=FLEET, by=ByScheduler(2)) is None
    log.add(Resumed(2, 3), request=FLEET, by=ByScheduler(2))
    assert log.history.fleet.epoch == 2


def test_recovered_grants_are_remembered() -> None:
    """The fleet's proof for a grant stays known."""
    assert _reduced(Recovered(DESTINATION, RecoveryProof.FENCED)).recovered == (DESTINATION,)


def test_a_life_has_an_account_for_every_rank_until_it_is_lost() -> None:
    """Attached opens the accounts of all ranks, Lost closes them."""
    log = Log().add(LOST, request=FLEET)
    two = attrs.evolve(hand.attached(NEXT, Role.DECODE), ranks=2, endpoints=("a", "b"))
    log.add(two, request=FLEET)
    assert set(log.history.ledger) == {PREFILL, NEXT, attrs.evolve(NEXT, rank=1)}


@pytest.mark.parametrize("scope", FenceScope)
def test_only_a_plane_with_a_scope_can_fence(scope: FenceScope) -> None:
    """No scope, or no life, proves nothing."""
    party = Party(DECODE.engine, 2, 0)
    fleet = _reduced(LOST, hand.attached(party, Role.DECODE, scope=scope))
    assert may_fence(fleet.current(DECODE.engine)) is (scope is not FenceScope.NONE)
    assert not may_fence(None)


def test_every_fleet_event_is_tried() -> None:
    """The refusals above leave no kind of fleet event out."""
    assert {type(event) for _, event, _ in REFUSED.values()} >= set(FLEET_EVENTS)
