"""A whole log reduced: every request, the fleet and the pages, one entry at a time.

Owns: how an entry changes requests, fleet and ledger together.
Must not know: who asks; the scheduler, the engines, the worlds and `replay` use this very class.

An engine's copy holds only the requests that concern it, so it counts only its own pages and is
built with `crossguards=False`: what was published was judged with all the pages in view.
"""

from __future__ import annotations

from collections.abc import Iterable

from lifecycle.crossguards import CROSS_GUARDS, CrossGuard, View
from lifecycle.events import (
    FLEET_EVENTS,
    REQUEST_EVENTS,
    Aborted,
    Admitted,
    Attached,
    Drained,
    Dropped,
    Entry,
    Event,
    Finished,
    Lost,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.fleet import FleetState, reduce_fleet
from lifecycle.ids import FLEET, RequestId, ranks_of
from lifecycle.ledger import Account, Ledger
from lifecycle.reducer import ALL_GUARDS, Reducer, fold
from lifecycle.state import RequestState, Violation


def cross_by_event(guards: Iterable[CrossGuard]) -> dict[type[Event], tuple[CrossGuard, ...]]:
    """Index cross guards by the events that they look at."""
    listed = tuple(guards)
    return {kind: tuple(g for g in listed if kind in g.events) for kind in REQUEST_EVENTS}


ALL_CROSS = cross_by_event(CROSS_GUARDS)
ATTEMPT_ENDS = (Finished, Aborted, Requeued)
SETTLING = (Released, Quarantined)
UNACCOUNTED = frozenset({Rejected, Transferred, Drained, Verified, Dropped})
"""Events that move no page."""


class History:
    """The reduced log. `apply` changes it; an illegal entry changes nothing."""

    def __init__(self, *, without: Iterable[str] = (), crossguards: bool = True) -> None:
        """Begin empty; `without` takes guards away by name, for searches that must then find it."""
        gone = frozenset(without)
        self.requests: dict[RequestId, RequestState] = {}
        self.fleet = FleetState()
        self.ledger: Ledger = {}
        self.time_ns = 0
        self.evaluated = 0
        self._reducer = Reducer.without(gone) if gone else ALL_GUARDS
        self._cross = (
            cross_by_event(g for g in CROSS_GUARDS if g.name not in gone) if gone else ALL_CROSS
        )
        self.crossguards = crossguards
        self._view = View(self.fleet, self.ledger)

    def copy(self) -> History:
        """An independent copy; states are immutable, so this is shallow."""
        other = History.__new__(History)
        other.requests = dict(self.requests)
        other.fleet = self.fleet
        other.ledger = dict(self.ledger)
        other.time_ns = self.time_ns
        other.evaluated = self.evaluated
        other._reducer = self._reducer  # noqa: SLF001 - a copy of its own class
        other._cross = self._cross  # noqa: SLF001 - a copy of its own class
        other.crossguards = self.crossguards
        other._view = View(other.fleet, other.ledger)  # noqa: SLF001 - a copy of its own class
        return other

    def state(self, request: RequestId) -> RequestState:
        """The request's state; NEW when the log does not know it."""
        known = self.requests.get(request)
        return RequestState(request) if known is None else known

    def check(self, entry: Entry) -> Violation | None:
        """Say which rule the entry would break, or None; changes nothing."""
        if entry.request == FLEET:
            result = reduce_fleet(self.fleet, entry)
            return result if isinstance(result, Violation) else None
        return self._check(self.state(entry.request), entry)

    def _check(self, state: RequestState, entry: Entry) -> Violation | None:
        if self.crossguards and entry.time_ns < self.time_ns:
            message = f"time {entry.time_ns} ns is before {self.time_ns} ns"
            return Violation(
                "unbroken-log", "unbroken-log/total", message, entry.request, entry.sequence
            )
        violation = self._reducer.check(state, entry)
        if violation is not None:
            return violation
        event = entry.event
        kind = type(event)
        self.evaluated += self._reducer.asked[kind]
        if not self.crossguards:
            return None
        view = self._view
        if view.fleet is not self.fleet or view.ledger is not self.ledger:
            view = self._view = View(self.fleet, self.ledger)
        guards = self._cross[kind]
        for guard in guards:
            check = guard.check
            found = check(view, state, entry, event)
            if found is not None:
                self.evaluated += guards.index(guard) + 1
                return Violation(guard.rule, guard.name, found, entry.request, entry.sequence)
        self.evaluated += len(guards)
        return None

    def apply(self, entry: Entry) -> Violation | None:
        """Take the entry in, or return the violation and stay as it was."""
        if entry.request == FLEET:
            violation = self.check(entry)
            if violation is None:
                self.take(entry)
            return violation
        before = self.state(entry.request)
        violation = self._check(before, entry)
        if violation is None:
            self._take(before, entry)
        return violation

    def take(self, entry: Entry) -> None:
        """Take in an entry that was found legal, without asking again."""
        if isinstance(entry.event, FLEET_EVENTS):
            self.time_ns = max(self.time_ns, entry.time_ns)
            self._apply_fleet(entry, entry.event)
        else:
            self._take(self.state(entry.request), entry)

    def _take(self, before: RequestState, entry: Entry) -> None:
        self.time_ns = max(self.time_ns, entry.time_ns)
        self.requests[entry.request] = fold(before, entry)
        if type(entry.event) not in UNACCOUNTED:
            self._account(before, entry)

    def _apply_fleet(self, entry: Entry, event: Event) -> None:
        result = reduce_fleet(self.fleet, entry)
        if isinstance(result, Violation):
            raise TypeError(result.message)
        self.fleet = result
        if isinstance(event, Attached):
            for party in ranks_of(event.engine, event.incarnation, event.ranks):
                self.ledger[party] = Account(event.pages, event.slots)
        elif isinstance(event, Lost):
            for party in tuple(self.ledger):
                if (party.engine, party.incarnation) == (event.engine, event.incarnation):
                    del self.ledger[party]

    def _account(self, before: RequestState, entry: Entry) -> None:
        event = entry.event
        request = entry.request
        ledger = self.ledger
        if isinstance(event, Reserved):
            owner = event.grant.owner
            account = ledger.get(owner)
            if account is not None:
                ledger[owner] = account.hold(request, event.pages, event.grant.serial)
        elif isinstance(event, SETTLING):
            owner = event.grant.owner
            account, grant = ledger.get(owner), before.grant(event.grant)
            if account is not None and grant is not None:
                changed = account.free if isinstance(event, Released) else account.quarantine
                ledger[owner] = changed(grant.reserved.pages)
        elif isinstance(event, Admitted):
            for leg in (event.prefill, event.decode):
                for party in leg.parties():
                    account = ledger.get(party)
                    if account is not None:
                        ledger[party] = account.book(request, leg.pages_booked)
        elif isinstance(event, ATTEMPT_ENDS):
            for party, account in ledger.items():
                # A key that is there already may be set while the items are looked at.
                ledger[party] = account.unbook(request)
