"""The tally of a log: every metric as a fold over its entries, one entry at a time.

Owns: how an entry changes the counts; the figures of pages and phases, which `History` reduces.
Must not know: stores, clocks, formats; a captured log gives the same tally as the server that
wrote it.

Requests are reduced by the same `fold` that everything else uses, without asking the guards again:
only entries that were found legal are noted.  A request is forgotten once nothing of it can change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import attrs

from lifecycle import tally_metrics as metrics
from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    Cause,
    Drained,
    Draining,
    Dropped,
    Entry,
    Event,
    Finished,
    Lost,
    QuarantineCause,
    Quarantined,
    Recovered,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Resumed,
    Role,
    Transferred,
    Verified,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, GrantId, Party, RequestId, count_pages
from lifecycle.state import TERMINAL, Phase, RequestState, Settlement
from lifecycle.tally_metrics import Distribution, Family, Labels, Metric, Value

OPENING = (Admitted, Rejected)


@attrs.frozen
class Kept:
    """A grant in quarantine: whose it was, how many pages, and why."""

    request: RequestId
    pages: int
    cause: QuarantineCause


@attrs.define
class Times:
    """When a request was first admitted, when its present phase began, and how far its hand-off is.

    `marks` are when the attempt was admitted, and when its last destination grant, write and
    proof came; 0 for what has not come.
    """

    first_ns: int
    since_ns: int
    marks: list[int] = attrs.Factory(lambda: [0, 0, 0, 0])


class Tally:
    """Counts of one log; `note` takes entries in their order, `families` shows the counts."""

    def __init__(self, start: History | None = None) -> None:
        """Begin with nothing, or with a log that was reduced elsewhere up to here.

        What happened before `start` is not counted; durations of what was open then are unknown.
        """
        self._times: dict[RequestId, Times] = {}
        self._history = History(crossguards=False) if start is None else start.copy()
        self.quarantine: dict[GrantId, Kept] = dict(kept_in(self._history))
        for request in [r for r, s in self._history.requests.items() if s.phase in TERMINAL]:
            self._forget(request)
        self._values: dict[str, dict[Labels, Value]] = {
            metric.name: metric.zeros() for metric in metrics.METRICS
        }

    # --- folding ------------------------------------------------------------------------------

    def note(self, entry: Entry) -> None:
        """Take in the next entry of the log."""
        self._add(metrics.EVENTS, (type(entry.event).__name__,))
        if entry.request == FLEET:
            self._history.take(entry)
            self._count(entry, entry.event, RequestState(FLEET))
            return
        before = self._history.state(entry.request)
        if before.phase is Phase.NEW and not isinstance(entry.event, OPENING):
            # It says that something late changed nothing, of a request that was forgotten.
            self._count(entry, entry.event, before)
            return
        self._history.take(entry)
        after = self._history.requests[entry.request]
        self._time(entry, before.phase, after.phase)
        self._count(entry, entry.event, before)
        if after.phase in TERMINAL:
            self._forget(entry.request)

    def _count(self, entry: Entry, event: Event, before: RequestState) -> None:
        match event:
            case Admitted() | Rejected() | Finished() | Aborted() | Requeued():
                self._count_course(entry, event, before)
            case Reserved() | Transferred() | Drained() | Released() | Quarantined():
                self._count_grant(entry, event, before)
            case Verified():
                self._observe_handoff(entry)
                self._add(metrics.VERIFIED_PAGES, by=event.pages)
                self._add(metrics.VERIFIED_HEADERS, by=event.headers_checked)
                self._add(metrics.VERIFIED_DIGESTS, by=event.digests_checked)
            case Dropped():
                self._add(metrics.DROPPED_PROPOSALS, (event.rule,), by=event.count)
            case Attached():
                self._add(metrics.ATTACHMENTS, (event.role.value,))
            case Lost():
                self._add(metrics.LOSSES, (event.cause.value,))
                self._leave(event)
            case Recovered():
                self._add(metrics.RECOVERIES, (event.proof.value,))
            case Draining() | Resumed():
                pass
            case _:
                assert_never(event)

    def _count_course(
        self,
        entry: Entry,
        event: Admitted | Rejected | Finished | Aborted | Requeued,
        before: RequestState,
    ) -> None:
        match event:
            case Admitted():
                again = before.phase is not Phase.NEW
                self._add(metrics.ATTEMPTS, ("again" if again else "first",))
                if not again:
                    self._add(metrics.PROMPT_TOKENS, by=event.prompt_tokens)
            case Rejected():
                self._add(metrics.REQUESTS, ("rejected", event.code.value))
            case Finished():
                self._add(metrics.REQUESTS, ("finished", event.reason.value))
                self._add(metrics.NEW_TOKENS, by=before.relayed + event.tokens)
                self._add(metrics.READS_CHECKED, by=event.reads_checked)
                self._add(metrics.READS_UNCHECKED, by=event.reads_unchecked)
                self._end(entry, "finished")
                times = self._times.get(entry.request)
                if times is not None and not before.relayed:
                    # Another machine's clock may be behind ours.
                    waited = max(0, event.first_token_ns - times.first_ns)
                    self._observe(metrics.FIRST_TOKEN_SECONDS, (), waited)
            case Aborted():
                self._add(metrics.REQUESTS, ("aborted", event.cause.value))
                if event.cause is Cause.ISOLATION_VIOLATION:
                    self._add(metrics.ISOLATION_VIOLATIONS)
                self._end(entry, "aborted")
            case Requeued():
                self._add(metrics.REQUEUES, (event.cause.value,))
            case _:
                assert_never(event)

    def _count_grant(
        self,
        entry: Entry,
        event: Reserved | Transferred | Drained | Released | Quarantined,
        before: RequestState,
    ) -> None:
        match event:
            case Reserved():
                purpose = (event.purpose.value,)
                self._add(metrics.GRANTS, purpose)
                self._add(metrics.RESERVED_PAGES, purpose, by=count_pages(event.pages))
                if event.parties:
                    self._mark(entry, 1)
            case Transferred():
                self._add(metrics.TRANSFERS)
                self._add(metrics.TRANSFERRED_BYTES, by=event.size_bytes)
                self._mark(entry, 2)
            case Drained():
                self._add(metrics.DRAINS, (event.proof.value,))
                if before.phase is Phase.ADMITTED and _of_this_attempt(before, event.grant):
                    self._mark(entry, 3)
            case Released() | Quarantined():
                grant = before.grant(event.grant)
                pages = 0 if grant is None else count_pages(grant.reserved.pages)
                if isinstance(event, Released):
                    self._add(metrics.RELEASED_PAGES, by=pages)
                    self.quarantine.pop(event.grant, None)
                    return
                self._add(metrics.QUARANTINED_PAGES, (event.cause.value,), by=pages)
                if grant is not None and event.grant.owner in self._history.ledger:
                    self.quarantine[event.grant] = Kept(before.request, pages, event.cause)
            case _:
                assert_never(event)

    def _leave(self, event: Lost) -> None:
        """The life's pages are gone with its memory."""
        life = (event.engine, event.incarnation)
        gone = [g for g in self.quarantine if (g.owner.engine, g.owner.incarnation) == life]
        for name in gone:
            request = self.quarantine.pop(name).request
            if self._history.state(request).phase in TERMINAL:
                self._forget(request)

    def _time(self, entry: Entry, before: Phase, after: Phase) -> None:
        if before is after:
            return
        now_ns = entry.time_ns
        if before is Phase.NEW:
            self._times[entry.request] = Times(now_ns, now_ns)
        times = self._times.get(entry.request)
        if times is None:
            return
        if after is Phase.ADMITTED:
            times.marks = [now_ns, 0, 0, 0]
        if before in metrics.TIMED:
            self._observe(metrics.PHASE_SECONDS, (before.value,), now_ns - times.since_ns)
        times.since_ns = now_ns

    def _mark(self, entry: Entry, stage: int) -> None:
        times = self._times.get(entry.request)
        if times is not None:
            times.marks[stage] = entry.time_ns

    def _observe_handoff(self, entry: Entry) -> None:
        """A stage of which there is no event, as a prompt without anything to write, takes 0."""
        times = self._times.get(entry.request)
        if times is None or not times.marks[0]:
            return
        *marks, reached = *times.marks[1:], times.marks[0]
        for stage, mark in zip(metrics.STAGES, [*marks, entry.time_ns], strict=True):
            at = max(reached, mark)
            self._observe(metrics.HANDOFF_SECONDS, (stage,), at - reached)
            reached = at

    def _end(self, entry: Entry, outcome: str) -> None:
        times = self._times.get(entry.request)
        if times is not None:
            self._observe(metrics.REQUEST_SECONDS, (outcome,), entry.time_ns - times.first_ns)

    def _forget(self, request: RequestId) -> None:
        """Nothing of a closed request can change, unless pages of it may still come home."""
        self._times.pop(request, None)
        state = self._history.state(request)
        kept = (g for g in state.grants if g.settlement is Settlement.QUARANTINED)
        if not any(grant.id in self.quarantine for grant in kept):
            self._history.requests.pop(request, None)

    def _add(self, metric: Metric, labels: Labels = (), *, by: int = 1) -> None:
        values = self._values[metric.name]
        known = values.get(labels, 0)
        assert isinstance(known, int)
        values[labels] = known + by

    def _observe(self, metric: Metric, labels: Labels, duration_ns: int) -> None:
        values = self._values[metric.name]
        known = values.get(labels, Distribution())
        assert isinstance(known, Distribution)
        values[labels] = known.with_one(max(0, duration_ns))

    # --- showing ------------------------------------------------------------------------------

    def families(self) -> tuple[Family, ...]:
        """Every metric with its values now; nothing of it changes later."""
        levels = {**self._levels(), **self._pages()}
        return tuple(
            Family(metric, levels.get(metric.name) or dict(self._values[metric.name]))
            for metric in metrics.METRICS
        )

    def quarantined(self, party: Party) -> dict[QuarantineCause, int]:
        """Pages of that rank which are out of circulation, by cause."""
        found = dict.fromkeys(QuarantineCause, 0)
        for name, kept in self.quarantine.items():
            if name.owner == party:
                found[kept.cause] += kept.pages
        return found

    def _levels(self) -> dict[str, dict[Labels, Value]]:
        """What moves up and down, besides pages."""
        phases = metrics.OPEN_REQUESTS.zeros()
        for state in self._history.requests.values():
            if state.phase in metrics.TIMED:
                phases[state.phase.value,] = _plain(phases[state.phase.value,]) + 1
        engines = metrics.ENGINES.zeros()
        for life in self._history.fleet.alive():
            labels = (life.attached.role.value, "draining" if life.draining else "attached")
            engines[labels] = _plain(engines[labels]) + 1
        return {
            metrics.OPEN_REQUESTS.name: phases,
            metrics.ENGINES.name: engines,
            metrics.EPOCH.name: {(): self._history.fleet.epoch},
        }

    def _pages(self) -> dict[str, dict[Labels, Value]]:
        """Pages and slots of every rank that lives."""
        pages: dict[Labels, Value] = {}
        quarantine: dict[Labels, Value] = {}
        slots: dict[Labels, Value] = {}
        roles = {
            (life.attached.engine, life.attached.incarnation): life.attached.role
            for life in self._history.fleet.alive()
        }
        for party, account in self._history.ledger.items():
            named = _named(party, roles[party.engine, party.incarnation])
            pages[*named, "free"] = account.free_pages
            pages[*named, "booked"] = account.booked_pages
            pages[*named, "held"] = account.held_pages
            pages[*named, "quarantined"] = account.quarantined_pages
            for cause, count in self.quarantined(party).items():
                quarantine[*named, cause.value] = count
            slots[*named, "used"] = len(account.booked)
            slots[*named, "free"] = account.slots - len(account.booked)
        return {
            metrics.ENGINE_PAGES.name: pages,
            metrics.QUARANTINE_PAGES.name: quarantine,
            metrics.ENGINE_SLOTS.name: slots,
        }


def _of_this_attempt(state: RequestState, name: GrantId) -> bool:
    grant = state.grant(name)
    return grant is not None and grant.attempt == state.attempt


def kept_in(history: History) -> Iterator[tuple[GrantId, Kept]]:
    """The grants in quarantine whose owners live."""
    for state in history.requests.values():
        for grant in state.grants:
            if grant.quarantine is not None and grant.settlement is Settlement.QUARANTINED:
                pages = count_pages(grant.reserved.pages)
                if grant.id.owner in history.ledger:
                    yield grant.id, Kept(state.request, pages, grant.quarantine)


def _named(party: Party, role: Role) -> Labels:
    return (party.engine, str(party.incarnation), str(party.rank), role.value)


def _plain(value: Value) -> int:
    assert isinstance(value, int)
    return value
