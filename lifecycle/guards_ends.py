"""Guards on what is read and on what is given back.

Owns: `Verified`, `Finished`, and how a grant is drained, released or quarantined.
Must not know: the fleet; `crossguards` asks whether an owner lives and what it can fence.
"""

from __future__ import annotations

from lifecycle.events import (
    DESTINATION,
    SOURCE,
    ByEngine,
    Drained,
    Entry,
    Finished,
    Proof,
    QuarantineCause,
    Quarantined,
    Released,
    Verified,
)
from lifecycle.ids import count_pages
from lifecycle.state import HELD, LIVE, QUARANTINED, RELEASED, Grant, Phase, RequestState
from lifecycle.wording import counted


def _covered(grant: Grant, prompt_tokens: int) -> str | None:
    """Say what is missing of tokens 0 to n-2 in one destination grant."""
    reached = 0
    for start, stop in sorted(
        [(t.start, t.stop) for t in [w.transfer.tokens for w in grant.written]]
    ):
        if start != reached:
            return f"{grant.id} has no tokens {reached} to {start}"
        reached = stop
    if reached != prompt_tokens - 1:
        return f"{grant.id} has tokens 0 to {reached}, the prompt needs 0 to {prompt_tokens - 1}"
    return None


def all_grants(state: RequestState, _entry: Entry, event: Verified) -> str | None:
    destinations = state.current(DESTINATION)
    if set(event.grants) != {g.reserved.grant for g in destinations}:
        return f"{counted(len(event.grants), 'grant')} verified of {len(destinations)}"
    return None


def all_kinds(state: RequestState, _entry: Entry, _event: Verified) -> str | None:
    if state.admitted is None:
        return None
    destinations = state.current(DESTINATION)
    have = {(g.reserved.grant.owner, g.reserved.kind) for g in destinations}
    for owner in state.admitted.decode.parties():
        for kind in state.admitted.kinds:
            if (owner, kind) not in have:
                return f"{owner} holds no grant for {kind}"
    let_in = {p for g in destinations for p in g.reserved.parties}
    for writer in state.admitted.prefill.parties():
        if writer not in let_in:
            return f"{writer} was let into no grant"
    return None


def prompt_covered(state: RequestState, _entry: Entry, _event: Verified) -> str | None:
    if state.admitted is None:
        return None
    for grant in state.current(DESTINATION):
        missing = _covered(grant, state.admitted.prompt_tokens)
        if missing:
            return missing
    return None


def exclusive(state: RequestState, _entry: Entry, event: Verified) -> str | None:
    for name in event.grants:
        grant = state.grant(name)
        undrained = grant.undrained if grant is not None else ()
        if undrained:
            return f"{', '.join(str(p) for p in undrained)} may still write into {name}"
    return None


def pages_checked(state: RequestState, _entry: Entry, event: Verified) -> str | None:
    written = 0
    for grant in state.current(DESTINATION):
        for one in grant.written:
            written += count_pages(one.transfer.pages)
    if event.pages != written:
        return f"{counted(event.pages, 'page')} verified of {written} written"
    if event.headers_checked < event.pages or event.digests_checked < event.pages:
        return (
            f"{counted(event.headers_checked, 'header')} and "
            f"{counted(event.digests_checked, 'digest')} "
            f"compared on {counted(event.pages, 'page')}"
        )
    return None


def reads_checked(state: RequestState, _entry: Entry, event: Finished) -> str | None:
    if event.reads_unchecked:
        return (
            f"{counted(event.reads_unchecked, 'read')} went unchecked beside {event.reads_checked}"
        )
    held = 0
    for grant in state.grants:
        if grant.attempt == state.attempt and grant.reserved.purpose is not SOURCE:
            held += count_pages(grant.reserved.pages)
    if event.pages_read > held:
        return f"{counted(event.pages_read, 'page')} read of {held} granted"
    return None


def finished_length(state: RequestState, _entry: Entry, event: Finished) -> str | None:
    if state.admitted is not None and event.tokens > state.admitted.new_tokens_max:
        return (
            f"{counted(event.tokens, 'new token')} where {state.admitted.new_tokens_max} are "
            "allowed"
        )
    return None


def drain_by_whom(state: RequestState, entry: Entry, event: Drained) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or not isinstance(entry.proposer, ByEngine):
        return None
    if event.party not in grant.reserved.parties:
        return f"{event.party} was never let into {event.grant}"
    needed = event.party if event.proof is Proof.ACKNOWLEDGED else event.grant.owner
    if entry.proposer.party is not needed and entry.proposer.party != needed:
        return f"{event.proof.value} is proved by {needed}, not by {entry.proposer.party}"
    return None


def drained_once(state: RequestState, _entry: Entry, event: Drained) -> str | None:
    grant = state.grant(event.grant)
    if grant is not None and event.party in grant.drained:
        return f"{event.party} has drained from {event.grant} before"
    if grant is not None and grant.settlement is RELEASED:
        return f"{event.grant} is settled"
    return None


def release_by_owner(_state: RequestState, entry: Entry, event: Released) -> str | None:
    if isinstance(entry.proposer, ByEngine):
        party, owner = entry.proposer.party, event.grant.owner
        # Both are nearly always the one object of their name, and comparing fields costs more.
        if party is not owner and party != owner:
            return f"{party} releases pages of {owner}"
    return None


def release_known(state: RequestState, _entry: Entry, event: Released) -> str | None:
    grant = state.grant(event.grant)
    if grant is None:
        return f"{event.grant} was never granted to this request"
    if grant.settlement is RELEASED:
        return f"{event.grant} is released a second time"
    if grant.quarantine is QuarantineCause.ISOLATION:
        return f"{event.grant} stays out of circulation while its owner lives"
    if state.phase is Phase.CLOSED and grant.settlement is not QUARANTINED:
        return f"{event.grant} is {grant.settlement.value} in a closed request"
    return None


def release_drained(state: RequestState, _entry: Entry, event: Released) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or grant.settlement is not HELD or not grant.undrained:
        # Pages in quarantine may also come back by a fleet's proof: `crossguards` asks for it.
        return None
    return f"{', '.join(str(p) for p in grant.undrained)} may still write into {event.grant}"


def release_unread(state: RequestState, _entry: Entry, event: Released) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or state.phase not in LIVE:
        return None
    if grant.attempt == state.attempt and grant.reserved.purpose is not SOURCE:
        return f"{event.grant} is released while its attempt may still read it"
    return None


def quarantine_held(state: RequestState, _entry: Entry, event: Quarantined) -> str | None:
    grant = state.grant(event.grant)
    if grant is None:
        return f"{event.grant} was never granted to this request"
    if grant.settlement is not HELD:
        return f"{event.grant} is {grant.settlement.value} already"
    return None
