"""The fleet: which lives of which engines there are, reduced from the fleet's own log.

Owns: the fleet's state and how the fleet's events change it.
Must not know: requests and pages; those are the ledger's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import attrs

from lifecycle.events import (
    FLEET_EVENTS,
    Attached,
    ByScheduler,
    Draining,
    Entry,
    FenceScope,
    FleetEvent,
    Lost,
    LostCause,
    Recovered,
    Resumed,
)
from lifecycle.ids import FLEET, EngineId, GrantId
from lifecycle.state import Violation
from lifecycle.wording import counted


@attrs.frozen
class Life:
    """One incarnation of an engine."""

    attached: Attached
    draining: bool = False
    lost: LostCause | None = None

    @property
    def usable(self) -> bool:
        """Whether new work may be placed here."""
        return self.lost is None and not self.draining


@attrs.frozen
class FleetState:
    """The lives of all engines; `sequence` is the next entry's number in the fleet's log."""

    sequence: int = 0
    time_ns: int = 0
    epoch: int = 0
    lives: tuple[tuple[EngineId, Life], ...] = ()
    recovered: tuple[GrantId, ...] = ()

    def life(self, engine: EngineId, incarnation: int) -> Life | None:
        """That life, lost or not; None if it never joined."""
        for name, life in self.lives:
            if life.attached.incarnation == incarnation and name == engine:
                return life
        return None

    def current(self, engine: EngineId) -> Life | None:
        """The engine's newest life, lost or not."""
        newest = None
        for name, life in self.lives:
            if name == engine:
                newest = life
        return newest

    def alive(self) -> tuple[Life, ...]:
        """Every life that is not lost, in the order of their joining."""
        return tuple([life for _, life in self.lives if life.lost is None])


def _check(state: FleetState, entry: Entry, event: FleetEvent) -> tuple[str, str] | None:
    if entry.sequence != state.sequence:
        return "unbroken-log", f"entry {entry.sequence} where {state.sequence} is next"
    if entry.time_ns < state.time_ns:
        return "unbroken-log", f"time {entry.time_ns} ns is before {state.time_ns} ns"
    if not isinstance(entry.proposer, ByScheduler):
        return "one-decision", f"{type(event).__name__} is the scheduler's alone"
    if isinstance(event, Resumed):
        if event.epoch <= state.epoch or entry.proposer.epoch != event.epoch:
            return "unbroken-log", f"epoch {event.epoch} follows epoch {state.epoch}"
        return None
    if entry.proposer.epoch != state.epoch:
        return "unbroken-log", f"epoch {entry.proposer.epoch} speaks in epoch {state.epoch}"
    if isinstance(event, Recovered):
        life = state.current(event.grant.owner.engine)
        if life is None or life.attached.incarnation != event.grant.owner.incarnation:
            return "incarnation-fences", f"{event.grant} belongs to a life that is gone"
        return None
    newest = state.current(event.engine)
    if isinstance(event, Attached):
        if newest is not None and newest.lost is None:
            return "incarnation-fences", f"{event.engine} joins again before it was lost"
        if newest is not None and event.incarnation <= newest.attached.incarnation:
            return "incarnation-fences", (
                f"incarnation {event.incarnation} follows {newest.attached.incarnation}"
            )
        if len(event.endpoints) != event.ranks:
            return "incarnation-fences", (
                f"{counted(len(event.endpoints), 'endpoint')} for {counted(event.ranks, 'rank')}"
            )
        return None
    if newest is None or newest.attached.incarnation != event.incarnation or newest.lost:
        return "incarnation-fences", f"{event.engine}/{event.incarnation} is no current life"
    return None


def _lives(state: FleetState, event: FleetEvent) -> tuple[tuple[EngineId, Life], ...]:
    match event:
        case Attached():
            return (*state.lives, (event.engine, Life(event)))
        case Draining():
            return _changed(state, event, lambda life: Life(life.attached, True, life.lost))
        case Lost(cause=cause):
            return _changed(state, event, lambda life: Life(life.attached, life.draining, cause))
        case Resumed() | Recovered():
            return state.lives
        case _:
            assert_never(event)


def _changed(
    state: FleetState, event: Draining | Lost, change: Callable[[Life], Life]
) -> tuple[tuple[EngineId, Life], ...]:
    named = (event.engine, event.incarnation)
    return tuple(
        (name, change(life) if (name, life.attached.incarnation) == named else life)
        for name, life in state.lives
    )


def reduce_fleet(state: FleetState, entry: Entry) -> FleetState | Violation:
    """Return the fleet after the entry, or the violation that left it unchanged."""
    event = entry.event
    if not isinstance(event, FLEET_EVENTS) or entry.request != FLEET:
        message = f"{type(event).__name__} is no event of the fleet"
        return Violation("one-decision", "fleet", message, entry.request, entry.sequence)
    broken = _check(state, entry, event)
    if broken is not None:
        rule, message = broken
        return Violation(rule, "fleet", message, entry.request, entry.sequence)
    return FleetState(
        sequence=state.sequence + 1,
        time_ns=entry.time_ns,
        epoch=event.epoch if isinstance(event, Resumed) else state.epoch,
        lives=_lives(state, event),
        recovered=(
            (*state.recovered, event.grant) if isinstance(event, Recovered) else state.recovered
        ),
    )


def may_fence(life: Life | None) -> bool:
    """Whether this life's data plane lets an owner prove that a writer is shut out."""
    return life is not None and life.attached.fence_scope is not FenceScope.NONE
