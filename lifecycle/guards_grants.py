"""Guards on grants and on writes into them.

Owns: what a grant covers and lets in, where a transfer may land.
Must not know: other requests' pages; `crossguards` compares with the ledger.
"""

from __future__ import annotations

from lifecycle.events import (
    DESTINATION,
    GROWTH,
    SOURCE,
    ByEngine,
    Drained,
    Entry,
    Reserved,
    Transferred,
)
from lifecycle.ids import count_pages, pages_for, slice_pages
from lifecycle.state import HELD, Phase, RequestState
from lifecycle.wording import counted


def granted_once(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if state.grant(event.grant) is not None:
        return f"{event.grant} is granted a second time"
    return None


def grant_fits(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if state.admitted is None:
        return None
    room = count_pages(event.pages) * state.admitted.decode.page_tokens
    if event.tokens.stop - event.tokens.start > room:
        return f"{counted(event.tokens.count, 'token')} in a grant whose pages hold {room}"
    return None


def grant_whole(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    admitted = state.admitted
    if admitted is None or event.purpose is GROWTH:
        return None
    prompt = admitted.prompt_tokens
    needed = max(1, prompt - 1) if event.purpose is SOURCE else prompt
    if event.tokens.start != 0 or event.tokens.stop < needed:
        return (
            f"a grant for tokens 0 to {needed} covers {event.tokens.start} to {event.tokens.stop}"
        )
    if event.kind not in admitted.kinds:
        return f"kind {event.kind} is not one of {', '.join(admitted.kinds)}"
    for grant in state.grants:
        other = grant.reserved
        if (
            grant.attempt == state.attempt
            and other.purpose is event.purpose
            and other.grant.owner == event.grant.owner
            and other.kind == event.kind
        ):
            return f"{event.grant.owner} holds {other.grant} for the same state already"
    return None


def growth_follows(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if event.purpose is not GROWTH or state.admitted is None:
        return None
    if state.phase is not Phase.DECODING:
        return "a request grows before it decodes"
    mine = [
        g.reserved.tokens.stop
        for g in state.current(DESTINATION) + state.current(GROWTH)
        if (g.id.owner, g.reserved.kind) == (event.grant.owner, event.kind)
    ]
    if not mine or max(mine) != event.tokens.start:
        return f"growth from token {event.tokens.start} does not follow {max(mine, default=0)}"
    return None


def parties_are_writers(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if state.admitted is None:
        return None
    for party in event.parties:
        if not state.admitted.prefill.has(party):
            return f"{party} is let in but does not prefill this attempt"
    return None


def grant_logged(state: RequestState, _entry: Entry, event: Transferred | Drained) -> str | None:
    if state.grant(event.grant) is None:
        return f"{event.grant} was never granted to this request"
    return None


def writes_own_grant(state: RequestState, entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or not isinstance(entry.proposer, ByEngine):
        return None
    if grant.settlement is not HELD or grant.attempt != state.attempt:
        return f"{event.grant} is not held by this attempt"
    if entry.proposer.party not in grant.reserved.parties:
        return f"{entry.proposer.party} is not let into {event.grant}"
    return None


def range_inside(state: RequestState, _entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or state.admitted is None:
        return None
    size = state.admitted.decode.page_tokens
    last = state.admitted.prompt_tokens - 1
    start, stop = event.tokens.start, event.tokens.stop
    if start == stop or stop > last or stop > grant.reserved.tokens.stop:
        return f"tokens {start} to {stop} are not inside 0 to {last}"
    if start % size or (stop % size and stop != last):
        return f"tokens {start} to {stop} do not end on pages of {size}"
    pages = slice_pages(grant.reserved.pages, start=start // size, stop=pages_for(stop, size))
    if pages != event.pages:
        return f"pages {event.pages} are not the grant's pages {pages} of these tokens"
    return None


def no_overlap(state: RequestState, _entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    start, stop = event.tokens.start, event.tokens.stop
    for written in grant.written if grant else ():
        other = written.transfer.tokens
        if other.start < stop and start < other.stop:
            return (
                f"tokens {start} to {stop} were written before, "
                f"as {other.start} to {other.stop} by {written.party}"
            )
    return None


def step_ended(_state: RequestState, _entry: Entry, event: Transferred) -> str | None:
    if not 1 <= event.step <= event.steps_ended:
        return f"step {event.step} was sent when step {event.steps_ended} was the last to end"
    return None
