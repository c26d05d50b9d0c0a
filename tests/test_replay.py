"""Replay: logs that the cores make are clean, and for every rule one changed event turns it red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from lifecycle.events import (
    Aborted,
    Admitted,
    ByEngine,
    ByScheduler,
    Cause,
    Drained,
    Draining,
    Dropped,
    Entry,
    Event,
    Finished,
    Purpose,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import FLEET, GrantId, PageRange, TokenRange
from lifecycle.replay import replay
from lifecycle.rules import RULES
from tests import handmade
from tests.driver import DECODE, PREFILL, Driver, Sizes

Entries = list[tuple[int, Entry]]
Change = Callable[[Entry], Entry]


def answered() -> Entries:
    """One request that is admitted, handed over, grows, and finishes."""
    driver = Driver(Sizes(pages=16)).pair()
    driver.submit(deadline_ns=10_000)
    return driver.run().log


def cancelled() -> Entries:
    """One request that is cancelled while its writer may still write."""
    driver = Driver(Sizes(pages=16)).pair()
    request = driver.submit()
    driver.run_until(lambda: "Transferred" in driver.events(request))
    driver.cancel(request)
    return driver.run().log


def requeued() -> Entries:
    """Three requests on a small pool: one gives its pages up and is admitted again."""
    driver = Driver(Sizes(pages=8)).pair()
    for _ in range(3):
        driver.submit(new=16)
    return driver.run().log


def changed(entries: Entries, kind: type[Event], change: Change, *, nth: int = 0) -> Entries:
    """The log with its nth event of that kind changed."""
    places = [i for i, (_, entry) in enumerate(entries) if isinstance(entry.event, kind)]
    at = places[nth]
    position, entry = entries[at]
    return [*entries[:at], (position, change(entry)), *entries[at + 1 :]]


def event_with(**changes: Any) -> Change:
    """Change fields of the event."""
    return lambda entry: attrs.evolve(entry, event=attrs.evolve(entry.event, **changes))


def said_by(proposer: ByEngine | ByScheduler) -> Change:
    """Change who says it."""
    return lambda entry: attrs.evolve(entry, proposer=proposer)


def instead(event: Event, proposer: ByEngine | ByScheduler) -> Change:
    """Put another event at this place."""
    return lambda entry: attrs.evolve(entry, event=event, proposer=proposer)


def find(entries: Entries, kind: type[Event], *, nth: int = 0) -> Any:
    """The nth event of that kind."""
    return [e.event for _, e in entries if isinstance(e.event, kind)][nth]


def dropped(entry: Entry) -> Entry:
    """As if this proposal had never taken effect."""
    return instead(handmade.DROPPED, ByScheduler(1))(entry)


def first_page_only(entry: Entry) -> Entry:
    """Only the first of the prompt's pages was written."""
    pages = find(answered(), Transferred).pages
    return event_with(tokens=TokenRange(0, 4), pages=(PageRange(pages[0].first, 1),))(entry)


def cut_off(entries: Entries) -> Entries:
    """The log stops before the answer, and the fleet goes on past every deadline."""
    at = next(i for i, (_, e) in enumerate(entries) if isinstance(e.event, Finished))
    late = Entry(
        FLEET,
        3,
        0,
        ByScheduler(1),
        10_000 + Sizes().settle_ns + 1,
        Draining(DECODE.engine, DECODE.incarnation),
    )
    return [*entries[:at], (at + 1, late)]


def _other_life(entry: Entry) -> Entry:
    assert isinstance(entry.event, Admitted)
    return event_with(decode=attrs.evolve(entry.event.decode, incarnation=2))(entry)


def _other_layout(entry: Entry) -> Entry:
    assert isinstance(entry.event, Admitted)
    return event_with(prefill=attrs.evolve(entry.event.prefill, layout="other"))(entry)


def _other_pages(entry: Entry) -> Entry:
    assert isinstance(entry.event, Transferred)
    first = entry.event.pages[0]
    return event_with(pages=(PageRange(first.first + 1, first.count),))(entry)


def _grown() -> Reserved:
    entries = answered()
    growths = [e.event for _, e in entries if isinstance(e.event, Reserved)]
    return next(r for r in growths if r.purpose is Purpose.GROWTH)


def _growth_at(entries: Entries) -> int:
    reserved = [e.event for _, e in entries if isinstance(e.event, Reserved)]
    return next(i for i, r in enumerate(reserved) if r.purpose is Purpose.GROWTH)


def _late_growth(entries: Entries) -> Entries:
    grant = GrantId(DECODE, 9)
    late = attrs.evolve(_grown(), grant=grant)
    return changed(entries, Released, instead(late, ByEngine(DECODE, 9)), nth=-1)


def _written_again(entries: Entries) -> Entries:
    again = find(entries, Transferred)
    return changed(entries, Verified, instead(again, ByEngine(PREFILL, 9)))


def _released_again(entries: Entries) -> Entries:
    first = find(entries, Released)
    return changed(entries, Released, instead(first, ByEngine(PREFILL, 9)), nth=-1)


MUTATED: dict[str, Callable[[], Entries]] = {
    "one-decision": lambda: changed(answered(), Admitted, said_by(ByEngine(DECODE, 9))),
    "capacity-proved": lambda: changed(answered(), Admitted, event_with(context_tokens=16)),
    "current-attempt": lambda: changed(answered(), Verified, said_by(ByEngine(PREFILL, 9))),
    "written-within-grant": lambda: changed(answered(), Transferred, _other_pages),
    "whole-before-read": lambda: changed(answered(), Transferred, first_page_only),
    "exclusive-before-read": lambda: changed(answered(), Drained, dropped),
    "first-cause-wins": lambda: changed(
        answered(), Released, instead(Aborted(Cause.DEADLINE, "x"), ByScheduler(1)), nth=-1
    ),
    "quiet-after-end": lambda: _late_growth(answered()),
    "drained-before-released": lambda: changed(cancelled(), Drained, dropped),
    "drained-is-final": lambda: _written_again(answered()),
    "time-is-no-proof": lambda: changed(answered(), Drained, said_by(ByScheduler(1))),
    "settled-once": lambda: _released_again(answered()),
    "requeue-keeps-resources-honest": lambda: changed(
        requeued(),
        Requeued,
        lambda e: event_with(tokens_relayed=e.event.tokens_relayed + 1)(e),  # type: ignore[union-attr]  # `changed` gives a Requeued
    ),
    "bounded": lambda: cut_off(answered()),
    "one-owner": lambda: changed(
        answered(),
        Reserved,
        event_with(pages=(PageRange(0, 1),), tokens=TokenRange(12, 16)),
        nth=_growth_at(answered()),
    ),
    "conservation": lambda: changed(
        answered(), Reserved, event_with(tokens=TokenRange(12, 60)), nth=_growth_at(answered())
    ),
    "incarnation-fences": lambda: changed(answered(), Admitted, _other_life),
    "compatible-legs": lambda: changed(answered(), Admitted, _other_layout),
    "unbroken-log": lambda: changed(
        answered(), Verified, lambda entry: attrs.evolve(entry, sequence=entry.sequence + 1)
    ),
    "computed-before-sent": lambda: changed(answered(), Transferred, event_with(step=99)),
    "read-what-was-written": lambda: changed(answered(), Finished, event_with(reads_unchecked=1)),
    "acted-after-logged": lambda: changed(
        answered(), Transferred, event_with(grant=GrantId(DECODE, 9))
    ),
}
"""For every rule: a log of the cores with one event changed (or, for `bounded`, one missing)."""


@pytest.mark.parametrize("make", [answered, cancelled, requeued])
def test_what_the_cores_write_is_clean(make: Callable[[], Entries]) -> None:
    """No rule is broken by the system's own logs, and every request closes."""
    report = replay(make())
    assert report.clean, report.findings
    assert dict(report.phases) == {"closed": report.requests}
    assert report.entries == len(make())
    assert report.evaluations > report.entries
    assert report.rules == len(RULES) == 22


def test_the_logs_that_are_changed_hold_what_they_are_meant_to_show() -> None:
    """The logs hold growth, an abort before its drain, and a second attempt."""
    assert _grown().tokens.start == 12
    names = [type(entry.event) for _, entry in cancelled()]
    assert names.index(Aborted) < names.index(Drained) < len(names) - 1
    assert find(requeued(), Requeued).tokens_relayed > 0
    assert any(e.attempt == 2 and isinstance(e.event, Finished) for _, e in requeued())


def test_every_rule_has_a_changed_log() -> None:
    """The table's keys are the rules' names."""
    assert set(MUTATED) == set(RULES)


@pytest.mark.parametrize("name", MUTATED)
def test_one_changed_event_turns_exactly_that_rule_red(name: str) -> None:
    """The first finding, and the only rule named, is the one that the change breaks."""
    report = replay(MUTATED[name]())
    assert not report.clean
    first = report.findings[0]
    assert first.violation.rule == name
    assert first.violation.message
    if name != "requeue-keeps-resources-honest":
        # Three requests share that log, and what one never gave back the others miss.
        assert {f.violation.rule for f in report.findings} == {name}
    assert (first.entry is None) is (name == "bounded")


def test_a_finding_names_the_position_of_its_entry() -> None:
    """Position and entry of the finding are those of the refused entry."""
    entries = MUTATED["read-what-was-written"]()
    finding = replay(entries).findings[0]
    assert finding.entry is not None
    assert (finding.position, finding.entry) in entries
    assert isinstance(finding.entry.event, Finished)


def test_the_first_violation_of_each_request_is_reported() -> None:
    """A request that broke a rule once is not reported for what follows from it."""
    entries = changed(answered(), Admitted, said_by(ByEngine(DECODE, 9)))
    report = replay(entries)
    assert len(report.findings) == 1
    assert report.findings[0].violation.rule == "one-decision"


def test_a_guard_that_was_taken_away_lets_its_change_through() -> None:
    """Replay without a guard shows that this guard, and no other, refused."""
    entries = MUTATED["computed-before-sent"]()
    assert replay(entries, without=("computed-before-sent/step",)).clean


def test_an_open_request_is_no_finding_before_its_deadline() -> None:
    """A capture may end while requests run: they are bounded as long as time is left."""
    entries = answered()
    at = next(i for i, (_, e) in enumerate(entries) if isinstance(e.event, Finished))
    report = replay(entries[:at])
    assert report.clean
    assert dict(report.phases) == {"decoding": 1}


def test_an_ended_request_that_nobody_settles_is_unbounded() -> None:
    """After the time to settle, and once more, held grants of an ended request are a finding."""
    log = handmade.ended(handmade.Log())
    late = log.state().settle_by_ns + handmade.SETTLE_NS
    draining = Draining(DECODE.engine, DECODE.incarnation)
    log.add(draining, request=FLEET, time_ns=late)
    assert replay(log.entries).clean
    draining = Draining(PREFILL.engine, PREFILL.incarnation)
    log.add(draining, request=FLEET, time_ns=late + 1)
    assert [f.violation.guard for f in replay(log.entries).findings] == ["bounded/closed"]


def test_an_empty_log_is_clean() -> None:
    """Nothing happened, nothing was wrong."""
    report = replay([])
    assert (report.clean, report.entries, report.requests) == (True, 0, 0)


def test_dropped_is_counted_and_harms_nothing() -> None:
    """A recorded drop is an entry like any other."""
    log = handmade.written(handmade.Log()).add(handmade.DROPPED)
    report = replay(log.entries)
    assert report.clean
    assert dict(report.events)[Dropped.__name__] == 1
