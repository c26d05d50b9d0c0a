"""`reduce`: the only place that makes a request's state.

Owns: the order in which guards and table are asked, and how each event changes the state.
Must not know: other requests; a clock; who asks.

`reduce` is total and pure: every entry yields the next state, or a named violation, and a
violation leaves the state as it was.
Constructors are called directly, because `attrs.evolve` costs several times as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import attrs

from lifecycle.events import (
    REQUEST_EVENTS,
    Aborted,
    Admitted,
    ByEngine,
    Drained,
    Dropped,
    Entry,
    Event,
    Finished,
    Quarantined,
    Rejected,
    Released,
    RequestEvent,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.guards import EARLY, LATE, TABLE_PLACE, Guard
from lifecycle.phases import TABLE, refusal, settled
from lifecycle.state import LIVE, Grant, RequestState, Settlement, Violation, Written

# These are looked at once an entry, and a union of types would be made again each time.
_OUTCOMES = (Rejected, Finished, Aborted)
_ENDS = frozenset({Finished, Aborted, Requeued})
_ON_GRANTS = frozenset({Reserved, Transferred, Drained, Released, Quarantined})


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
        for guard in early:
            message = guard.check(state, entry, event)
            if message is not None:
                return _violation(guard.rule, guard.name, message, entry)
        if self.table and kind not in TABLE[state.phase]:
            message = f"{kind.__name__} is not legal in phase {state.phase.value}"
            return _violation(refusal(state.phase, kind), TABLE_PLACE, message, entry)
        for guard in self.late[kind]:
            message = guard.check(state, entry, event)
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


def _replace(grants: tuple[Grant, ...], old: Grant, changed: Grant) -> tuple[Grant, ...]:
    return tuple([changed if g is old else g for g in grants])


def _settle(
    state: RequestState, event: Released | Quarantined, how: Settlement
) -> tuple[Grant, ...]:
    grant = state.grant(event.grant)
    if grant is None:
        return state.grants
    cause = event.cause if isinstance(event, Quarantined) else grant.quarantine
    changed = Grant(grant.reserved, grant.attempt, grant.drained, grant.written, how, cause)
    return _replace(state.grants, grant, changed)


def _drain(state: RequestState, event: Drained) -> tuple[Grant, ...]:
    grant = state.grant(event.grant)
    if grant is None:
        return state.grants
    drained = (*grant.drained, event.party)
    changed = Grant(
        grant.reserved, grant.attempt, drained, grant.written, grant.settlement, grant.quarantine
    )
    return _replace(state.grants, grant, changed)


def _write(state: RequestState, entry: Entry, event: Transferred) -> tuple[Grant, ...]:
    grant = state.grant(event.grant)
    if grant is None or not isinstance(entry.proposer, ByEngine):
        return state.grants
    written = (*grant.written, Written(entry.proposer.party, event))
    changed = Grant(grant.reserved, grant.attempt, grant.drained, written, grant.settlement)
    return _replace(state.grants, grant, changed)


def _grants(state: RequestState, entry: Entry, event: RequestEvent) -> tuple[Grant, ...]:
    match event:
        case Reserved():
            return (*state.grants, Grant(event, state.attempt))
        case Transferred():
            return _write(state, entry, event)
        case Drained():
            return _drain(state, event)
        case Released():
            return _settle(state, event, Settlement.RELEASED)
        case Quarantined():
            return _settle(state, event, Settlement.QUARANTINED)
        case Admitted() | Rejected() | Verified() | Finished() | Aborted() | Requeued() | Dropped():
            return state.grants
        case _:
            assert_never(event)


def fold(state: RequestState, entry: Entry) -> RequestState:
    """Return the state after an entry that was found legal."""
    event = entry.event
    if not isinstance(event, REQUEST_EVENTS):
        msg = f"{type(event).__name__} is no event of a request"
        raise TypeError(msg)
    kind = type(event)
    grants = _grants(state, entry, event) if kind in _ON_GRANTS else state.grants
    attempt = state.attempt
    first, admitted, outcome = state.first, state.admitted, state.outcome
    deadline, settle_by, relayed = state.deadline_ns, state.settle_by_ns, state.relayed
    if isinstance(event, Admitted):
        attempt, admitted, deadline, settle_by = entry.attempt, event, event.deadline_ns, 0
        first = first or event
    elif isinstance(event, _OUTCOMES):
        outcome = event
    elif isinstance(event, Requeued):
        relayed = event.tokens_relayed
    if kind in _ENDS and state.phase in LIVE and admitted:
        settle_by = entry.time_ns + admitted.settle_ns
    options = TABLE[state.phase].get(kind)
    phase = state.phase
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
