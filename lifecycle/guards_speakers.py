"""Guards on who may say something, when, and in which attempt.

Owns: order and time of entries, proposers, attempts.
Must not know: capacities, ranges, settlement.
"""

from __future__ import annotations

from lifecycle.events import (
    Admitted,
    ByEngine,
    ByScheduler,
    Entry,
    Event,
    Purpose,
    Reserved,
    Transferred,
)
from lifecycle.state import RequestState


def sequence_next(state: RequestState, entry: Entry, _event: Event) -> str | None:
    if entry.sequence != state.sequence:
        return f"entry {entry.sequence} where {state.sequence} is next"
    return None


def time_order(state: RequestState, entry: Entry, _event: Event) -> str | None:
    if entry.time_ns < state.time_ns:
        return f"time {entry.time_ns} ns is before {state.time_ns} ns"
    return None


def drained_is_final(state: RequestState, entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or not isinstance(entry.proposer, ByEngine):
        return None
    if entry.proposer.party in grant.drained:
        return f"{entry.proposer.party} reports a write into {event.grant} after its Drained"
    return None


def by_scheduler(_state: RequestState, entry: Entry, event: Event) -> str | None:
    if not isinstance(entry.proposer, ByScheduler):
        return f"{type(event).__name__} is the scheduler's alone"
    return None


def by_engine(_state: RequestState, entry: Entry, event: Event) -> str | None:
    if not isinstance(entry.proposer, ByEngine):
        return f"{type(event).__name__} is never decided by the scheduler or by time"
    return None


def attempt_next(state: RequestState, entry: Entry, _event: Admitted) -> str | None:
    if entry.attempt != state.attempt + 1:
        return f"attempt {entry.attempt} follows attempt {state.attempt}"
    return None


def attempt_current(state: RequestState, entry: Entry, _event: Event) -> str | None:
    if entry.attempt != state.attempt:
        return f"attempt {entry.attempt} is heard in attempt {state.attempt}"
    return None


def _legs(state: RequestState, purpose: Purpose) -> tuple[object, ...]:
    if state.admitted is None:
        return ()
    leg = state.admitted.prefill if purpose is Purpose.SOURCE else state.admitted.decode
    return leg.parties()


def owner_proposes(state: RequestState, entry: Entry, event: Reserved) -> str | None:
    if isinstance(entry.proposer, ByEngine) and entry.proposer.party != event.grant.owner:
        return f"{entry.proposer.party} reserves for {event.grant.owner}"
    if event.grant.owner not in _legs(state, event.purpose):
        return f"{event.grant.owner} is not on the leg of this attempt"
    return None


def decode_proposes(state: RequestState, entry: Entry, event: Event) -> str | None:
    if state.admitted is None or not isinstance(entry.proposer, ByEngine):
        return None
    if entry.proposer.party not in state.admitted.decode.parties():
        return f"{type(event).__name__} by {entry.proposer.party}, who is not this attempt's decode"
    return None
