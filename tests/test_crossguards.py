"""Every guard across requests has a log that only it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from lifecycle.crossguards import CROSS_GUARDS
from lifecycle.events import (
    REQUEST_EVENTS,
    Admitted,
    ByScheduler,
    Draining,
    Entry,
    Event,
    FenceScope,
    Lost,
    LostCause,
    Proof,
    QuarantineCause,
    Quarantined,
    Recovered,
    RecoveryProof,
    Released,
    Role,
)
from lifecycle.history import History, cross_by_event
from lifecycle.ids import FLEET, GrantId, PageRange, TokenRange, request_id
from lifecycle.reducer import ALL_GUARDS
from lifecycle.rules import RULES
from lifecycle.state import Settlement
from tests import handmade as hand
from tests.handmade import DECODE, DESTINATION, EPOCH, ONE, PREFILL, SOURCE, STRANGER, TWO, Log

Case = Callable[[], tuple[Log, Entry]]
LOST_DECODE = Lost(DECODE.engine, DECODE.incarnation, LostCause.LEASE)


def _judged(build: hand.Builder, event: Event, **how: Any) -> Case:
    def case() -> tuple[Log, Entry]:
        log = build(Log())
        return log, log.entry(event, **how)

    return case


def _fleet(*events: Event) -> hand.Builder:
    def build(log: Log) -> Log:
        return log.add(*events, request=FLEET)

    return build


def _one_runs(log: Log) -> Log:
    """A first request holds pages 0 to 2 of decode and 0 to 1 of prefill."""
    return hand.reserved_both(log)


def _second(**changes: Any) -> Admitted:
    """The second request's admission, with the numbers that are right after `_one_runs`."""
    return hand.admitted(
        prefill=hand.leg(PREFILL, needed=2, booked=2, free=14),
        decode=hand.leg(DECODE, needed=5, booked=3, free=13),
        **changes,
    )


def _both_admitted(log: Log) -> Log:
    return _one_runs(log).add(_second(), request=TWO)


def _full(log: Log) -> Log:
    """All four request slots of both engines are taken."""
    for serial in range(1, 5):
        free = hand.PAGES - 3 * (serial - 1)
        event = hand.admitted(
            prefill=hand.leg(PREFILL, needed=2, booked=2, free=16 - 2 * (serial - 1)),
            decode=hand.leg(DECODE, needed=5, booked=3, free=free),
        )
        log.add(event, request=request_id(epoch=EPOCH, serial=serial))
    return log


def _fifth() -> Admitted:
    return hand.admitted(
        prefill=hand.leg(PREFILL, needed=2, booked=2, free=8),
        decode=hand.leg(DECODE, needed=5, booked=3, free=4),
    )


def _fenced_without_scope() -> tuple[Log, Entry]:
    log = hand.ended(Log(scope=FenceScope.NONE))
    return log, log.entry(hand.drained(proof=Proof.FENCED))


RED: dict[str, Case] = {
    "unbroken-log/epoch": _judged(hand.new, hand.admitted(), by=ByScheduler(2)),
    "incarnation-fences/proposer": _judged(
        lambda log: hand.new_admitted(log).add(LOST_DECODE, request=FLEET), hand.destination()
    ),
    "incarnation-fences/legs": _judged(
        _fleet(LOST_DECODE, hand.attached(attrs.evolve(DECODE, incarnation=2), Role.DECODE)),
        hand.admitted(fleet_position=5),
    ),
    "compatible-legs/joined": _judged(
        hand.new,
        hand.admitted(
            prefill=attrs.evolve(hand.leg(PREFILL, needed=2, booked=2), layout="M"),
            decode=attrs.evolve(hand.leg(DECODE, needed=5, booked=3), layout="M"),
        ),
    ),
    "capacity-proved/counted": _judged(_one_runs, hand.admitted(), request=TWO),
    "capacity-proved/judged-at": _judged(hand.new, hand.admitted(fleet_position=2)),
    "conservation/slots": _judged(_full, _fifth(), request=request_id(epoch=EPOCH, serial=5)),
    "one-owner/pool": _judged(hand.new_admitted, hand.destination(pages=(PageRange(14, 3),))),
    "one-owner/pages": _judged(
        _both_admitted, hand.destination(grant=GrantId(DECODE, 2)), request=TWO
    ),
    "one-owner/serial": _judged(
        _both_admitted, hand.destination(pages=(PageRange(3, 3),)), request=TWO
    ),
    "conservation/promised": _judged(
        lambda log: hand.new_admitted(log).add(_second(), request=TWO),
        hand.destination(pages=(PageRange(0, 14),), tokens=TokenRange(0, 56)),
        request=TWO,
    ),
    "time-is-no-proof/scope": _fenced_without_scope,
    "drained-before-released/recovered": _judged(hand.closed, Released(DESTINATION)),
    "incarnation-fences/owner": _judged(
        hand.ended, Quarantined(DESTINATION, QuarantineCause.OWNER_LOST)
    ),
}


def test_every_cross_guard_has_a_log_that_turns_it_red() -> None:
    """The cases' names are the cross guards' names, and each keeps a rule of the list."""
    names = [guard.name for guard in CROSS_GUARDS]
    assert set(RED) == set(names)
    assert len(names) == len(set(names))
    assert {guard.rule for guard in CROSS_GUARDS} <= set(RULES)


@pytest.mark.parametrize("name", RED)
def test_the_cross_guard_refuses_and_nothing_changes(name: str) -> None:
    """The request's own guards agree; only this guard refuses; everything stays equal."""
    log, entry = RED[name]()
    before = log.history.copy()
    assert ALL_GUARDS.check(log.state(entry.request), entry) is None
    violation = log.history.apply(entry)
    assert violation is not None
    assert (violation.guard, violation.rule) == (name, name.split("/", maxsplit=1)[0])
    assert violation.message
    assert log.history.requests == before.requests
    assert log.history.ledger == before.ledger
    assert log.history.fleet == before.fleet


@pytest.mark.parametrize("name", RED)
def test_a_copy_of_one_engine_is_not_judged_across_requests(name: str) -> None:
    """Without cross guards the entry is taken: an engine's copy sees only its own requests."""
    log, entry = RED[name]()
    copy = History(crossguards=False)
    for _, known in log.entries:
        assert copy.apply(known) is None
    assert copy.apply(entry) is None


@pytest.mark.parametrize("name", RED)
def test_without_the_cross_guard_it_is_silent(name: str) -> None:
    """A history from which the guard was taken never names it."""
    log, entry = RED[name]()
    loose = History(without=(name,))
    for _, known in log.entries:
        assert loose.apply(known) is None
    violation = loose.check(entry)
    assert violation is None or violation.guard != name


ALSO: tuple[tuple[str, Case], ...] = (
    (
        "incarnation-fences/legs",
        _judged(
            _fleet(Draining(PREFILL.engine, PREFILL.incarnation)),
            hand.admitted(fleet_position=4),
        ),
    ),
    (
        "incarnation-fences/legs",
        _judged(
            hand.new,
            hand.admitted(
                prefill=hand.leg(DECODE, needed=2, booked=2),
            ),
        ),
    ),
    (
        "incarnation-fences/legs",
        _judged(
            hand.new,
            hand.admitted(prefill=hand.leg(PREFILL, needed=2, booked=2, ranks=2)),
        ),
    ),
    (
        "capacity-proved/counted",
        _judged(hand.new, hand.admitted(decode=hand.leg(DECODE, needed=5, booked=3, capacity=17))),
    ),
    (
        "one-owner/pool",
        _judged(hand.new_admitted, hand.destination(pages=(PageRange(0, 2), PageRange(1, 1)))),
    ),
    ("capacity-proved/judged-at", _judged(hand.new, hand.rejected(fleet_position=2), attempt=0)),
    (
        "incarnation-fences/owner",
        _judged(
            lambda log: hand.ended(log).add(LOST_DECODE, request=FLEET),
            Quarantined(DESTINATION, QuarantineCause.NO_PROOF),
        ),
    ),
)


@pytest.mark.parametrize(("name", "case"), ALSO, ids=lambda value: str(value)[:40])
def test_a_cross_guard_refuses_each_side_of_what_it_compares(name: str, case: Case) -> None:
    """A guard that compares several things refuses each of them alone."""
    log, entry = case()
    violation = log.history.check(entry)
    assert violation is not None
    assert violation.guard == name


def test_an_unknown_speaker_is_refused() -> None:
    """Who never joined, or speaks for a rank that is not there, is not heard."""
    log = hand.ended(Log())
    log.history.requests[ONE] = attrs.evolve(
        log.state(),
        grants=(attrs.evolve(log.state().grants[0], reserved=hand.source(grant=_strange())),),
    )
    violation = log.judge(Released(_strange()))
    assert violation is not None
    assert violation.guard == "incarnation-fences/proposer"
    assert "never joined" in violation.message


def _strange() -> GrantId:
    return GrantId(STRANGER, 1)


def test_a_lost_engines_own_drained_stays_a_proof() -> None:
    """A writer that was declared lost may still say that its own writes have ended."""
    log = hand.ended(Log())
    log.add(Lost(PREFILL.engine, PREFILL.incarnation, LostCause.LEASE), request=FLEET)
    log.add(hand.drained(), Released(DESTINATION))
    grant = log.state().grant(DESTINATION)
    assert grant is not None
    assert grant.settlement is Settlement.RELEASED


def test_a_quarantined_grant_comes_back_by_the_fleets_proof() -> None:
    """After Recovered the owner may release pages although a party never drained."""
    log = hand.closed(Log())
    assert log.judge(Released(DESTINATION)) is not None
    log.add(Recovered(DESTINATION, RecoveryProof.EXIT_OBSERVED), request=FLEET)
    log.add(Released(DESTINATION))
    assert log.history.ledger[DECODE].quarantined_pages == 0


def test_time_never_decreases_across_requests() -> None:
    """The store's order is one order: an entry of another request may not be older either."""
    log = hand.written(Log())
    violation = log.judge(_second(), request=TWO, time_ns=log.history.time_ns - 1)
    assert violation is not None
    assert violation.guard == "unbroken-log/total"


def test_cross_guards_are_indexed_by_every_event() -> None:
    """Each request event has its list of cross guards, in the order of their listing."""
    index = cross_by_event(CROSS_GUARDS)
    assert set(index) == set(REQUEST_EVENTS)
    for kind, guards in index.items():
        assert guards == tuple(g for g in CROSS_GUARDS if kind in g.events)


def test_a_source_of_another_pool_is_no_concern_of_decode() -> None:
    """The same page number on another rank is another page."""
    log = hand.reserved_both(Log())
    assert log.history.ledger[PREFILL].held == 0b11
    assert log.history.ledger[DECODE].held == 0b111
    assert SOURCE.owner != DESTINATION.owner
