"""What the scheduler decides, as pure functions of a log: refuse, admit, end, lose, look, restart."""

from __future__ import annotations

import attrs
import pytest

from lifecycle.admission import Limits, Submission, admit, growth_booked, outgrown, refuse
from lifecycle.decide import (
    End,
    Fail,
    Look,
    Lose,
    Restart,
    decide,
    victim,
    waits_for_durability,
)
from lifecycle.events import (
    Aborted,
    Cause,
    Drained,
    Draining,
    Failed,
    FenceScope,
    Lost,
    LostCause,
    Proof,
    QuarantineCause,
    Quarantined,
    RejectCode,
    Released,
    RequestEvent,
    Requeued,
    Role,
)
from lifecycle.ids import FLEET, EngineId, GrantId, PageRange, RequestId, TokenRange, request_id
from tests import handmade as hand
from tests.handmade import DECODE, DESTINATION, NEW, ONE, PREFILL, PROMPT, SOURCE, TWO, Log

LIMITS = Limits(context_tokens=64, growth_tokens=4, attempts_max=2, settle_ns=hand.SETTLE_NS)
OLDER, YOUNGER = ONE, TWO
LOSE_DECODE = Lose(DECODE.engine, 1, LostCause.LEASE)
LOSE_PREFILL = Lose(PREFILL.engine, 1, LostCause.LEASE)


def wanted(prompt: int = PROMPT, new: int = NEW, *, attempt: int = 1) -> Submission:
    """A submission with the usual numbers."""
    return Submission(ONE, "tenant", prompt, b"digest", new, hand.DEADLINE_NS, attempt)


def _codes(log: Log, *submissions: Submission) -> list[RejectCode | None]:
    found = [refuse(log.history, each, LIMITS) for each in submissions]
    return [None if each is None else each.code for each in found]


# --- refuse -----------------------------------------------------------------------------------


def test_what_can_never_be_served_is_refused_with_its_numbers() -> None:
    """Each refusal has its code, and its reason names what was compared."""
    log = Log()
    assert _codes(log, wanted(), wanted(0), wanted(7, 0), wanted(60, 5), wanted(60, 4)) == [
        None,
        RejectCode.INVALID_REQUEST,
        RejectCode.INVALID_REQUEST,
        RejectCode.CONTEXT_LENGTH_EXCEEDED,
        None,
    ]
    refusal = refuse(log.history, wanted(60, 5), LIMITS)
    assert refusal is not None
    assert (refusal.prompt_tokens, refusal.new_tokens_max, refusal.capacity_tokens) == (60, 5, 64)
    assert "60 prompt tokens and 5 new tokens exceed the context of 64 tokens" in refusal.reason


def test_a_request_larger_than_every_pool_is_refused_although_the_context_allows_it() -> None:
    """The advertised context may be larger than the pools: the pool's size is the answer."""
    log = Log()
    wide = attrs.evolve(LIMITS, context_tokens=1_000)
    for submission, leg in ((wanted(40, 30), "decode"), (wanted(66, 1), "prefill")):
        refusal = refuse(log.history, submission, wide)
        assert refusal is not None
        assert refusal.code is RejectCode.KV_POOL_CAPACITY_EXCEEDED
        assert leg in refusal.reason
        assert refusal.capacity_tokens == 64


def test_without_one_engine_of_each_kind_nothing_is_served() -> None:
    """A fleet with no decode engine refuses, and says what is attached."""
    log = Log().add(Lost(DECODE.engine, 1, LostCause.LEFT), request=FLEET)
    refusal = refuse(log.history, wanted(), LIMITS)
    assert refusal is not None
    assert refusal.code is RejectCode.NO_ENGINE
    assert "1 prefill and 0 decode engines" in refusal.reason


# --- admit ------------------------------------------------------------------------------------


def test_an_admission_is_what_the_guards_accept() -> None:
    """The decided event proves its numbers: it is legal as it stands."""
    log = Log()
    event = admit(log.history, wanted(), LIMITS)
    assert event is not None
    assert (event.prefill.pages_booked, event.decode.pages_booked) == (2, 3)
    assert (event.prefill.pages_needed, event.decode.pages_needed) == (2, 5)
    assert log.judge(event) is None


def test_both_legs_are_booked_or_none() -> None:
    """Where one leg has no room the request waits, whatever the other has."""
    log = hand.reserved_both(Log())
    for serial in range(2, 5):
        event = admit(log.history, wanted(), LIMITS)
        assert event is not None
        log.add(event, request=request_id(epoch=1, serial=serial))
    assert admit(log.history, wanted(), LIMITS) is None


def test_nothing_is_placed_on_a_draining_or_lost_engine() -> None:
    """Draining engines get nothing new, and lost ones are gone."""
    for event in (Draining(PREFILL.engine, 1), Lost(PREFILL.engine, 1, LostCause.LEASE)):
        log = Log().add(event, request=FLEET)
        assert admit(log.history, wanted(), LIMITS) is None


def test_the_engine_with_most_room_is_chosen() -> None:
    """Of two decode engines the emptier one gets the request."""
    log = hand.reserved_both(Log())
    second = attrs.evolve(DECODE, engine=EngineId("d1"))
    log.add(hand.attached(second, Role.DECODE), request=FLEET)
    event = admit(log.history, wanted(), LIMITS)
    assert event is not None
    assert event.decode.engine == second.engine


def test_a_newcomer_leaves_room_for_those_that_decode_to_grow() -> None:
    """Free pages that running requests will soon ask for are not booked away."""
    log = hand.decoding(Log())
    tight = attrs.evolve(LIMITS, growth_tokens=44)
    assert admit(log.history, wanted(), LIMITS) is not None
    assert admit(log.history, wanted(), tight) is None


def test_each_attempt_books_more_and_the_last_one_all() -> None:
    """Growth is booked fourfold each time; the last attempt cannot run out of pages."""
    limits = Limits(context_tokens=4096, growth_tokens=8, attempts_max=4)
    booked = [growth_booked(wanted(7, 1000, attempt=n), limits) for n in range(1, 5)]
    assert booked == [8, 32, 128, 1000]
    assert growth_booked(wanted(7, 3), limits) == 3


# --- end, fail --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "open_"),
    [
        (hand.new, False),
        (hand.turned_away, False),
        (hand.written, True),
        (hand.decoding, True),
        (hand.requeued_holding, True),
        (hand.ended, False),
        (hand.closed, False),
    ],
)
def test_an_end_aborts_what_is_open_and_nothing_else(build: hand.Builder, open_: bool) -> None:
    """Ending twice, or what never began, decides nothing."""
    log = build(Log())
    decided = decide(log.history, End(ONE, Cause.CLIENT_CANCEL, "client"))
    assert decided == (((ONE, Aborted(Cause.CLIENT_CANCEL, "client")),) if open_ else ())


def _fail(
    log: Log, cause: Cause, relayed: int = 2, **fields: int
) -> list[tuple[RequestId, object]]:
    failed = Failed(cause, "why", **fields)
    return list(decide(log.history, Fail(ONE, DECODE, failed, relayed)))


def test_a_failure_that_another_attempt_may_cure_requeues_while_attempts_last() -> None:
    """A failed transfer begins again; in the last attempt it is the client's answer."""
    log = hand.decoding(Log())
    assert _fail(log, Cause.TRANSFER_FAILED) == [
        (ONE, Requeued(Cause.TRANSFER_FAILED, str(DECODE), 2))
    ]
    log = Log().add(hand.admitted(attempts_max=1))
    assert _fail(log, Cause.TRANSFER_FAILED, 0) == [
        (ONE, Aborted(Cause.TRANSFER_FAILED, str(DECODE), "why"))
    ]


def test_with_every_token_relayed_there_is_nothing_to_requeue_for() -> None:
    """An attempt that has given all its tokens is not begun again."""
    log = hand.decoding(Log())
    ((_, event),) = _fail(log, Cause.ENGINE_LOST, relayed=NEW)
    assert isinstance(event, Aborted)


def test_a_failure_of_what_does_not_run_decides_nothing() -> None:
    """A report that comes after the end changes nothing."""
    assert _fail(hand.ended(Log()), Cause.ENGINE_FAILED) == []


def test_an_isolation_violation_ends_the_request_and_quarantines_the_page() -> None:
    """The grant with the page leaves circulation; the tags are kept as evidence."""
    log = hand.decoding(Log())
    decided = _fail(log, Cause.ISOLATION_VIOLATION, page=1, tag_expected=12, tag_found=99)
    expected = Aborted(Cause.ISOLATION_VIOLATION, str(DECODE), "why", 1, 12, 99)
    assert decided == [
        (ONE, expected),
        (ONE, Quarantined(DESTINATION, QuarantineCause.ISOLATION)),
    ]
    for request, event in decide(
        log.history,
        Fail(ONE, DECODE, Failed(Cause.ISOLATION_VIOLATION, "why", 1, 12, 99), 2),
    ):
        log.add(event, request=request)


def _two_decode(log: Log, *, attempts_max: int = 2) -> Log:
    """Two requests run on one decode engine; the second is the younger."""
    hand.decoding(log)
    event = hand.admitted(
        prefill=hand.leg(PREFILL, needed=2, booked=2, free=14),
        decode=hand.leg(DECODE, needed=5, booked=3, free=13),
        attempts_max=attempts_max,
    )
    return log.add(event, request=TWO)


def test_for_want_of_pages_the_youngest_gives_way() -> None:
    """Whoever asks, it is the younger one that is requeued, with its own count of tokens."""
    log = _two_decode(Log())
    assert victim(log.history, DECODE.engine, 1) == YOUNGER
    others = ((OLDER, 2), (YOUNGER, 1))
    command = Fail(OLDER, DECODE, Failed(Cause.OUT_OF_PAGES), 2, others)
    assert decide(log.history, command) == (
        (YOUNGER, Requeued(Cause.OUT_OF_PAGES, str(DECODE), 1)),
    )


def test_the_oldest_is_never_the_victim_and_a_last_attempt_neither() -> None:
    """Where nobody can give way, whoever asked ends as out of attempts or tries again."""
    log = _two_decode(Log(), attempts_max=1)
    assert victim(log.history, DECODE.engine, 1) is None
    assert victim(hand.decoding(Log()).history, DECODE.engine, 1) is None
    alone = Log().add(hand.admitted(attempts_max=1))
    assert _fail(alone, Cause.OUT_OF_PAGES, 0) == [
        (ONE, Aborted(Cause.ATTEMPTS_EXHAUSTED, str(DECODE)))
    ]


def test_nobody_gives_way_whose_answer_is_whole() -> None:
    """A younger request whose client has every token is about to end: its pages are waited for."""
    log = _two_decode(Log())
    most = log.history.state(YOUNGER).first
    assert most is not None
    others = ((OLDER, 2), (YOUNGER, most.new_tokens_max))
    command = Fail(OLDER, DECODE, Failed(Cause.OUT_OF_PAGES), 2, others)
    assert decide(log.history, command) == ()


def test_who_has_grown_out_of_every_prefill_pool_is_not_requeued() -> None:
    """What was relayed is part of the next prompt; one that fits nowhere would wait for ever."""
    log = hand.decoding(Log()).history
    assert not outgrown(log, hand.PAGES * hand.PAGE_TOKENS + 1)
    assert outgrown(log, hand.PAGES * hand.PAGE_TOKENS + 2)
    lost = attrs.evolve(LOSE_DECODE, relayed=((ONE, 3),))
    assert Requeued(Cause.ENGINE_LOST, "d0/1", 3) in [event for _, event in decide(log, lost)]
    lives = tuple(
        (name, attrs.evolve(life, attached=attrs.evolve(life.attached, pages=2)))
        for name, life in log.fleet.lives
    )
    log.fleet = attrs.evolve(log.fleet, lives=lives)
    assert Aborted(Cause.ENGINE_LOST, "d0/1") in [event for _, event in decide(log, lost)]


def test_pages_on_their_way_are_waited_for() -> None:
    """The oldest does not give way while an ended attempt's pages are still coming home."""
    log = _two_decode(Log())
    log.add(hand.requeued(), request=ONE)
    asks = Fail(YOUNGER, DECODE, Failed(Cause.OUT_OF_PAGES), 1, ((YOUNGER, 1),))
    assert decide(log.history, asks) == ()


# --- lose -------------------------------------------------------------------------------------


def _kinds(decided: tuple[tuple[RequestId, object], ...]) -> list[str]:
    return [type(event).__name__ for _, event in decided]


def test_losing_decode_requeues_its_requests_and_quarantines_its_grants() -> None:
    """The grants leave with the memory; the attempt begins elsewhere with what was relayed."""
    log = hand.decoding(Log())
    decided = decide(log.history, attrs.evolve(LOSE_DECODE, relayed=((ONE, 3),)))
    assert decided == (
        (FLEET, Lost(DECODE.engine, 1, LostCause.LEASE)),
        (ONE, Requeued(Cause.ENGINE_LOST, "d0/1", 3)),
        (ONE, Quarantined(DESTINATION, QuarantineCause.OWNER_LOST)),
    )
    for request, event in decided:
        log.add(event, request=request)


def test_losing_prefill_matters_only_until_it_has_handed_over() -> None:
    """Once every writer has drained, the attempt goes on without its prefill engine."""
    before = decide(hand.written(Log()).history, LOSE_PREFILL)
    assert _kinds(before) == ["Lost", "Requeued", "Quarantined"]
    for build in (hand.handed_over, hand.decoding):
        assert _kinds(decide(build(Log()).history, LOSE_PREFILL)) == ["Lost", "Quarantined"]


def test_a_life_is_lost_once() -> None:
    """Losing the lost, or a stranger, decides nothing."""
    log = Log().add(Lost(DECODE.engine, 1, LostCause.LEASE), request=FLEET)
    assert decide(log.history, LOSE_DECODE) == ()
    assert decide(log.history, Lose(EngineId("x"), 1, LostCause.LEASE)) == ()


# --- look, restart ----------------------------------------------------------------------------


def test_time_aborts_at_the_deadline_and_quarantines_after_the_time_to_settle() -> None:
    """A look before either decides nothing; it never drains and never releases."""
    log = hand.written(Log())
    assert decide(log.history, Look(hand.DEADLINE_NS - 1)) == ()
    assert decide(log.history, Look(hand.DEADLINE_NS)) == (
        (ONE, Aborted(Cause.DEADLINE, "scheduler")),
    )
    log = hand.ended(Log())
    settle_by = log.state().settle_by_ns
    assert decide(log.history, Look(settle_by - 1)) == ()
    assert decide(log.history, Look(settle_by)) == (
        (ONE, Quarantined(SOURCE, QuarantineCause.NO_PROOF)),
        (ONE, Quarantined(DESTINATION, QuarantineCause.NO_PROOF)),
    )


def test_a_requeued_request_is_settled_by_its_time_too() -> None:
    """What the last attempt did not give back in time goes to quarantine."""
    log = hand.requeued_holding(Log())
    decided = decide(log.history, Look(log.state().settle_by_ns))
    assert _kinds(decided) == ["Quarantined", "Quarantined"]


def test_a_grant_of_a_lost_owner_is_quarantined_for_that_reason() -> None:
    """The cause says whether the memory is gone."""
    log = hand.ended(Log()).add(Lost(DECODE.engine, 1, LostCause.LEASE), request=FLEET)
    decided = decide(log.history, Look(log.state().settle_by_ns))
    assert (ONE, Quarantined(DESTINATION, QuarantineCause.OWNER_LOST)) in decided
    assert (ONE, Quarantined(SOURCE, QuarantineCause.NO_PROOF)) in decided


def test_a_restart_aborts_every_open_request_and_no_other() -> None:
    """Nobody waits for an answer from the life before."""
    log = _two_decode(Log())
    log.add(hand.ABORTED, request=TWO)
    assert decide(log.history, Restart()) == (
        (ONE, Aborted(Cause.SCHEDULER_RESTARTED, "scheduler")),
    )


# --- durability --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "waits"),
    [
        (hand.destination(), True),
        (hand.source(), False),
        (
            hand.growth(
                grant=GrantId(DECODE, 5), pages=(PageRange(9, 1),), tokens=TokenRange(12, 16)
            ),
            False,
        ),
        (Released(SOURCE), True),
        (Drained(DESTINATION, PREFILL, Proof.ACKNOWLEDGED), False),
        (hand.verified(), False),
        (hand.ABORTED, False),
    ],
)
def test_what_lets_a_writer_in_or_gives_pages_back_waits(event: RequestEvent, waits: bool) -> None:
    """These two could harm others if a crash forgot them; an engine's joining waits as well."""
    assert waits_for_durability(event) is waits
    assert waits_for_durability(hand.attached(DECODE, Role.DECODE, scope=FenceScope.NONE))
