"""What a single request's log may not hold, beyond the table: one small guard for each claim.

Owns: every condition on one request's state and one entry.
Must not know: other requests, capacities of engines, or how states change.

A guard returns None, or a sentence with the numbers that it compared.
Guards run in the order in which they stand here; `TABLE_PLACE` marks where the table is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from lifecycle.events import (
    REQUEST_EVENTS,
    Aborted,
    Admitted,
    ByEngine,
    ByScheduler,
    Drained,
    Dropped,
    Entry,
    Event,
    Finished,
    Proof,
    Purpose,
    QuarantineCause,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import count_pages, pages_for, prefill_pages, slice_pages
from lifecycle.state import Grant, Phase, RequestState, Settlement

Check = Callable[[RequestState, Entry, Any], str | None]


@attrs.frozen
class Guard:
    """One condition: its name is `rule/what`, and it is asked for these events."""

    name: str
    events: tuple[type[Event], ...]
    check: Check

    @property
    def rule(self) -> str:
        """The rule that this guard keeps."""
        return self.name.split("/", 1)[0]


# --- asked before the table -------------------------------------------------------------------


def _sequence(state: RequestState, entry: Entry, _event: Event) -> str | None:
    if entry.sequence != state.sequence:
        return f"entry {entry.sequence} where {state.sequence} is next"
    return None


def _time(state: RequestState, entry: Entry, _event: Event) -> str | None:
    if entry.time_ns < state.time_ns:
        return f"time {entry.time_ns} ns is before {state.time_ns} ns"
    return None


def _drained_is_final(state: RequestState, entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or not isinstance(entry.proposer, ByEngine):
        return None
    if entry.proposer.party in grant.drained:
        return f"{entry.proposer.party} reports a write into {event.grant} after its Drained"
    return None


# --- who may say it ---------------------------------------------------------------------------


def _by_scheduler(_state: RequestState, entry: Entry, event: Event) -> str | None:
    if not isinstance(entry.proposer, ByScheduler):
        return f"{type(event).__name__} is the scheduler's alone"
    return None


def _by_engine(_state: RequestState, entry: Entry, event: Event) -> str | None:
    if not isinstance(entry.proposer, ByEngine):
        return f"{type(event).__name__} is never decided by the scheduler or by time"
    return None


def _attempt_next(state: RequestState, entry: Entry, _event: Admitted) -> str | None:
    if entry.attempt != state.attempt + 1:
        return f"attempt {entry.attempt} follows attempt {state.attempt}"
    return None


def _attempt_current(state: RequestState, entry: Entry, _event: Event) -> str | None:
    if entry.attempt != state.attempt:
        return f"attempt {entry.attempt} is heard in attempt {state.attempt}"
    return None


def _legs(state: RequestState, purpose: Purpose) -> tuple[object, ...]:
    if state.admitted is None:
        return ()
    leg = state.admitted.prefill if purpose is Purpose.SOURCE else state.admitted.decode
    return leg.parties()


def _owner_proposes(state: RequestState, entry: Entry, event: Reserved) -> str | None:
    if isinstance(entry.proposer, ByEngine) and entry.proposer.party != event.grant.owner:
        return f"{entry.proposer.party} reserves for {event.grant.owner}"
    if event.grant.owner not in _legs(state, event.purpose):
        return f"{event.grant.owner} is not on the leg of this attempt"
    return None


def _decode_proposes(state: RequestState, entry: Entry, event: Event) -> str | None:
    if state.admitted is None or not isinstance(entry.proposer, ByEngine):
        return None
    if entry.proposer.party not in state.admitted.decode.parties():
        return f"{type(event).__name__} by {entry.proposer.party}, who is not this attempt's decode"
    return None


# --- Admitted ---------------------------------------------------------------------------------


def _context(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    total = event.prompt_tokens + event.new_tokens_max
    if total > event.context_tokens:
        return f"{total} tokens in a context of {event.context_tokens}"
    return None


def _prefill_capacity(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    leg = event.prefill
    needed = prefill_pages(event.prompt_tokens, leg.page_tokens)
    if leg.pages_needed != needed or needed > leg.pages_capacity:
        return f"prefill needs {needed} pages ({leg.pages_needed} said) of {leg.pages_capacity}"
    return None


def _decode_capacity(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    leg = event.decode
    needed = pages_for(event.prompt_tokens + event.new_tokens_max, leg.page_tokens)
    if leg.pages_needed != needed or needed > leg.pages_capacity:
        return f"decode needs {needed} pages ({leg.pages_needed} said) of {leg.pages_capacity}"
    return None


def _booked(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    least_prefill = prefill_pages(event.prompt_tokens, event.prefill.page_tokens)
    least_decode = pages_for(event.prompt_tokens, event.decode.page_tokens)
    for leg, least in ((event.prefill, least_prefill), (event.decode, least_decode)):
        if leg.pages_booked < least:
            return f"{leg.pages_booked} pages are booked on {leg.engine}, the prompt needs {least}"
        if leg.pages_booked > leg.pages_free:
            return f"{leg.pages_booked} pages are booked out of {leg.pages_free} free"
    return None


def _layouts(_state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    one, two = event.prefill, event.decode
    if one.layout != two.layout or one.page_tokens != two.page_tokens:
        return f"layout {one.layout} is paired with {two.layout}"
    return None


def _nothing_owned(state: RequestState, _entry: Entry, _event: Admitted) -> str | None:
    if state.unsettled:
        names = ", ".join(str(g.id) for g in state.unsettled)
        return f"the next attempt begins while {names} is unsettled"
    return None


def _continues(state: RequestState, _entry: Entry, event: Admitted) -> str | None:
    if state.first is None:
        return None
    prompt = state.first.prompt_tokens + state.relayed
    room = state.first.new_tokens_max - state.relayed
    if (event.prompt_tokens, event.new_tokens_max) != (prompt, room):
        return (
            f"the attempt continues with {event.prompt_tokens} + {event.new_tokens_max} tokens, "
            f"not {prompt} + {room}"
        )
    return None


def _deadline_ahead(_state: RequestState, entry: Entry, event: Admitted) -> str | None:
    if event.deadline_ns <= entry.time_ns:
        return f"the deadline {event.deadline_ns} ns is not after {entry.time_ns} ns"
    return None


def _attempts(state: RequestState, _entry: Entry, _event: Requeued) -> str | None:
    if state.admitted is not None and state.attempt >= state.admitted.attempts_max:
        return f"attempt {state.attempt} of {state.admitted.attempts_max} is requeued"
    return None


# --- grants -----------------------------------------------------------------------------------


def _granted_once(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if state.grant(event.grant) is not None:
        return f"{event.grant} is granted a second time"
    return None


def _grant_fits(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if state.admitted is None:
        return None
    room = count_pages(event.pages) * state.admitted.decode.page_tokens
    if event.tokens.count > room:
        return f"{event.tokens.count} tokens do not fit the {room} of the grant's pages"
    return None


def _grant_whole(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    admitted = state.admitted
    if admitted is None or event.purpose is Purpose.GROWTH:
        return None
    prompt = admitted.prompt_tokens
    needed = max(1, prompt - 1) if event.purpose is Purpose.SOURCE else prompt
    if event.tokens.start != 0 or event.tokens.stop < needed:
        return (
            f"a grant for tokens 0 to {needed} covers {event.tokens.start} to {event.tokens.stop}"
        )
    if event.kind not in admitted.kinds:
        return f"kind {event.kind} is not one of {', '.join(admitted.kinds)}"
    for grant in state.current(event.purpose):
        same = grant.reserved
        if (same.grant.owner, same.kind) == (event.grant.owner, event.kind):
            return f"{event.grant.owner} holds {same.grant} for the same state already"
    return None


def _growth_follows(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if event.purpose is not Purpose.GROWTH or state.admitted is None:
        return None
    if state.phase is not Phase.DECODING:
        return "a request grows before it decodes"
    mine = [
        g.reserved.tokens.stop
        for g in state.current(Purpose.DESTINATION) + state.current(Purpose.GROWTH)
        if (g.id.owner, g.reserved.kind) == (event.grant.owner, event.kind)
    ]
    if not mine or max(mine) != event.tokens.start:
        return f"growth from token {event.tokens.start} does not follow {max(mine, default=0)}"
    return None


def _parties_are_writers(state: RequestState, _entry: Entry, event: Reserved) -> str | None:
    if state.admitted is None:
        return None
    writers = state.admitted.prefill.parties()
    for party in event.parties:
        if party not in writers:
            return f"{party} is let in but does not prefill this attempt"
    return None


# --- Transferred ------------------------------------------------------------------------------


def _grant_logged(state: RequestState, _entry: Entry, event: Transferred | Drained) -> str | None:
    if state.grant(event.grant) is None:
        return f"{event.grant} was never granted to this request"
    return None


def _writes_own_grant(state: RequestState, entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or not isinstance(entry.proposer, ByEngine):
        return None
    if grant.settlement is not Settlement.HELD or grant.attempt != state.attempt:
        return f"{event.grant} is not held by this attempt"
    if entry.proposer.party not in grant.reserved.parties:
        return f"{entry.proposer.party} is not let into {event.grant}"
    return None


def _range_inside(state: RequestState, _entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or state.admitted is None:
        return None
    size = state.admitted.decode.page_tokens
    last = state.admitted.prompt_tokens - 1
    tokens = event.tokens
    if tokens.count == 0 or tokens.stop > min(last, grant.reserved.tokens.stop):
        return f"tokens {tokens.start} to {tokens.stop} are not inside 0 to {last}"
    if tokens.start % size or (tokens.stop % size and tokens.stop != last):
        return f"tokens {tokens.start} to {tokens.stop} do not end on pages of {size}"
    pages = slice_pages(
        grant.reserved.pages, start=tokens.start // size, stop=pages_for(tokens.stop, size)
    )
    if pages != event.pages:
        return f"pages {event.pages} are not the grant's pages {pages} of these tokens"
    return None


def _no_overlap(state: RequestState, _entry: Entry, event: Transferred) -> str | None:
    grant = state.grant(event.grant)
    for written in grant.written if grant else ():
        other = written.transfer.tokens
        if other.start < event.tokens.stop and event.tokens.start < other.stop:
            return (
                f"tokens {event.tokens.start} to {event.tokens.stop} were written before, "
                f"as {other.start} to {other.stop} by {written.party}"
            )
    return None


def _step_ended(_state: RequestState, _entry: Entry, event: Transferred) -> str | None:
    if not 1 <= event.step <= event.steps_ended:
        return f"step {event.step} was sent when step {event.steps_ended} was the last to end"
    return None


# --- Verified, Finished -----------------------------------------------------------------------


def _covered(grant: Grant, prompt_tokens: int) -> str | None:
    """Say what is missing of tokens 0 to n-2 in one destination grant."""
    reached = 0
    for tokens in sorted(w.transfer.tokens for w in grant.written):
        if tokens.start != reached:
            return f"{grant.id} has no tokens {reached} to {tokens.start}"
        reached = tokens.stop
    if reached != prompt_tokens - 1:
        return f"{grant.id} has tokens 0 to {reached}, the prompt needs 0 to {prompt_tokens - 1}"
    return None


def _all_grants(state: RequestState, _entry: Entry, event: Verified) -> str | None:
    destinations = state.current(Purpose.DESTINATION)
    if set(event.grants) != {g.id for g in destinations}:
        return f"{len(event.grants)} grants are verified of {len(destinations)}"
    return None


def _all_kinds(state: RequestState, _entry: Entry, _event: Verified) -> str | None:
    if state.admitted is None:
        return None
    destinations = state.current(Purpose.DESTINATION)
    have = {(g.id.owner, g.reserved.kind) for g in destinations}
    for owner in state.admitted.decode.parties():
        for kind in state.admitted.kinds:
            if (owner, kind) not in have:
                return f"{owner} holds no grant for {kind}"
    let_in = {p for g in destinations for p in g.reserved.parties}
    for writer in state.admitted.prefill.parties():
        if writer not in let_in:
            return f"{writer} was let into no grant"
    return None


def _whole(state: RequestState, _entry: Entry, _event: Verified) -> str | None:
    if state.admitted is None:
        return None
    for grant in state.current(Purpose.DESTINATION):
        missing = _covered(grant, state.admitted.prompt_tokens)
        if missing:
            return missing
    return None


def _exclusive(state: RequestState, _entry: Entry, event: Verified) -> str | None:
    for name in event.grants:
        grant = state.grant(name)
        if grant is not None and grant.undrained:
            parties = ", ".join(str(p) for p in grant.undrained)
            return f"{parties} may still write into {name}"
    return None


def _checked(state: RequestState, _entry: Entry, event: Verified) -> str | None:
    written = sum(
        count_pages(w.transfer.pages) for g in state.current(Purpose.DESTINATION) for w in g.written
    )
    if event.pages != written:
        return f"{event.pages} pages were verified of {written} written"
    if event.headers_checked < event.pages or event.digests_checked < event.pages:
        return (
            f"{event.headers_checked} headers and {event.digests_checked} digests "
            f"were compared on {event.pages} pages"
        )
    return None


def _reads_checked(state: RequestState, _entry: Entry, event: Finished) -> str | None:
    if event.reads_unchecked:
        return f"{event.reads_unchecked} reads went unchecked beside {event.reads_checked}"
    held = sum(
        count_pages(g.reserved.pages)
        for g in state.current(Purpose.DESTINATION) + state.current(Purpose.GROWTH)
    )
    if event.pages_read > held:
        return f"{event.pages_read} pages were read of {held} granted"
    return None


def _finished_length(state: RequestState, _entry: Entry, event: Finished) -> str | None:
    if state.admitted is not None and event.tokens > state.admitted.new_tokens_max:
        return f"{event.tokens} new tokens where {state.admitted.new_tokens_max} are allowed"
    return None


# --- settling ---------------------------------------------------------------------------------


def _drain_by_whom(state: RequestState, entry: Entry, event: Drained) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or not isinstance(entry.proposer, ByEngine):
        return None
    if event.party not in grant.reserved.parties:
        return f"{event.party} was never let into {event.grant}"
    needed = event.party if event.proof is Proof.ACKNOWLEDGED else event.grant.owner
    if entry.proposer.party != needed:
        return f"{event.proof.value} is proved by {needed}, not by {entry.proposer.party}"
    return None


def _drained_once(state: RequestState, _entry: Entry, event: Drained) -> str | None:
    grant = state.grant(event.grant)
    if grant is not None and event.party in grant.drained:
        return f"{event.party} has drained from {event.grant} before"
    if grant is not None and grant.settlement is Settlement.RELEASED:
        return f"{event.grant} is settled"
    return None


def _release_by_owner(_state: RequestState, entry: Entry, event: Released) -> str | None:
    if isinstance(entry.proposer, ByEngine) and entry.proposer.party != event.grant.owner:
        return f"{entry.proposer.party} releases pages of {event.grant.owner}"
    return None


def _release_known(state: RequestState, _entry: Entry, event: Released) -> str | None:
    grant = state.grant(event.grant)
    if grant is None:
        return f"{event.grant} was never granted to this request"
    if grant.settlement is Settlement.RELEASED:
        return f"{event.grant} is released a second time"
    if grant.quarantine is QuarantineCause.ISOLATION:
        return f"{event.grant} stays out of circulation while its owner lives"
    if state.phase is Phase.CLOSED and grant.settlement is not Settlement.QUARANTINED:
        return f"{event.grant} is {grant.settlement.value} in a closed request"
    return None


def _release_drained(state: RequestState, _entry: Entry, event: Released) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or grant.settlement is not Settlement.HELD or not grant.undrained:
        # Pages in quarantine may also come back by a fleet's proof: `crossguards` asks for it.
        return None
    return f"{', '.join(str(p) for p in grant.undrained)} may still write into {event.grant}"


def _release_unread(state: RequestState, _entry: Entry, event: Released) -> str | None:
    grant = state.grant(event.grant)
    if grant is None or state.phase not in {Phase.ADMITTED, Phase.DECODING}:
        return None
    if grant.attempt == state.attempt and grant.reserved.purpose is not Purpose.SOURCE:
        return f"{event.grant} is released while its attempt may still read it"
    return None


def _quarantine_held(state: RequestState, _entry: Entry, event: Quarantined) -> str | None:
    grant = state.grant(event.grant)
    if grant is None:
        return f"{event.grant} was never granted to this request"
    if grant.settlement is not Settlement.HELD:
        return f"{event.grant} is {grant.settlement.value} already"
    return None


TABLE_PLACE = "one-decision/table"

_PROPOSED = (Reserved, Transferred, Drained, Verified, Finished, Released)
_DECIDED = (Admitted, Rejected, Aborted, Requeued, Quarantined, Dropped)
_ATTEMPT = (Reserved, Transferred, Verified, Finished, Requeued)

EARLY = (
    Guard("unbroken-log/sequence", REQUEST_EVENTS, _sequence),
    Guard("unbroken-log/time", REQUEST_EVENTS, _time),
    Guard("drained-is-final/transfer", (Transferred,), _drained_is_final),
)

LATE = (
    Guard("one-decision/by-scheduler", _DECIDED, _by_scheduler),
    Guard("time-is-no-proof/by-engine", _PROPOSED, _by_engine),
    Guard("acted-after-logged/grant", (Transferred, Drained), _grant_logged),
    Guard("current-attempt/next", (Admitted,), _attempt_next),
    Guard("current-attempt/current", _ATTEMPT, _attempt_current),
    Guard("current-attempt/owner", (Reserved,), _owner_proposes),
    Guard("current-attempt/decode", (Verified, Finished), _decode_proposes),
    Guard("current-attempt/parties", (Reserved,), _parties_are_writers),
    Guard("capacity-proved/context", (Admitted,), _context),
    Guard("capacity-proved/prefill", (Admitted,), _prefill_capacity),
    Guard("capacity-proved/decode", (Admitted,), _decode_capacity),
    Guard("capacity-proved/booked", (Admitted,), _booked),
    Guard("compatible-legs/layout", (Admitted,), _layouts),
    Guard("requeue-keeps-resources-honest/owned", (Admitted,), _nothing_owned),
    Guard("requeue-keeps-resources-honest/continues", (Admitted,), _continues),
    Guard("bounded/deadline", (Admitted,), _deadline_ahead),
    Guard("bounded/attempts", (Requeued,), _attempts),
    Guard("settled-once/granted", (Reserved,), _granted_once),
    Guard("conservation/fits", (Reserved,), _grant_fits),
    Guard("whole-before-read/reserved", (Reserved,), _grant_whole),
    Guard("whole-before-read/growth", (Reserved,), _growth_follows),
    Guard("written-within-grant/party", (Transferred,), _writes_own_grant),
    Guard("written-within-grant/range", (Transferred,), _range_inside),
    Guard("written-within-grant/overlap", (Transferred,), _no_overlap),
    Guard("computed-before-sent/step", (Transferred,), _step_ended),
    Guard("whole-before-read/grants", (Verified,), _all_grants),
    Guard("whole-before-read/kinds", (Verified,), _all_kinds),
    Guard("whole-before-read/covered", (Verified,), _whole),
    Guard("exclusive-before-read/drained", (Verified,), _exclusive),
    Guard("read-what-was-written/verified", (Verified,), _checked),
    Guard("read-what-was-written/reads", (Finished,), _reads_checked),
    Guard("first-cause-wins/length", (Finished,), _finished_length),
    Guard("time-is-no-proof/proof", (Drained,), _drain_by_whom),
    Guard("settled-once/drained", (Drained,), _drained_once),
    Guard("settled-once/owner", (Released,), _release_by_owner),
    Guard("settled-once/released", (Released,), _release_known),
    Guard("settled-once/quarantined", (Quarantined,), _quarantine_held),
    Guard("drained-before-released/parties", (Released,), _release_drained),
    Guard("acted-after-logged/unread", (Released,), _release_unread),
)
GUARDS = EARLY + LATE
