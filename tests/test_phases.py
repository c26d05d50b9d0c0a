"""Every pair of phase and event: legal as the table says, or refused by name and without effect."""

from __future__ import annotations

import itertools

import pytest

from lifecycle.events import (
    REQUEST_EVENTS,
    Aborted,
    Admitted,
    Attached,
    Drained,
    Dropped,
    Event,
    Finished,
    QuarantineCause,
    Quarantined,
    Rejected,
    Released,
    RequestEvent,
    Requeued,
    Reserved,
    Role,
    Transferred,
    Verified,
)
from lifecycle.guards import TABLE_PLACE
from lifecycle.phases import ENDING, TABLE, refusal, settled
from lifecycle.reducer import Reducer, reduce
from lifecycle.rules import RULES
from lifecycle.state import LIVE, OPEN, Phase, RequestState, Violation
from tests import handmade
from tests.handmade import DESTINATION, PHASES, SOURCE, USUAL, Builder, Log

Case = tuple[Builder, RequestEvent]

_QUARANTINED_DESTINATION = Quarantined(DESTINATION, QuarantineCause.NO_PROOF)


def _ended_holding_source(log: Log) -> Log:
    return handmade.written(log).add(_QUARANTINED_DESTINATION, handmade.ABORTED)


def _decoding_nothing_held(log: Log) -> Log:
    return handmade.decoding(log).add(Released(SOURCE), _QUARANTINED_DESTINATION)


def _nothing_reserved(log: Log) -> Log:
    return log.add(handmade.admitted(), handmade.source())


# One legal event for every cell of the table and every phase that it may lead to.
LEGAL: dict[tuple[Phase, type[RequestEvent], Phase], Case] = {
    (Phase.NEW, Admitted, Phase.ADMITTED): (handmade.new, handmade.admitted()),
    (Phase.NEW, Rejected, Phase.REJECTED): (handmade.new, handmade.rejected()),
    (Phase.ADMITTED, Reserved, Phase.ADMITTED): (_nothing_reserved, handmade.destination()),
    (Phase.ADMITTED, Transferred, Phase.ADMITTED): (
        handmade.reserved_both,
        handmade.transferred(),
    ),
    (Phase.ADMITTED, Drained, Phase.ADMITTED): (handmade.written, handmade.drained()),
    (Phase.ADMITTED, Released, Phase.ADMITTED): (handmade.handed_over, Released(SOURCE)),
    (Phase.ADMITTED, Quarantined, Phase.ADMITTED): (handmade.written, _QUARANTINED_DESTINATION),
    (Phase.ADMITTED, Verified, Phase.DECODING): (handmade.handed_over, handmade.verified()),
    (Phase.ADMITTED, Aborted, Phase.ENDED): (handmade.written, handmade.ABORTED),
    (Phase.ADMITTED, Aborted, Phase.CLOSED): (handmade.new_admitted, handmade.ABORTED),
    (Phase.ADMITTED, Requeued, Phase.REQUEUED): (handmade.written, handmade.requeued()),
    (Phase.DECODING, Reserved, Phase.DECODING): (handmade.decoding, handmade.growth()),
    (Phase.DECODING, Drained, Phase.DECODING): (
        handmade.second_decoding,
        handmade.drained(),
    ),
    (Phase.DECODING, Released, Phase.DECODING): (handmade.decoding, Released(SOURCE)),
    (Phase.DECODING, Quarantined, Phase.DECODING): (handmade.decoding, _QUARANTINED_DESTINATION),
    (Phase.DECODING, Finished, Phase.ENDED): (handmade.decoding, handmade.finished()),
    (Phase.DECODING, Finished, Phase.CLOSED): (_decoding_nothing_held, handmade.finished()),
    (Phase.DECODING, Aborted, Phase.ENDED): (handmade.decoding, handmade.ABORTED),
    (Phase.DECODING, Aborted, Phase.CLOSED): (_decoding_nothing_held, handmade.ABORTED),
    (Phase.DECODING, Requeued, Phase.REQUEUED): (handmade.decoding, handmade.requeued()),
    (Phase.REQUEUED, Admitted, Phase.ADMITTED): (handmade.requeued_settled, handmade.again()),
    (Phase.REQUEUED, Drained, Phase.REQUEUED): (
        lambda log: handmade.written(log).add(handmade.requeued()),
        handmade.drained(),
    ),
    (Phase.REQUEUED, Released, Phase.REQUEUED): (handmade.requeued_holding, Released(SOURCE)),
    (Phase.REQUEUED, Quarantined, Phase.REQUEUED): (
        handmade.requeued_holding,
        _QUARANTINED_DESTINATION,
    ),
    (Phase.REQUEUED, Aborted, Phase.ENDED): (handmade.requeued_holding, handmade.ABORTED),
    (Phase.REQUEUED, Aborted, Phase.CLOSED): (handmade.requeued_settled, handmade.ABORTED),
    (Phase.ENDED, Drained, Phase.ENDED): (handmade.ended, handmade.drained()),
    (Phase.ENDED, Released, Phase.ENDED): (handmade.ended, Released(SOURCE)),
    (Phase.ENDED, Released, Phase.CLOSED): (_ended_holding_source, Released(SOURCE)),
    (Phase.ENDED, Quarantined, Phase.ENDED): (handmade.ended, _QUARANTINED_DESTINATION),
    (Phase.ENDED, Quarantined, Phase.CLOSED): (
        lambda log: handmade.ended(log).add(Released(SOURCE)),
        _QUARANTINED_DESTINATION,
    ),
    (Phase.CLOSED, Drained, Phase.CLOSED): (handmade.closed, handmade.drained()),
    (Phase.CLOSED, Released, Phase.CLOSED): (
        lambda log: handmade.closed(log).add(handmade.drained()),
        Released(DESTINATION),
    ),
}
for _phase in set(Phase) - {Phase.NEW}:
    LEGAL[(_phase, Dropped, _phase)] = (PHASES[_phase], handmade.DROPPED)


PAIRS = list(itertools.product(Phase, REQUEST_EVENTS))


def _named(value: object) -> str:
    return value.value if isinstance(value, Phase) else getattr(value, "__name__", "")


def test_every_cell_of_the_table_has_a_legal_example() -> None:
    """No cell, and no phase that a cell may lead to, stays untried."""
    cells = {
        (phase, kind, after)
        for phase, row in TABLE.items()
        for kind, phases in row.items()
        for after in phases
    }
    assert set(LEGAL) == cells


@pytest.mark.parametrize("cell", LEGAL, ids=lambda cell: "-".join(_named(part) for part in cell))
def test_a_legal_event_leads_where_the_table_says(
    cell: tuple[Phase, type[RequestEvent], Phase],
) -> None:
    """The event is accepted in that phase, counts one entry on, and leads to the named phase."""
    phase, kind, after = cell
    build, event = LEGAL[cell]
    log = build(Log())
    before = log.state()
    assert (before.phase, type(event)) == (phase, kind)
    entry = log.entry(event, attempt=0 if kind is Rejected else None)
    assert log.history.apply(entry) is None
    assert log.state().phase is after
    assert log.state().sequence == before.sequence + 1


@pytest.mark.parametrize(
    ("phase", "kind"),
    [pair for pair in PAIRS if pair[1] not in TABLE[pair[0]]],
    ids=_named,
)
def test_an_event_without_a_cell_is_refused_by_name_and_changes_nothing(
    phase: Phase, kind: type[RequestEvent]
) -> None:
    """The refusal comes from the table, names one of the rules, and leaves everything equal."""
    log = PHASES[phase](Log())
    before = log.history.copy()
    state = log.state()
    # A write after its party's Drained is refused sooner, by a rule of its own.
    event = USUAL[kind]
    if kind is Transferred and state.grant(DESTINATION) and not state.grants[-1].undrained:
        log = Log(without=("drained-is-final/transfer",))
        before = PHASES[phase](log).history.copy()
        state = log.state()
    violation = log.history.apply(log.entry(event))
    assert violation is not None
    assert (violation.rule, violation.guard) == (refusal(phase, kind), TABLE_PLACE)
    assert violation.rule in RULES
    assert kind.__name__ in violation.message
    assert phase.value in violation.message
    assert log.state() == state
    assert (log.history.requests, log.history.ledger) == (before.requests, before.ledger)


def test_every_phase_has_a_row_and_terminal_rows_only_settle() -> None:
    """Rejected takes only Dropped; closed takes only late proofs and Dropped."""
    assert set(TABLE) == set(Phase)
    assert set(PHASES) == set(Phase)
    assert set(TABLE[Phase.REJECTED]) == {Dropped}
    assert set(TABLE[Phase.CLOSED]) == {Drained, Released, Dropped}
    for phase in (Phase.REJECTED, Phase.CLOSED):
        assert {after for cell in TABLE[phase].values() for after in cell} == {phase}


def test_where_a_cell_names_two_phases_what_is_held_picks() -> None:
    """Two phases stand only where an answer may or may not leave grants to settle."""
    double = {cell for row in TABLE.values() for cell in row.values() if len(cell) != 1}
    assert double == {ENDING}
    log = handmade.written(Log())
    assert settled(log.state().grants) is Phase.ENDED
    assert settled(()) is Phase.CLOSED
    assert settled(handmade.closed(Log()).state().grants) is Phase.CLOSED


def test_live_phases_run_an_attempt_and_open_ones_wait_for_an_answer() -> None:
    """Whatever ends an attempt is legal exactly in live phases, an abort in every open one."""
    assert {phase for phase, row in TABLE.items() if Requeued in row} == LIVE
    assert {phase for phase, row in TABLE.items() if Aborted in row} == OPEN
    assert {phase for phase, row in TABLE.items() if Finished in row} == {Phase.DECODING}
    assert {phase for phase, row in TABLE.items() if Verified in row} == {Phase.ADMITTED}
    assert {phase for phase, row in TABLE.items() if Reserved in row} == LIVE


def test_the_fleets_events_are_no_events_of_a_request() -> None:
    """The fleet's events are refused in a request's log, whatever its phase."""
    event: Event = handmade.attached(handmade.PREFILL, Role.PREFILL)
    assert isinstance(event, Attached)
    for phase, build in PHASES.items():
        log = build(Log())
        violation = log.judge(event)
        assert violation is not None, phase
        assert violation.rule == "one-decision"
        assert log.state().phase is phase


def test_without_the_table_an_illegal_event_is_folded_and_keeps_its_phase() -> None:
    """The table's refusals can be taken away, so that a search can show that they are needed."""
    entry = handmade.closed(Log()).entry(handmade.ABORTED)
    state = handmade.closed(Log()).state()
    assert isinstance(reduce(state, entry), Violation)
    loose = Reducer.without((TABLE_PLACE,)).reduce(state, entry)
    assert isinstance(loose, RequestState)
    assert loose.phase is Phase.CLOSED
