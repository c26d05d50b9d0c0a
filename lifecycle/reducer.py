"""`reduce`: the only place that makes a request's state.

Owns: the order in which guards and table are asked, and how each event changes the state.
Must not know: other requests; a clock; who asks.

`reduce` is total and pure: every entry yields the next state, or a named violation, and a
violation leaves the state as it was.
Constructors are called directly, because `attrs.evolve` costs several times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from lifecycle.events import (
    REQUEST_EVENTS,
    Aborted,
    Admitted,
    ByEngine,
    Drained,
    Entry,
    Event,
    Finished,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
)
from lifecycle.guards import EARLY, LATE, TABLE_PLACE, Guard
from lifecycle.phases import TABLE, refusal, settled
from lifecycle.state import (
    LIVE,
    QUARANTINED,
    RELEASED,
    Grant,
    RequestState,
    Violation,
    Written,
)

# These are looked at once an entry, and a union of types would be made again each time.
_KINDS = frozenset(REQUEST_EVENTS)
_OUTCOMES = (Rejected, Finished, Aborted)
_ENDS = frozenset({Finished, Aborted, Requeued})


def guards_by_event(guards: Iterable[Guard]) -> dict[type[Event], tuple[Guard, ...]]:
    """Index guards by the events that they look at, in their own order."""
    listed = tuple(guards)
    return {kind: tuple(g for g in listed if kind in g.events) for kind in REQUEST_EVENTS}


@attrs.frozen
class Reducer:
    """The guards in force; `reduce` uses them all, a search may take one away."""

    early: dict[type[Event], tuple[Guard, ...]]
    late: dict[type[Event], tuple[Guard, ...]]
    table: bool = True
    asked: dict[type[Event], int] = attrs.field(init=False)
    """How many conditions a legal event met, the table among them."""

    @asked.default
    def _asked(self) -> dict[type[Event], int]:
        return {kind: len(early) + len(self.late[kind]) + 1 for kind, early in self.early.items()}

    @classmethod
    def without(cls, names: Iterable[str] = ()) -> Reducer:
        """All guards but those of these names (`TABLE_PLACE` takes the table's refusals away)."""
        gone = frozenset(names)
        return cls(
            early=guards_by_event(g for g in EARLY if g.name not in gone),
            late=guards_by_event(g for g in LATE if g.name not in gone),
            table=TABLE_PLACE not in gone,
        )

    def check(self, state: RequestState, entry: Entry) -> Violation | None:
        """Say which rule the entry would break, or None."""
        event = entry.event
        kind = type(event)
        early = self.early.get(kind)
        if early is None:
            return _violation(
                "one-decision", TABLE_PLACE, f"{kind.__name__} is no event of a request", entry
            )
        # A guard's function is a field and no method: called by itself it is found faster.
        for guard in early:
            check = guard.check
            message = check(state, entry, event)
            if message is not None:
                return _violation(guard.rule, guard.name, message, entry)
        if self.table and kind not in TABLE[state.phase]:
            message = f"{kind.__name__} is not legal in phase {state.phase.value}"
            return _violation(refusal(state.phase, kind), TABLE_PLACE, message, entry)
        for guard in self.late[kind]:
            check = guard.check
            message = check(state, entry, event)
            if message is not None:
                return _violation(guard.rule, guard.name, message, entry)
        return None

    def reduce(self, state: RequestState, entry: Entry) -> RequestState | Violation:
        """Return the state after the entry, or the violation that left the state unchanged."""
        violation = self.check(state, entry)
        return violation if violation is not None else fold(state, entry)


def _violation(rule: str, guard: str, message: str, entry: Entry) -> Violation:
    return Violation(rule, guard, message, entry.request, entry.sequence)


ALL_GUARDS = Reducer.without()


def reduce(state: RequestState, entry: Entry) -> RequestState | Violation:
    """Return the state after the entry under every guard, or the violation."""
    return ALL_GUARDS.reduce(state, entry)


def _written(grant: Grant, entry: Entry, event: Transferred) -> Grant:
    if not isinstance(entry.proposer, ByEngine):
        return grant
    written = (*grant.written, Written(entry.proposer.party, event))
    return Grant(
        grant.reserved, grant.attempt, grant.drained, written, grant.settlement, grant.quarantine
    )


def _drained(grant: Grant, _entry: Entry, event: Drained) -> Grant:
    drained = (*grant.drained, event.party)
    return Grant(
        grant.reserved, grant.attempt, drained, grant.written, grant.settlement, grant.quarantine
    )


def _released(grant: Grant, _entry: Entry, _event: Released) -> Grant:
    return Grant(
        grant.reserved, grant.attempt, grant.drained, grant.written, RELEASED, grant.quarantine
    )


def _quarantined(grant: Grant, _entry: Entry, event: Quarantined) -> Grant:
    return Grant(
        grant.reserved, grant.attempt, grant.drained, grant.written, QUARANTINED, event.cause
    )


ON_GRANT: dict[type[Event], Callable[[Grant, Entry, Any], Grant]] = {
    Transferred: _written,
    Drained: _drained,
    Released: _released,
    Quarantined: _quarantined,
}
"""What each event that names a grant makes of it; `Reserved` makes one."""


def _grants(state: RequestState, entry: Entry, event: Any) -> tuple[Grant, ...]:
    known = state.grant(event.grant)
    if known is None:
        return state.grants
    changed = ON_GRANT[type(event)](known, entry, event)
    return tuple([changed if grant is known else grant for grant in state.grants])


def fold(state: RequestState, entry: Entry) -> RequestState:
    """Return the state after an entry that was found legal."""
    event = entry.event
    kind = type(event)
    if kind not in _KINDS:
        msg = f"{kind.__name__} is no event of a request"
        raise TypeError(msg)
    attempt, grants, outcome = state.attempt, state.grants, state.outcome
    first, admitted, relayed = state.first, state.admitted, state.relayed
    deadline, settle_by = state.deadline_ns, state.settle_by_ns
    if kind in ON_GRANT:
        grants = _grants(state, entry, event)
    elif isinstance(event, Reserved):
        grants = (*grants, Grant(event, attempt))
    elif isinstance(event, Admitted):
        attempt, admitted, deadline, settle_by = entry.attempt, event, event.deadline_ns, 0
        first = first or event
    elif isinstance(event, _OUTCOMES):
        outcome = event
    elif isinstance(event, Requeued):
        relayed = event.tokens_relayed
    if kind in _ENDS and state.phase in LIVE and admitted:
        settle_by = entry.time_ns + admitted.settle_ns
    phase = state.phase
    options = TABLE[phase].get(kind)
    if options is not None:
        phase = options[0] if len(options) == 1 else settled(grants)
    return RequestState(
        entry.request,
        phase,
        state.sequence + 1,
        attempt,
        entry.time_ns,
        deadline,
        settle_by,
        first,
        admitted,
        grants,
        outcome,
        relayed,
    )
