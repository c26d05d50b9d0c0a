"""Every guard on one request's log has a log that only it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from lifecycle.events import (
    KV,
    ByEngine,
    ByScheduler,
    Drained,
    Entry,
    Event,
    Proof,
    Purpose,
    QuarantineCause,
    Quarantined,
    Released,
    Reserved,
)
from lifecycle.guards import EARLY, GUARDS, LATE, TABLE_PLACE
from lifecycle.ids import GrantId, PageRange, Party, TokenRange
from lifecycle.reducer import ALL_GUARDS, Reducer
from lifecycle.rules import RULES
from lifecycle.state import Phase, Violation
from tests import handmade as hand
from tests.handmade import DECODE, DESTINATION, EPOCH, PREFILL, SOURCE, STRANGER, Log

Case = Callable[[], tuple[Log, Entry]]
OTHER_PREFILL = Party(PREFILL.engine, PREFILL.incarnation, 1)


def _two_ranks(log: Log) -> Log:
    """Prefill with two ranks, of which decode let in only the first, which drained."""
    two = attrs.evolve(hand.leg(PREFILL, needed=2, booked=2), ranks=2)
    log.history.requests[hand.ONE] = attrs.evolve(
        hand.handed_over(Log()).state(), admitted=hand.admitted(prefill=two)
    )
    log.now_ns += 10
    return log


def _second_attempt(log: Log) -> Log:
    return hand.requeued_settled(log).add(hand.again(attempts_max=3))


def _isolated(log: Log) -> Log:
    return hand.decoding(log).add(hand.ABORTED, Quarantined(DESTINATION, QuarantineCause.ISOLATION))


def _last_attempt(log: Log) -> Log:
    return log.add(hand.admitted(attempts_max=1))


def _judged(build: hand.Builder, event: Event, **how: Any) -> Case:
    def case() -> tuple[Log, Entry]:
        log = build(Log())
        return log, log.entry(event, **how)

    return case


def _earlier() -> tuple[Log, Entry]:
    log = hand.written(Log())
    return log, log.entry(hand.drained(), time_ns=log.state().time_ns - 1)


RED: dict[str, Case] = {
    "unbroken-log/sequence": _judged(hand.written, hand.drained(), skip=1),
    "unbroken-log/time": _earlier,
    "drained-is-final/transfer": _judged(hand.handed_over, hand.transferred()),
    "one-decision/by-scheduler": _judged(hand.new, hand.admitted(), by=ByEngine(DECODE, 1)),
    "time-is-no-proof/by-engine": _judged(hand.written, hand.drained(), by=ByScheduler(EPOCH)),
    "acted-after-logged/grant": _judged(
        hand.reserved_both, hand.transferred(grant=GrantId(DECODE, 9))
    ),
    "current-attempt/next": _judged(hand.new, hand.admitted(), attempt=2),
    "current-attempt/current": _judged(_second_attempt, hand.source(), attempt=1),
    "current-attempt/owner": _judged(hand.new_admitted, hand.source(), by=ByEngine(DECODE, 1)),
    "current-attempt/decode": _judged(hand.handed_over, hand.verified(), by=ByEngine(PREFILL, 1)),
    "current-attempt/parties": _judged(
        hand.new_admitted, hand.destination(parties=(PREFILL, STRANGER))
    ),
    "capacity-proved/context": _judged(hand.new, hand.admitted(context_tokens=16)),
    "capacity-proved/prefill": _judged(
        hand.new, hand.admitted(prefill=hand.leg(PREFILL, needed=2, booked=2, capacity=1))
    ),
    "capacity-proved/decode": _judged(
        hand.new, hand.admitted(decode=hand.leg(DECODE, needed=4, booked=3))
    ),
    "capacity-proved/booked": _judged(
        hand.new, hand.admitted(decode=hand.leg(DECODE, needed=5, booked=1))
    ),
    "compatible-legs/layout": _judged(
        hand.new,
        hand.admitted(prefill=attrs.evolve(hand.leg(PREFILL, needed=2, booked=2), layout="M")),
    ),
    "requeue-keeps-resources-honest/owned": _judged(hand.requeued_holding, hand.again()),
    "requeue-keeps-resources-honest/continues": _judged(hand.requeued_settled, hand.admitted()),
    "bounded/deadline": _judged(hand.new, hand.admitted(deadline_ns=1)),
    "bounded/attempts": _judged(_last_attempt, hand.requeued(tokens_relayed=0)),
    "settled-once/granted": _judged(hand.reserved_both, hand.destination()),
    "conservation/fits": _judged(hand.new_admitted, hand.destination(tokens=TokenRange(0, 13))),
    "whole-before-read/reserved": _judged(
        hand.new_admitted, hand.destination(tokens=TokenRange(0, 6))
    ),
    "whole-before-read/growth": _judged(hand.decoding, hand.growth(tokens=TokenRange(13, 20))),
    "written-within-grant/party": _judged(
        hand.reserved_both, hand.transferred(), by=ByEngine(STRANGER, 1)
    ),
    "written-within-grant/range": _judged(
        hand.reserved_both, hand.transferred(0, 4, pages=(PageRange(1, 1),))
    ),
    "written-within-grant/overlap": _judged(hand.written, hand.transferred(4, 6)),
    "computed-before-sent/step": _judged(hand.reserved_both, hand.transferred(step=2)),
    "whole-before-read/grants": _judged(
        hand.handed_over, hand.verified(grants=(DESTINATION, SOURCE))
    ),
    "whole-before-read/kinds": _judged(_two_ranks, hand.verified()),
    "whole-before-read/covered": _judged(
        lambda log: hand.reserved_both(log).add(hand.transferred(0, 4), hand.drained()),
        hand.verified(pages=1),
    ),
    "exclusive-before-read/drained": _judged(hand.written, hand.verified()),
    "read-what-was-written/verified": _judged(hand.handed_over, hand.verified(digests_checked=1)),
    "read-what-was-written/reads": _judged(hand.decoding, hand.finished(reads_unchecked=1)),
    "first-cause-wins/length": _judged(hand.decoding, hand.finished(tokens=11)),
    "requeue-keeps-resources-honest/relayed": _judged(
        _second_attempt, hand.requeued(tokens_relayed=1), attempt=2
    ),
    "time-is-no-proof/proof": _judged(
        hand.written, hand.drained(proof=Proof.FENCED), by=ByEngine(PREFILL, 1)
    ),
    "settled-once/drained": _judged(hand.handed_over, hand.drained()),
    "settled-once/owner": _judged(hand.handed_over, Released(SOURCE), by=ByEngine(DECODE, 1)),
    "settled-once/released": _judged(
        lambda log: hand.handed_over(log).add(Released(SOURCE)), Released(SOURCE)
    ),
    "settled-once/quarantined": _judged(
        lambda log: hand.handed_over(log).add(Released(SOURCE)),
        Quarantined(SOURCE, QuarantineCause.NO_PROOF),
    ),
    "drained-before-released/parties": _judged(hand.ended, Released(DESTINATION)),
    "acted-after-logged/unread": _judged(hand.decoding, Released(DESTINATION)),
}


def test_every_guard_has_a_log_that_turns_it_red() -> None:
    """The cases' names are the guards' names, no more and no less; names are never used twice."""
    names = [guard.name for guard in GUARDS]
    assert set(RED) == set(names)
    assert len(names) == len(set(names))
    assert (*EARLY, *LATE) == GUARDS


def test_guards_are_named_after_rules() -> None:
    """Each guard keeps a rule that stands in the list of rules, and is asked for some event."""
    for guard in GUARDS:
        assert guard.rule in RULES
        assert guard.name.startswith(f"{guard.rule}/")
        assert guard.events
    assert TABLE_PLACE.split("/")[0] in RULES


@pytest.mark.parametrize("name", RED)
def test_the_guard_refuses_and_nothing_changes(name: str) -> None:
    """The entry is refused by exactly this guard, in a sentence, and the log stays as it was."""
    log, entry = RED[name]()
    before = log.history.copy()
    violation = ALL_GUARDS.check(log.state(), entry)
    assert violation is not None
    assert log.history.apply(entry) is not None
    assert (violation.guard, violation.rule) == (name, name.split("/", maxsplit=1)[0])
    assert violation.message
    assert (violation.request, violation.sequence) == (entry.request, entry.sequence)
    assert log.history.requests == before.requests
    assert log.history.ledger == before.ledger
    assert log.history.fleet == before.fleet


@pytest.mark.parametrize("name", RED)
def test_without_the_guard_it_is_silent(name: str) -> None:
    """A reducer from which the guard was taken never names it, so searches can miss it."""
    log, entry = RED[name]()
    result = Reducer.without((name,)).reduce(log.state(), entry)
    assert not isinstance(result, Violation) or result.guard != name


# Further sides of guards that compare several things: the guard, and what it must refuse too.
ALSO: tuple[tuple[str, Case], ...] = (
    ("acted-after-logged/grant", _judged(hand.written, hand.drained(grant=GrantId(DECODE, 9)))),
    ("current-attempt/owner", _judged(hand.new_admitted, hand.source(grant=GrantId(STRANGER, 1)))),
    (
        "current-attempt/owner",
        _judged(hand.new_admitted, hand.source(grant=GrantId(OTHER_PREFILL, 1))),
    ),
    (
        "capacity-proved/prefill",
        _judged(hand.new, hand.admitted(prefill=hand.leg(PREFILL, needed=1, booked=1))),
    ),
    (
        "capacity-proved/booked",
        _judged(hand.new, hand.admitted(prefill=hand.leg(PREFILL, needed=2, booked=2, free=1))),
    ),
    (
        "compatible-legs/layout",
        _judged(
            hand.new,
            hand.admitted(
                prefill=attrs.evolve(hand.leg(PREFILL, needed=1, booked=1), page_tokens=8)
            ),
        ),
    ),
    (
        "whole-before-read/reserved",
        _judged(hand.new_admitted, hand.destination(tokens=TokenRange(1, 12))),
    ),
    ("whole-before-read/reserved", _judged(hand.new_admitted, hand.source(kind="conv"))),
    (
        "whole-before-read/reserved",
        _judged(hand.reserved_both, hand.source(grant=GrantId(PREFILL, 2))),
    ),
    ("whole-before-read/growth", _judged(hand.reserved_both, hand.growth())),
    ("whole-before-read/growth", _judged(hand.decoding, hand.growth(kind="conv"))),
    (
        "whole-before-read/kinds",
        _judged(
            lambda log: log.add(
                hand.admitted(kinds=(KV, "conv")),
                hand.destination(),
                hand.transferred(),
                hand.drained(),
            ),
            hand.verified(),
        ),
    ),
    (
        "whole-before-read/covered",
        _judged(
            lambda log: hand.reserved_both(log).add(hand.transferred(4, 6), hand.drained()),
            hand.verified(pages=1),
        ),
    ),
    ("written-within-grant/party", _judged(hand.reserved_both, hand.transferred(grant=SOURCE))),
    (
        "written-within-grant/party",
        _judged(
            lambda log: hand.reserved_both(log).add(
                Quarantined(DESTINATION, QuarantineCause.NO_PROOF)
            ),
            hand.transferred(),
        ),
    ),
    ("written-within-grant/range", _judged(hand.reserved_both, hand.transferred(0, 8))),
    (
        "written-within-grant/range",
        _judged(hand.reserved_both, hand.transferred(tokens=TokenRange(3, 3))),
    ),
    (
        "written-within-grant/range",
        _judged(hand.reserved_both, hand.transferred(tokens=TokenRange(0, 5))),
    ),
    (
        "written-within-grant/range",
        _judged(hand.reserved_both, hand.transferred(tokens=TokenRange(2, 6))),
    ),
    ("written-within-grant/overlap", _judged(hand.written, hand.transferred())),
    ("computed-before-sent/step", _judged(hand.reserved_both, hand.transferred(step=0))),
    ("read-what-was-written/verified", _judged(hand.handed_over, hand.verified(pages=3))),
    ("read-what-was-written/verified", _judged(hand.handed_over, hand.verified(headers_checked=1))),
    ("read-what-was-written/reads", _judged(hand.decoding, hand.finished(pages_read=4))),
    ("time-is-no-proof/proof", _judged(hand.written, hand.drained(party=STRANGER))),
    ("time-is-no-proof/proof", _judged(hand.written, hand.drained(), by=ByEngine(DECODE, 1))),
    (
        "settled-once/drained",
        _judged(
            lambda log: hand.closed(log).add(hand.drained(), Released(DESTINATION)),
            Drained(DESTINATION, PREFILL, Proof.ACKNOWLEDGED),
        ),
    ),
    ("settled-once/released", _judged(hand.ended, Released(GrantId(DECODE, 9)))),
    ("settled-once/released", _judged(_isolated, Released(DESTINATION))),
    (
        "settled-once/quarantined",
        _judged(hand.ended, Quarantined(GrantId(DECODE, 9), QuarantineCause.NO_PROOF)),
    ),
    (
        "settled-once/quarantined",
        _judged(_isolated, Quarantined(DESTINATION, QuarantineCause.NO_PROOF)),
    ),
    (
        "requeue-keeps-resources-honest/relayed",
        _judged(hand.decoding, hand.requeued(tokens_relayed=hand.NEW)),
    ),
)


@pytest.mark.parametrize(("name", "case"), ALSO, ids=lambda value: str(value)[:40])
def test_a_guard_refuses_each_side_of_what_it_compares(name: str, case: Case) -> None:
    """A guard that compares several things refuses each of them alone."""
    log, entry = case()
    violation = log.history.check(entry)
    assert violation is not None
    assert violation.guard == name


def test_the_same_owner_may_release_what_was_proved_late() -> None:
    """A quarantined grant comes back after a late Drained, in a closed request too."""
    log = hand.closed(Log())
    assert log.state().phase is Phase.CLOSED
    refused = log.judge(Released(DESTINATION))
    assert refused is not None
    log.add(hand.drained(), Released(DESTINATION))
    assert log.state().phase is Phase.CLOSED


def test_a_fence_by_the_owner_is_a_proof() -> None:
    """The owner of a grant may drain it for a party that it has shut out."""
    log = hand.ended(Log())
    log.add(hand.drained(proof=Proof.FENCED), Released(DESTINATION))
    assert log.history.ledger[DECODE].held_pages == 0


def test_a_write_may_arrive_in_any_order() -> None:
    """Ranges cover the prompt whatever order they came in."""
    log = hand.reserved_both(Log())
    log.add(hand.transferred(4, 6), hand.transferred(0, 4), hand.drained(), hand.verified())
    assert log.state().phase is Phase.DECODING


def test_a_grant_of_one_token_prompt_needs_no_write() -> None:
    """A prompt of one token has no KV to hand over: nothing is written, all is drained."""
    log = Log().add(
        hand.admitted(
            prompt_tokens=1,
            prefill=hand.leg(PREFILL, needed=1, booked=1),
            decode=hand.leg(DECODE, needed=3, booked=3),
        ),
        Reserved(SOURCE, Purpose.SOURCE, (PageRange(0, 1),), TokenRange(0, 1), KV, 11),
        hand.destination(),
        hand.drained(),
        hand.verified(pages=0, headers_checked=0, digests_checked=0),
    )
    assert log.state().phase is Phase.DECODING
