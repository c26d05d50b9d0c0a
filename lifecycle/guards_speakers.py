"""Guards on who may say something, when, and in which attempt.

Owns: order and time of entries, proposers, attempts.
Must not know: capacities, ranges, settlement.
"""

from __future__ import annotations

from lifecycle.events import (
    SOURCE,
    Admitted,
    ByEngine,
    ByScheduler,
    Entry,
    Event,
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


def owner_proposes(state: RequestState, entry: Entry, event: Reserved) -> str | None:
    owner = event.grant.owner
    if isinstance(entry.proposer, ByEngine):
        party = entry.proposer.party
        # Both are nearly always the one object of their name, and comparing fields costs more.
        if party is not owner and party != owner:
            return f"{party} reserves for {owner}"
    admitted = state.admitted
    if admitted is not None:
        leg = admitted.prefill if event.purpose is SOURCE else admitted.decode
        if leg.has(owner):
            return None
    return f"{owner} is not on the leg of this attempt"


def decode_proposes(state: RequestState, entry: Entry, event: Event) -> str | None:
    if state.admitted is None or not isinstance(entry.proposer, ByEngine):
        return None
    if not state.admitted.decode.has(entry.proposer.party):
        return f"{type(event).__name__} by {entry.proposer.party}, who is not this attempt's decode"
    return None
