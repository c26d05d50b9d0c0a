"""`reduce` makes states, and nothing else does: what each event changes, and what it leaves."""

from __future__ import annotations

import attrs
import pytest

from lifecycle.events import (
    REQUEST_EVENTS,
    Attached,
    ByScheduler,
    Drained,
    Dropped,
    Proof,
    Purpose,
    QuarantineCause,
    Quarantined,
    Rejected,
    Released,
    RequestEvent,
    Reserved,
    Role,
)
from lifecycle.guards import EARLY, LATE
from lifecycle.history import History
from lifecycle.ids import GrantId, Party
from lifecycle.reducer import ALL_GUARDS, ON_GRANT, Reducer, fold, guards_by_event, reduce
from lifecycle.state import Phase, RequestState, Settlement, Violation
from tests import handmade as hand
from tests.handmade import DECODE, DESTINATION, ONE, PREFILL, SOURCE, Log


def test_admitted_opens_an_attempt() -> None:
    """The attempt, its numbers and its deadline are recorded; the first admission is kept."""
    state = hand.new_admitted(Log()).state()
    assert (state.attempt, state.admitted, state.first) == (1, hand.admitted(), hand.admitted())
    assert (state.deadline_ns, state.settle_by_ns, state.outcome) == (hand.DEADLINE_NS, 0, None)
    assert state.sequence == 1


def test_a_rejection_owns_nothing() -> None:
    """Rejected is an outcome without attempt, grants or deadline."""
    state = hand.turned_away(Log()).state()
    assert state.outcome == hand.rejected()
    assert isinstance(state.outcome, Rejected)
    assert (state.attempt, state.grants, state.deadline_ns) == (0, (), 0)


def test_a_grant_collects_what_the_log_says_of_it() -> None:
    """Writes, drains and the settlement are kept with the grant, in order."""
    log = hand.reserved_both(Log()).add(hand.transferred(4, 6), hand.transferred(0, 4))
    log.add(hand.drained())
    grant = log.state().grant(DESTINATION)
    assert grant is not None
    assert [w.transfer.tokens.start for w in grant.written] == [4, 0]
    assert {w.party for w in grant.written} == {PREFILL}
    assert (grant.drained, grant.undrained) == ((PREFILL,), ())
    assert grant.settlement is Settlement.HELD
    log.add(hand.verified(), hand.finished(), Released(SOURCE), Released(DESTINATION))
    settled = log.state().grant(DESTINATION)
    assert settled is not None
    assert (settled.settlement, settled.written) == (Settlement.RELEASED, grant.written)
    assert log.state().phase is Phase.CLOSED


def test_a_quarantine_keeps_its_cause_after_the_release() -> None:
    """Why pages left circulation stays known when a late proof brings them back."""
    log = hand.closed(Log())
    log.add(Drained(DESTINATION, PREFILL, Proof.ACKNOWLEDGED), Released(DESTINATION))
    grant = log.state().grant(DESTINATION)
    assert grant is not None
    assert (grant.settlement, grant.quarantine) == (
        Settlement.RELEASED,
        QuarantineCause.NO_PROOF,
    )


@pytest.mark.parametrize("event", [hand.finished(), hand.ABORTED, hand.requeued()])
def test_an_end_starts_the_time_to_settle(event: RequestEvent) -> None:
    """Whatever ends an attempt records by when its grants must be settled."""
    log = hand.decoding(Log())
    now_ns = log.now_ns
    log.add(event)
    assert log.state().settle_by_ns == now_ns + hand.SETTLE_NS


def test_an_abort_while_requeued_does_not_start_that_time_again() -> None:
    """The attempt ended at Requeued; a later answer gives its parties no further time."""
    log = hand.requeued_holding(Log())
    settle_by = log.state().settle_by_ns
    log.add(hand.ABORTED)
    assert log.state().settle_by_ns == settle_by


def test_the_next_attempt_begins_fresh_and_remembers_the_first() -> None:
    """Attempt 2 has its own admission; what was relayed and the first admission stay known."""
    state = hand.requeued_settled(Log()).add(hand.again()).state()
    assert (state.attempt, state.phase) == (2, Phase.ADMITTED)
    assert (state.first, state.admitted) == (hand.admitted(), hand.again())
    assert (state.relayed, state.settle_by_ns) == (2, 0)
    assert state.current(Purpose.DESTINATION) == ()
    assert len(state.grants) == 2


def test_the_outcome_is_the_event_that_gave_it() -> None:
    """Finished and Aborted are kept whole."""
    assert hand.decoding(Log()).add(hand.finished()).state().outcome == hand.finished()
    assert hand.ended(Log()).state().outcome == hand.ABORTED


def test_labels_say_how_far_the_grants_are() -> None:
    """People see where an admitted attempt stands; the phase alone does not say it."""
    log = hand.new_admitted(Log())
    seen = [log.state().label()]
    for event in (hand.source(), hand.destination(), hand.transferred(), hand.drained()):
        log.add(event)
        seen.append(log.state().label())
    log.add(hand.verified())
    seen.append(log.state().label())
    assert seen == ["admitted", "prefill", "transfer", "transfer", "verifying", "decoding"]


def test_a_violation_names_what_it_refused() -> None:
    """Rule, guard, message, request and sequence are there for whoever reads the report."""
    log = hand.written(Log())
    result = reduce(log.state(), log.entry(hand.verified()))
    assert isinstance(result, Violation)
    assert (result.rule, result.guard) == ("exclusive-before-read", "exclusive-before-read/drained")
    assert (result.request, result.sequence) == (ONE, 4)
    assert str(PREFILL) in result.message


def test_reduce_and_history_agree() -> None:
    """Folding the entries by `reduce` gives the state that the history holds."""
    log = hand.second_decoding(Log())
    state = RequestState(ONE)
    for _, entry in log.entries:
        if entry.request == ONE:
            result = reduce(state, entry)
            assert isinstance(result, RequestState)
            state = result
    assert state == log.state()


def test_replaying_gives_an_equal_history_and_copies_are_independent() -> None:
    """The same entries give the same states; a copy does not follow its original."""
    log = hand.decoding(Log())
    again = History()
    for _, entry in log.entries:
        assert again.apply(entry) is None
    copy = log.history.copy()
    for other in (again, copy):
        assert other.requests == log.history.requests
        assert other.ledger == log.history.ledger
        assert other.fleet == log.history.fleet
    log.add(hand.ABORTED)
    assert copy.state(ONE).phase is Phase.DECODING


def test_only_a_requests_events_are_folded() -> None:
    """Folding a fleet event into a request is our bug, and says so."""
    entry = Log().entry(hand.attached(DECODE, Role.DECODE))
    assert isinstance(entry.event, Attached)
    with pytest.raises(TypeError, match="Attached is no event of a request"):
        fold(RequestState(ONE), entry)


def test_guards_are_asked_in_the_order_of_their_listing() -> None:
    """Each event's guards keep the order of the lists, early ones before the table."""
    for kind in REQUEST_EVENTS:
        assert ALL_GUARDS.early[kind] == tuple(g for g in EARLY if kind in g.events)
        assert ALL_GUARDS.late[kind] == tuple(g for g in LATE if kind in g.events)
    assert set(guards_by_event(LATE)) == set(REQUEST_EVENTS)
    assert Reducer.without() == ALL_GUARDS


def test_every_event_about_a_grant_says_what_it_makes_of_it() -> None:
    """The table has each event that names a grant, but those that make one and change nothing."""
    naming = {kind for kind in REQUEST_EVENTS if hasattr(kind, "grant")}
    assert set(ON_GRANT) == naming - {Dropped, Reserved}


def test_a_grant_is_found_by_its_name_whichever_object_says_it() -> None:
    """Equal names name one grant; another owner's, or another serial, names none."""
    state = hand.reserved_both(Log()).state()
    again = GrantId(Party(DECODE.engine, 1, 0), DESTINATION.serial)
    assert again is not DESTINATION
    assert state.grant(again) is state.grant(DESTINATION) is state.grants[-1]
    assert state.grant(GrantId(Party(DECODE.engine, 1, 1), DESTINATION.serial)) is None
    assert state.grant(GrantId(DECODE, 9)) is None


def test_what_an_unguarded_fold_cannot_place_it_leaves_alone() -> None:
    """Without its guards a settlement, write or drain of an unknown grant changes no grant."""
    log = hand.reserved_both(Log())
    unknown = GrantId(DECODE, 9)
    grants = log.state().grants
    for event in (
        Released(unknown),
        Quarantined(unknown, QuarantineCause.NO_PROOF),
        hand.transferred(grant=unknown),
        hand.drained(grant=unknown),
    ):
        assert fold(log.state(), log.entry(event)).grants == grants
    by_nobody = attrs.evolve(log.entry(hand.transferred()), proposer=ByScheduler(1))
    assert fold(log.state(), by_nobody).grants == grants
