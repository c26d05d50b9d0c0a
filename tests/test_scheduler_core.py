"""The scheduler without a shell: what it accepts, in which order it asks for what, and for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from engine import sequencer
from engine.core import LogDivergedError
from engine.digests import Keyed
from engine.effects import Answer, Append, Publish, TellOutcome
from engine.prefill import Posted
from engine.scheduler import RefusedEngineError, Scheduler
from lifecycle.decide import Limits
from lifecycle.events import (
    Aborted,
    Admitted,
    Cause,
    Drained,
    Dropped,
    Failed,
    Finished,
    FinishReason,
    Lost,
    LostCause,
    Proposal,
    Purpose,
    RejectCode,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Resumed,
    Role,
    Transferred,
)
from lifecycle.ids import EngineId, GrantId, Party, RequestId
from lifecycle.replay import replay
from lifecycle.state import Phase
from tests.driver import DECODE, DIGEST, PREFILL, Driver, Sizes

NEXT_DECODE = attrs.evolve(DECODE, incarnation=2)


def _pair(**sizes: Any) -> Driver:
    return Driver(Sizes(**sizes)).pair().run()


def _decoding(driver: Driver, request: RequestId) -> Driver:
    return driver.run_until(lambda: driver.phase(request) is Phase.DECODING)


def _events_of(driver: Driver, kind: type) -> list[object]:
    return [entry.event for _, entry in driver.log if isinstance(entry.event, kind)]


def _rejected(driver: Driver, request: RequestId) -> Rejected:
    outcome = driver.outcomes[request]
    assert isinstance(outcome, Rejected)
    assert driver.events(request) == ["Rejected"]
    return outcome


# --- effects ----------------------------------------------------------------------------------


def test_an_answer_comes_whole_and_everything_is_given_back() -> None:
    """The client gets every token once and in order; pages, staging and memory come home."""
    driver = _pair()
    requests = [driver.submit(7, 10, tenant=f"t{n % 2}") for n in range(6)]
    driver.run()
    for request in requests:
        assert isinstance(driver.outcomes[request], Finished)
        assert driver.tokens[request] == list(range(6, 16))
    assert driver.scheduler.idle
    # An acknowledgement asks for nothing itself; what it allows is told with the next call.
    driver.tick()
    assert sorted(driver.closed) == requests
    assert driver.scheduler.log.requests == {}
    for core in driver.cores.values():
        assert core.allocator.free == 8
        assert not core.jobs
        assert not core.outstanding
        assert not core.log.requests
    assert replay(driver.log).clean


def test_an_entry_is_appended_before_it_is_published_or_told() -> None:
    """Append stands before every Publish, Answer and TellOutcome of the same position."""
    driver = _pair()
    driver.submit()
    driver.run()
    appended = 0
    kinds = set()
    for effect in driver.effects:
        kinds.add(type(effect))
        if isinstance(effect, Append):
            assert effect.position == appended + 1
            appended = effect.position
        elif isinstance(effect, Publish | Answer):
            assert effect.position <= appended
        elif isinstance(effect, TellOutcome):
            assert effect.durable == appended
    assert {Append, Publish, Answer, TellOutcome} <= kinds


def test_what_cannot_be_taken_back_waits_for_durability() -> None:
    """A grant that lets a writer in and a release are published durable; the rest at once."""
    driver = _pair()
    driver.submit()
    driver.run()
    seen = set()
    for effect in driver.effects:
        if not isinstance(effect, Publish) or effect.entry.event.__class__.__name__ == "Attached":
            continue
        event = effect.entry.event
        lets_in = isinstance(event, Reserved) and bool(event.parties)
        waits = lets_in or isinstance(event, Released)
        assert effect.durable == (effect.position if waits else 0), event
        seen.add((type(event), waits))
    assert {(Reserved, True), (Reserved, False), (Released, True), (Drained, False)} <= seen


def test_the_payload_travels_with_its_admission_alone() -> None:
    """Prompt tokens are beside `Admitted`, and nowhere else."""
    driver = _pair()
    driver.submit(7)
    driver.run()
    for effect in driver.effects:
        if isinstance(effect, Publish):
            with_payload = isinstance(effect.entry.event, Admitted)
            assert (effect.payload is not None) is with_payload


# --- proposals --------------------------------------------------------------------------------


def test_a_repeated_proposal_gets_its_first_answer_and_appends_nothing() -> None:
    """The same number again is answered as before."""
    driver = _pair()
    request = driver.submit()
    core = driver.cores[PREFILL]
    driver.run_until(lambda: bool(core.outstanding))
    proposal = core.retransmit()[0]
    driver.run_until(lambda: "Reserved" in driver.events(request))
    before = len(driver.log)
    (first,) = [
        e
        for e in driver.effects
        if isinstance(e, Answer) and (e.party, e.number) == (PREFILL, proposal.number)
    ]
    assert driver.scheduler.propose(proposal, driver.now_ns) == [first]
    assert len(driver.log) == before


def test_an_effect_that_stands_already_is_a_repeat_under_another_number() -> None:
    """After a reconnect the same body under a new number is answered with the first position."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    position, entry = next(
        (at, e) for at, e in driver.log if isinstance(e.event, Drained) and e.request == request
    )
    assert isinstance(entry.event, Drained)
    number = driver.scheduler.lines[PREFILL].expected
    again = Proposal(PREFILL, number, request, 1, entry.event)
    before = len(driver.log)
    answers = driver.scheduler.propose(again, driver.now_ns)
    assert answers == [Answer(PREFILL, number, position)]
    assert len(driver.log) == before


def test_a_gap_is_not_answered() -> None:
    """A proposal beyond the next number waits for those before it."""
    driver = _pair()
    request = driver.submit()
    number = driver.scheduler.lines[PREFILL].expected + 1
    early = Proposal(PREFILL, number, request, 1, Released(GrantId(PREFILL, 1)))
    assert driver.scheduler.propose(early, driver.now_ns) == []
    assert driver.scheduler.lines[PREFILL].expected == number - 1


def test_who_never_connected_is_not_answered() -> None:
    """Proposals of an unknown rank have no line."""
    driver = _pair()
    request = driver.submit()
    stranger = Party(EngineId("x"), 1, 0)
    lone = Proposal(stranger, 1, request, 1, Released(GrantId(stranger, 1)))
    assert driver.scheduler.propose(lone, driver.now_ns) == []


def _illegal(driver: Driver, request: RequestId) -> Answer:
    number = driver.scheduler.lines[PREFILL].expected
    body = Released(GrantId(PREFILL, 77))
    effects = driver.scheduler.propose(Proposal(PREFILL, number, request, 1, body), driver.now_ns)
    driver.perform(effects)
    return next(e for e in effects if isinstance(e, Answer))


def test_drops_are_recorded_once_for_each_doubling() -> None:
    """Eight illegal proposals of a kind leave four entries, whose counts add up to eight."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    for _ in range(8):
        answer = _illegal(driver, request)
        assert (answer.position, answer.rule) == (0, "settled-once")
    drops = [event for event in _events_of(driver, Dropped) if isinstance(event, Dropped)]
    assert [drop.count for drop in drops] == [1, 1, 2, 4]
    assert {(drop.kind, drop.rule) for drop in drops} == {("Released", "settled-once")}


def test_a_write_after_drained_loses_the_engine() -> None:
    """None of that incarnation's proofs counts any more."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    written = next(e for e in _events_of(driver, Transferred) if isinstance(e, Transferred))
    late = attrs.evolve(written, digest=written.digest + 1)
    number = driver.scheduler.lines[PREFILL].expected
    effects = driver.scheduler.propose(Proposal(PREFILL, number, request, 1, late), driver.now_ns)
    driver.perform(effects)
    assert Lost(PREFILL.engine, 1, LostCause.RULE_BROKEN) in _events_of(driver, Lost)
    assert next(e for e in effects if isinstance(e, Answer)).rule == "drained-is-final"
    driver.run()
    assert replay(driver.log).clean


def _meets(driver: Driver, request: RequestId, tag: int) -> None:
    """Decode says that a page of this request bears that tag."""
    state = driver.scheduler.log.state(request)
    page = state.current(Purpose.DESTINATION)[0].reserved.pages[0].first
    failed = Failed(Cause.ISOLATION_VIOLATION, "why", page, 77, tag)
    number = driver.scheduler.lines[DECODE].expected
    proposal = Proposal(DECODE, number, request, state.attempt, failed)
    driver.perform(driver.scheduler.propose(proposal, driver.now_ns))


def _let_in(driver: Driver) -> Reserved:
    """The first grant that let a writer in."""
    events = _events_of(driver, Reserved)
    return next(e for e in events if isinstance(e, Reserved) and e.parties)


def _after_another(**sizes: Any) -> tuple[Driver, RequestId]:
    """A request that decodes when an earlier one is over and forgotten."""
    driver = _pair(**sizes)
    driver.submit()
    driver.run()
    request = driver.submit()
    return _decoding(driver, request), request


def test_whose_tag_is_met_in_a_page_that_decodes_is_lost() -> None:
    """The page was whole before it was read, so that writer has written after its Drained."""
    driver, request = _after_another()
    _meets(driver, request, _let_in(driver).tag)
    aborted = driver.outcomes[request]
    assert isinstance(aborted, Aborted)
    assert aborted.cause is Cause.ISOLATION_VIOLATION
    assert _events_of(driver, Lost) == [Lost(PREFILL.engine, 1, LostCause.RULE_BROKEN)]
    assert replay(driver.log).clean


def test_a_tag_that_let_in_nobody_blames_nobody() -> None:
    """A flipped bit is nobody's tag."""
    driver, request = _after_another()
    _meets(driver, request, 12345)
    assert isinstance(driver.outcomes[request], Aborted)
    assert _events_of(driver, Lost) == []


def test_what_was_left_in_a_page_before_it_was_written_blames_nobody() -> None:
    """Pages are not cleared: before `Verified` an older tag may stand there by right."""
    driver = _pair()
    driver.submit()
    driver.run()
    request = driver.submit()
    driver.run_until(lambda: "Drained" in driver.events(request))
    assert driver.phase(request) is Phase.ADMITTED
    _meets(driver, request, _let_in(driver).tag)
    assert isinstance(driver.outcomes[request], Aborted)
    assert _events_of(driver, Lost) == []


def test_only_so_many_tags_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first."""
    monkeypatch.setattr(sequencer, "LET_IN_MAX", 1)
    driver, request = _after_another()
    assert len(driver.scheduler.let_in) == 1
    _meets(driver, request, _let_in(driver).tag)
    assert _events_of(driver, Lost) == []


def test_a_new_life_of_the_scheduler_remembers_tags() -> None:
    """They stand in the log."""
    driver, _ = _after_another()
    known = dict(driver.scheduler.let_in)
    driver.restart()
    assert driver.scheduler.let_in == known


def test_finished_waits_for_every_token_that_it_counts() -> None:
    """The answer is accepted only when the scheduler holds all its tokens; it is repeated."""
    driver = _pair()
    request = driver.submit(7, 4)
    _decoding(driver, request)
    number = driver.scheduler.lines[DECODE].expected
    held = len(driver.tokens.get(request, ()))
    finished = Finished(FinishReason.STOP, held + 2, 1, b"", 1, 1, 0)
    proposal = Proposal(DECODE, number, request, 1, finished)
    assert driver.scheduler.propose(proposal, driver.now_ns) == []
    driver.relay(DECODE, request, 1, first=held, tokens=(8, 9))
    driver.perform(driver.scheduler.propose(proposal, driver.now_ns))
    assert driver.outcomes[request] == finished


# --- tokens -----------------------------------------------------------------------------------


def test_tokens_are_relayed_once_in_order_and_only_from_this_attempts_decode() -> None:
    """Repeats are cut, gaps and strangers ignored, and nothing is told outside decoding."""
    driver = _pair()
    request = driver.submit(7, 10)
    driver.relay(DECODE, request, 1, first=0, tokens=(1,))
    assert request not in driver.tokens
    _decoding(driver, request)
    have = driver.tokens.get(request, [])[:]
    at = len(have)
    driver.relay(DECODE, request, 1, first=at, tokens=(21, 22))
    driver.relay(DECODE, request, 1, first=at, tokens=(21, 22, 23))
    driver.relay(DECODE, request, 1, first=at + 5, tokens=(99,))
    driver.relay(PREFILL, request, 1, first=at + 3, tokens=(99,))
    driver.relay(DECODE, request, 2, first=at + 3, tokens=(99,))
    assert driver.tokens[request] == [*have, 21, 22, 23]
    driver.cancel(request)
    driver.relay(DECODE, request, 1, first=at + 3, tokens=(99,))
    assert driver.tokens[request] == [*have, 21, 22, 23]


# --- the queue --------------------------------------------------------------------------------


def test_cancel_and_deadline_in_the_queue_are_rejections() -> None:
    """Whoever waits owns nothing, so its end is `Rejected`, and says why."""
    driver = _pair(pages=5)
    first = driver.submit(7, 10)
    waiting = [driver.submit(7, 10, deadline_ns=driver.now_ns + 100) for _ in range(3)]
    driver.cancel(waiting[0])
    assert _rejected(driver, waiting[0]).code is RejectCode.CANCELLED
    driver.cancel(waiting[1], Cause.DEADLINE)
    assert _rejected(driver, waiting[1]).code is RejectCode.DEADLINE
    driver.tick(driver.now_ns + 100)
    assert _rejected(driver, waiting[2]).code is RejectCode.DEADLINE
    assert driver.events(first)[0] == "Admitted"


def test_who_waits_too_long_is_rejected_with_the_numbers() -> None:
    """The queue has a limit of its own, before the client's deadline."""
    driver = _pair(pages=5, queue_ns=50)
    driver.submit(7, 10)
    waiting = driver.submit(7, 10)
    driver.tick(driver.now_ns + 60)
    assert _rejected(driver, waiting).code is RejectCode.QUEUE_TIMEOUT
    assert "50 ns" in _rejected(driver, waiting).reason


def test_a_full_queue_a_past_deadline_and_a_shutdown_refuse_at_once() -> None:
    """Nothing waits that cannot be served; each refusal has its own code."""
    driver = _pair(pages=5, queue_limit=1)
    for _ in range(2):
        driver.submit(7, 10)
    assert _rejected(driver, driver.submit(7, 10)).code is RejectCode.QUEUE_FULL
    driver.run()
    late = driver.submit(7, 10, deadline_ns=1)
    assert _rejected(driver, late).code is RejectCode.DEADLINE
    driver.scheduler.stop_accepting()
    assert _rejected(driver, driver.submit(7, 10)).code is RejectCode.DRAINING


def test_what_never_became_a_prompt_is_rejected_by_name() -> None:
    """A malformed request has an entry of its own, too."""
    driver = _pair()
    request = driver.scheduler.mint()
    driver.perform(
        driver.scheduler.refuse(
            request,
            tenant="t",
            code=RejectCode.INVALID_REQUEST,
            reason="no such model",
            now_ns=driver.now_ns,
        )
    )
    assert _rejected(driver, request).reason == "no such model"


def test_tenants_take_turns() -> None:
    """One tenant's many requests do not keep another's single one waiting."""
    driver = _pair(pages=5)
    many = [driver.submit(7, 10, tenant="many") for _ in range(4)]
    single = driver.submit(7, 10, tenant="single")
    driver.run()
    order = [e.request for _, e in driver.log if isinstance(e.event, Admitted)]
    assert order.index(single) < order.index(many[2])
    assert all(isinstance(outcome, Finished) for outcome in driver.outcomes.values())


# --- out of pages -----------------------------------------------------------------------------


def test_a_requeued_request_continues_where_its_client_is() -> None:
    """Relayed tokens become part of the prompt; the client sees every index once."""
    driver = _pair(pages=8)
    requests = [driver.submit(7, 16) for _ in range(3)]
    driver.run()
    requeues = [e for _, e in driver.log if isinstance(e.event, Requeued)]
    assert requeues
    for entry in requeues:
        event = entry.event
        assert isinstance(event, Requeued)
        again = next(
            e.event
            for _, e in driver.log
            if e.request == entry.request
            and isinstance(e.event, Admitted)
            and e.attempt == entry.attempt + 1
        )
        assert isinstance(again, Admitted)
        assert again.prompt_tokens == 7 + event.tokens_relayed
        assert again.new_tokens_max == 16 - event.tokens_relayed
    published = [
        e.payload
        for e in driver.effects
        if isinstance(e, Publish) and e.payload is not None and e.payload.relayed
    ]
    assert published
    for payload in published:
        assert payload.tokens[7:] == tuple(range(6, 6 + payload.relayed))
    for request in requests:
        assert driver.tokens[request] == list(range(6, 22))


def test_the_oldest_never_gives_its_pages_up() -> None:
    """The victim is younger than somebody who decodes on the same engine."""
    driver = _pair(pages=8)
    requests = [driver.submit(7, 16) for _ in range(4)]
    driver.run()
    victims = {e.request for _, e in driver.log if isinstance(e.event, Requeued)}
    assert victims
    assert min(requests) not in victims
    assert all(isinstance(outcome, Finished) for outcome in driver.outcomes.values())


# --- lives ------------------------------------------------------------------------------------


def test_a_restart_aborts_what_was_open_and_the_engines_come_back() -> None:
    """The next epoch answers for the last one's requests, and pages come home."""
    driver = _pair()
    requests = [driver.submit(), driver.submit()]
    _decoding(driver, requests[0])
    driver.restart()
    for request in requests:
        outcome = driver.outcomes[request]
        assert isinstance(outcome, Aborted)
        assert outcome.cause is Cause.SCHEDULER_RESTARTED
    resumed = _events_of(driver, Resumed)[-1]
    assert isinstance(resumed, Resumed)
    assert resumed.epoch == 2
    driver.run()
    assert driver.scheduler.idle
    assert [core.allocator.free for core in driver.cores.values()] == [8, 8]
    fresh = driver.submit()
    assert fresh > max(requests)
    driver.run()
    assert isinstance(driver.outcomes[fresh], Finished)
    assert replay(driver.log).clean


def test_a_replaced_engine_is_lost_and_its_requests_go_elsewhere() -> None:
    """A new incarnation ends the old one; what needed it begins its next attempt."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    driver._forget(DECODE)
    driver.join(Role.DECODE, NEXT_DECODE)
    assert Lost(DECODE.engine, 1, LostCause.REPLACED) in _events_of(driver, Lost)
    driver.run()
    assert "Requeued" in driver.events(request)
    assert driver.tokens[request] == list(range(6, 16))
    assert isinstance(driver.outcomes[request], Finished)
    assert replay(driver.log).clean


def test_a_request_whose_pages_died_with_their_owner_is_forgotten() -> None:
    """Nobody can settle a lost life's grants any more, so nothing is kept in memory for them."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    driver.kill(DECODE)
    driver.join(Role.DECODE, Party(EngineId("d1"), 1, 0))
    driver.run()
    assert "Quarantined" in driver.events(request)
    assert isinstance(driver.outcomes[request], Finished)
    scheduler = driver.scheduler
    assert request not in scheduler.log.requests
    assert request not in scheduler.entries
    driver.tick()
    assert request in driver.closed
    assert [name for core in driver.cores.values() for name in core.log.requests] == []
    assert replay(driver.log).clean


def test_an_engine_that_may_not_join_is_told_what_was_compared() -> None:
    """An old or lost incarnation and another layout are refused; the same life is recognised."""
    driver = _pair()
    attached = driver.attached[DECODE]
    assert driver.scheduler.attach(attached, driver.now_ns) == []
    other = attrs.evolve(attached, engine=EngineId("d1"), layout="other")
    with pytest.raises(RefusedEngineError, match="its layout other is not layout"):
        driver.scheduler.attach(other, driver.now_ns)
    driver.kill(DECODE)
    with pytest.raises(RefusedEngineError, match="incarnation 1 was lost"):
        driver.scheduler.attach(attached, driver.now_ns)
    driver.join(Role.DECODE, NEXT_DECODE)
    with pytest.raises(RefusedEngineError, match="incarnation 1 is older than 2"):
        driver.scheduler.attach(attached, driver.now_ns)


def test_a_draining_engine_finishes_what_it_has_and_gets_nothing_new() -> None:
    """What runs there runs on; what comes later waits or goes elsewhere."""
    driver = _pair()
    first = driver.submit()
    _decoding(driver, first)
    driver.perform(driver.scheduler.drain(DECODE.engine, driver.now_ns))
    second = driver.submit()
    driver.run()
    assert isinstance(driver.outcomes[first], Finished)
    assert second not in driver.outcomes
    driver.join(Role.DECODE, Party(EngineId("d1"), 1, 0))
    driver.run()
    assert isinstance(driver.outcomes[second], Finished)


def test_a_prompt_is_digested_once_by_each_engine() -> None:
    """A long prompt is compared with its admission at every news, and read only at the first."""
    driver = _pair()
    digested = Counter[Party]()
    for party, core in driver.cores.items():

        def counted(
            request: RequestId,
            tokens: Sequence[int],
            *,
            party: Party = party,
            digest: Keyed = core._digest,
        ) -> bytes:
            digested[party] += 1
            return digest(request, tokens)

        core._digest = counted
    request = driver.submit()
    driver.run()
    assert isinstance(driver.outcomes[request], Finished)
    assert digested == dict.fromkeys(driver.cores, 1)


def test_an_engine_that_joins_a_later_attempt_is_shown_the_beginning() -> None:
    """Its copy of the log has no gap, so that it can judge what it proposes."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    driver.kill(DECODE)
    driver.join(Role.DECODE, Party(EngineId("d1"), 1, 0))
    driver.run_until(lambda: "Requeued" in driver.events(request))
    driver.run()
    assert isinstance(driver.outcomes[request], Finished)


def test_a_reconnect_in_the_same_epoch_goes_on_from_the_cursor() -> None:
    """What the rank has seen is not sent again, and its line of proposals goes on."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    core = driver.cores[DECODE]
    effects = driver.scheduler.connect(
        DECODE,
        epoch=1,
        position=core.position,
        next_number=core.next_number,
        now_ns=driver.now_ns,
    )
    positions = [e.position for e in effects if isinstance(e, Publish)]
    assert all(position > core.position for position in positions)


def test_a_failure_that_concerns_nothing_is_dropped() -> None:
    """An engine that reports on an attempt that is over changes nothing."""
    driver = _pair()
    request = driver.submit()
    _decoding(driver, request)
    driver.cancel(request)
    number = driver.scheduler.lines[PREFILL].expected
    late = Proposal(PREFILL, number, request, 1, Failed(Cause.ENGINE_FAILED))
    effects = driver.scheduler.propose(late, driver.now_ns)
    (answer,) = [e for e in effects if isinstance(e, Answer)]
    assert (answer.position, answer.rule) == (0, "quiet-after-end")


def test_a_deadline_ends_a_running_request_and_never_frees_a_page() -> None:
    """Time aborts; the pages wait for their proof, and then for quarantine, never for release."""
    driver = _pair()
    driver.posted = lambda _post: Posted.IN_DOUBT
    request = driver.submit(deadline_ns=10_000)
    driver.run_until(lambda: "Reserved" in driver.events(request))
    driver.tick(10_000)
    outcome = driver.outcomes[request]
    assert isinstance(outcome, Aborted)
    assert outcome.cause is Cause.DEADLINE
    assert "Released" not in driver.events(request)
    driver.run()
    driver.tick(driver.now_ns + driver.sizes.settle_ns)
    driver.run()
    assert driver.scheduler.idle
    assert replay(driver.log).clean


# --- engines' copies --------------------------------------------------------------------------


def test_what_comes_after_a_request_was_forgotten_is_ignored() -> None:
    """`Dropped` behind the close of a request that an engine forgot does not stop the engine."""
    driver = _pair()
    request = driver.submit(7, 2)
    driver.run_until(lambda: driver.phase(request) is Phase.CLOSED)
    number = driver.scheduler.lines[DECODE].expected
    late = Proposal(DECODE, number, request, 1, Released(GrantId(DECODE, 77)))
    driver.perform(driver.scheduler.propose(late, driver.now_ns))
    assert "Dropped" in driver.events(request)
    driver.run()
    assert driver.cores[PREFILL].log.requests == {}


def test_a_beginning_that_is_missing_still_stops_the_engine() -> None:
    """A copy that lacks a request's first entries says so instead of guessing."""
    driver = _pair()
    request = driver.submit()
    driver.run_until(lambda: "Reserved" in driver.events(request))
    _, entry = next((at, e) for at, e in driver.log if isinstance(e.event, Reserved))
    core = driver.cores[DECODE]
    del core.log.requests[request]
    with pytest.raises(LogDivergedError, match="unbroken-log"):
        core.receive(core.position + 1_000, attrs.evolve(entry, sequence=5))


def test_an_engine_whose_prompt_differs_fails_before_doing_anything() -> None:
    """Two copies of a length are compared, and the request ends instead of walking on."""
    driver = _pair()
    driver.cores[PREFILL]._digest = lambda _r, _t: b"another"
    request = driver.submit()
    driver.run()
    outcome = driver.outcomes[request]
    assert isinstance(outcome, Aborted)
    assert outcome.cause is Cause.PROMPT_MISMATCH
    assert not _events_of(driver, Transferred)


def test_a_new_epochs_ids_are_greater_and_limits_are_kept() -> None:
    """Ids contain the epoch, so they are never minted twice and sort by age."""
    one = Scheduler(limits=Limits(context_tokens=64), epoch=1, digest=DIGEST)
    two = Scheduler(limits=Limits(context_tokens=64), epoch=2, digest=DIGEST)
    assert one.mint() < one.mint() < two.mint()
    assert len(one.mint()) == len(two.mint())
