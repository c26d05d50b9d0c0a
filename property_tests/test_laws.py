"""Laws of logs: what the cores write is clean, what is changed is refused or harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.effects import Post, VerifyPages
from engine.prefill import Posted
from lifecycle.events import (
    ByEngine,
    ByScheduler,
    Cause,
    Entry,
    Event,
    Failed,
    FenceScope,
    Released,
    Role,
    Verified,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, Party, RequestId, request_id
from lifecycle.reducer import reduce
from lifecycle.replay import replay
from lifecycle.rules import RULES
from lifecycle.state import Phase, RequestState, Violation
from property_tests import strategies
from property_tests.naive import NaiveModel
from tests import handmade
from tests.driver import DECODE, FOREVER_NS, PREFILL, Driver, Pick, Sizes

Entries = list[tuple[int, Entry]]


def picker(numbers: list[int]) -> Pick:
    """Choose by drawn numbers as long as there are some, then first come first served."""
    rest = iter(numbers)
    return lambda enabled: next(rest, 0) % enabled


def failing_posts(numbers: list[int]) -> Callable[[Post], Posted]:
    """The ends of writes: 1 fails, 2 is in doubt, everything else is done."""
    rest = iter(numbers)
    ends = {1: Posted.FAILED, 2: Posted.IN_DOUBT}
    return lambda _post: ends.get(next(rest, 0), Posted.DONE)


def failing_checks(numbers: list[int]) -> Callable[[VerifyPages, Verified], Verified | Failed]:
    """The results of comparing: 1 is another request's page, everything else agrees."""
    rest = iter(numbers)

    def compared(asked: VerifyPages, good: Verified) -> Verified | Failed:
        if next(rest, 0) != 1 or not asked.writes:
            return good
        page = asked.writes[0][2][0].first
        return Failed(Cause.ISOLATION_VIOLATION, "a foreign tag", page, 1, 2)

    return compared


FAULTS = ("cancel", "restart", "lose decode", "lose prefill", "time")


@st.composite
def worlds(draw: st.DrawFn) -> Driver:
    """A small world that was disturbed a few times and has come to rest."""
    picks = st.lists(st.integers(0, 11), max_size=60)
    ends = st.lists(st.sampled_from([0, 0, 0, 0, 1, 2]), max_size=8)
    sizes = Sizes(
        pages=draw(st.sampled_from([16, 8, 5])),
        attempts_max=draw(st.sampled_from([4, 2, 1])),
        fence_scope=draw(st.sampled_from(FenceScope)),
    )
    driver = Driver(sizes, pick=picker(draw(picks))).pair()
    driver.posted = failing_posts(draw(ends))
    driver.compared = failing_checks(draw(ends))
    wanted = st.tuples(st.integers(1, 11), st.integers(1, 8), st.sampled_from("ab"))
    for prompt, new, tenant in draw(st.lists(wanted, min_size=1, max_size=5)):
        driver.submit(prompt, new, tenant=tenant)
    for fault in draw(st.lists(st.sampled_from(FAULTS), max_size=3)):
        for _ in range(draw(st.integers(0, 80))):
            driver.advance()
        disturb(driver, fault, draw(st.integers(1, 5)))
    driver.run()
    for now_ns in (driver.now_ns + sizes.settle_ns, FOREVER_NS, 2 * FOREVER_NS):
        driver.tick(now_ns)
        driver.run()
    return driver


def disturb(driver: Driver, fault: str, number: int) -> None:
    """Let one bad thing happen."""
    if fault == "cancel":
        name = request_id(epoch=1, serial=number)
        driver.cancel(name)
    elif fault == "restart":
        driver.restart()
    elif fault == "time":
        driver.tick(driver.now_ns + driver.sizes.settle_ns)
    else:
        first, role = (DECODE, Role.DECODE) if fault == "lose decode" else (PREFILL, Role.PREFILL)
        old = next(party for party in driver.cores if party.engine == first.engine)
        driver.kill(old)
        driver.join(role, Party(old.engine, old.incarnation + 1, 0))


@given(worlds())
def test_what_the_cores_write_is_clean_and_everything_comes_home(driver: Driver) -> None:
    """Whatever the interleaving and the faults: no rule is broken, every request closes."""
    report = replay(driver.log)
    assert report.clean, report.findings
    assert driver.scheduler.idle
    model = NaiveModel()
    for _, entry in driver.log:
        model.take(entry)
    for party, core in driver.cores.items():
        account = driver.scheduler.log.ledger[party]
        assert not account.booked
        assert account.free_pages == core.allocator.free
        assert not core.outstanding
        assert not core.jobs


@given(worlds())
def test_a_fresh_history_of_the_same_entries_is_equal(driver: Driver) -> None:
    """Replay gives the states that the scheduler holds, and the same ones every time."""
    one, two = History(), History()
    for _, entry in driver.log:
        assert one.apply(entry) is None
        assert two.apply(entry) is None
    assert (one.requests, one.fleet, one.ledger) == (two.requests, two.fleet, two.ledger)
    live = driver.scheduler.log
    assert (one.fleet, one.ledger) == (live.fleet, live.ledger)
    for request, state in live.requests.items():
        assert one.requests[request] == state


def changed(entries: Entries, how: str, at: int, other: int) -> Entries:
    """Drop, repeat or swap entries."""
    result = list(entries)
    if how == "drop":
        del result[at]
    elif how == "repeat":
        result.insert(other, result[at])
    else:
        result[at], result[other] = result[other], result[at]
    return result


def judge(entries: Entries, *, hide: bool, without: tuple[str, ...] = ()) -> int:
    """Take changed entries in; count refusals, and let the second model see what is accepted.

    With `hide` every entry gets the number that is next, as if nothing had been changed; so what
    follows a refusal is judged for itself.
    """
    history, model = History(without=without), NaiveModel()
    refused = 0
    for _, original in entries:
        state = history.state(original.request)
        sequence = history.fleet.sequence if original.request == FLEET else state.sequence
        entry = attrs.evolve(original, sequence=sequence) if hide else original
        violation = history.apply(entry)
        if violation is None:
            model.take(entry)
        else:
            refused += 1
            assert violation.rule in RULES
            assert history.state(entry.request) == state
    return refused


HOW = ("drop", "repeat", "swap")


@given(worlds(), st.sampled_from(HOW), st.booleans(), st.data())
def test_a_changed_log_is_refused_by_name_or_harmless(
    driver: Driver, how: str, hide: bool, data: st.DataObject
) -> None:
    """One dropped, repeated or swapped entry, with or without new numbers: never an exception.

    Every refusal names a rule, changes nothing, and what is accepted passes a second model.
    """
    places = st.integers(0, len(driver.log) - 1)
    entries = changed(driver.log, how, data.draw(places), data.draw(places))
    judge(entries, hide=hide)
    for finding in replay(entries).findings:
        assert finding.violation.rule in RULES


def small_logs() -> tuple[Entries, ...]:
    """An answer with growth, an abort before the drain, and a requeue with two requests."""
    answered = Driver(Sizes(pages=16)).pair()
    answered.submit()
    cancelled = Driver(Sizes(pages=16)).pair()
    request = cancelled.submit()
    cancelled.run_until(lambda: "Transferred" in cancelled.events(request))
    cancelled.cancel(request)
    requeued = Driver(Sizes(pages=8)).pair()
    for _ in range(2):
        requeued.submit(new=16)
    return tuple(driver.run().log for driver in (answered, cancelled, requeued))


def every_change(entries: Entries) -> Iterator[Entries]:
    """The log with each entry dropped, and with each two neighbours or any two swapped."""
    for at in range(len(entries)):
        yield changed(entries, "drop", at, at)
        for other in range(len(entries)):
            if at < other:
                yield changed(entries, "swap", at, other)
            yield changed(entries, "repeat", at, other)


@pytest.mark.parametrize("which", range(3))
def test_every_single_change_of_a_small_log_is_refused_or_harmless(which: int) -> None:
    """All drops, repeats and swaps of three small logs, with new numbers."""
    refused = [judge(entries, hide=True) for entries in every_change(small_logs()[which])]
    assert len([count for count in refused if count]) > len(refused) // 2


# Guards without which some single change of a small log does harm.
# Where two stand together either of them is enough against these changes.
NEEDED = (
    ("drained-before-released/parties",),
    ("exclusive-before-read/drained",),
    ("one-decision/table",),
    ("settled-once/released",),
    ("whole-before-read/covered", "read-what-was-written/verified"),
)


def harm(without: tuple[str, ...]) -> str:
    """The first harm that a single change does when these guards are missing, or nothing."""
    for entries in small_logs():
        for mutant in every_change(entries):
            try:
                judge(mutant, hide=True, without=without)
            except AssertionError as error:
                return str(error) or "harm"
    return ""


@pytest.mark.parametrize("guards", NEEDED, ids=lambda guards: guards[0])
def test_without_a_guard_some_change_does_harm(guards: tuple[str, ...]) -> None:
    """The second model notices a missing guard, so agreeing with it means something."""
    assert harm(guards)


BY = st.one_of(
    st.builds(ByEngine, st.sampled_from([PREFILL, DECODE, handmade.STRANGER]), st.just(1)),
    st.builds(ByScheduler, st.integers(1, 2)),
)


@given(
    st.sampled_from(Phase),
    st.one_of(strategies.events(), st.sampled_from(list(handmade.USUAL.values()))),
    BY,
    st.integers(0, 3),
    st.sampled_from([handmade.ONE, handmade.TWO, FLEET]),
)
def test_reduce_is_total(
    phase: Phase, event: Event, by: ByEngine | ByScheduler, attempt: int, request: RequestId
) -> None:
    """Any event in any phase yields a state or a named violation, and a violation changes nothing."""
    log = handmade.PHASES[phase](handmade.Log())
    entry = log.entry(event, by=by, attempt=attempt, request=request)
    state = log.state()
    result = reduce(state, entry)
    assert isinstance(result, RequestState | Violation)
    if isinstance(result, Violation):
        assert result.rule in RULES
    assert state == log.state()
    before = log.history.copy()
    violation = log.history.apply(entry)
    if violation is not None:
        assert violation.rule in RULES
        assert log.history.requests == before.requests
        assert log.history.ledger == before.ledger
        assert log.history.fleet == before.fleet


@given(st.lists(strategies.entries(), max_size=12))
@example([])
def test_replay_is_total(entries: list[Entry]) -> None:
    """Any sequence of well-formed entries gives a report, and its findings name rules."""
    report = replay(list(enumerate(entries, start=1)))
    assert report.entries == len(entries)
    for finding in report.findings:
        assert finding.violation.rule in RULES


def test_the_naive_model_can_refuse() -> None:
    """The second model is no rubber stamp: it refuses a release before its proof."""
    log = handmade.ended(handmade.Log())
    model = NaiveModel()
    for _, entry in log.entries:
        model.take(entry)
    with pytest.raises(AssertionError, match="given back while somebody may write"):
        model.take(log.entry(Released(handmade.DESTINATION)))
