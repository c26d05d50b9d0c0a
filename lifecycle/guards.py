"""What a single request's log may not hold, beyond the table: the guards, in order.

Owns: which guard is asked for which event, and in which order.
Must not know: what a guard compares; each module of guards says it in small functions.

Guards run in the order in which they stand here; `EARLY` ones before the table is asked, which
`TABLE_PLACE` stands for, `LATE` ones after it.
"""

from __future__ import annotations

from lifecycle import guards_admission as admission
from lifecycle import guards_ends as ends
from lifecycle import guards_grants as grants
from lifecycle import guards_speakers as speakers
from lifecycle.events import (
    REQUEST_EVENTS,
    Aborted,
    Admitted,
    Drained,
    Dropped,
    Finished,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.guard import Check, Guard

__all__ = ["EARLY", "GUARDS", "LATE", "TABLE_PLACE", "Check", "Guard"]

TABLE_PLACE = "one-decision/table"

_PROPOSED = (Reserved, Transferred, Drained, Verified, Finished, Released)
_DECIDED = (Admitted, Rejected, Aborted, Requeued, Quarantined, Dropped)
_ATTEMPT = (Reserved, Transferred, Verified, Finished, Requeued)

EARLY = (
    Guard("unbroken-log/sequence", REQUEST_EVENTS, speakers.sequence_next),
    Guard("unbroken-log/time", REQUEST_EVENTS, speakers.time_order),
    Guard("drained-is-final/transfer", (Transferred,), speakers.drained_is_final),
)

LATE = (
    Guard("one-decision/by-scheduler", _DECIDED, speakers.by_scheduler),
    Guard("time-is-no-proof/by-engine", _PROPOSED, speakers.by_engine),
    Guard("acted-after-logged/grant", (Transferred, Drained), grants.grant_logged),
    Guard("current-attempt/next", (Admitted,), speakers.attempt_next),
    Guard("current-attempt/current", _ATTEMPT, speakers.attempt_current),
    Guard("current-attempt/owner", (Reserved,), speakers.owner_proposes),
    Guard("current-attempt/decode", (Verified, Finished), speakers.decode_proposes),
    Guard("current-attempt/parties", (Reserved,), grants.parties_are_writers),
    Guard("capacity-proved/context", (Admitted,), admission.context_fits),
    Guard("capacity-proved/prefill", (Admitted,), admission.prefill_capacity),
    Guard("capacity-proved/decode", (Admitted,), admission.decode_capacity),
    Guard("capacity-proved/booked", (Admitted,), admission.pages_booked),
    Guard("compatible-legs/layout", (Admitted,), admission.layouts_equal),
    Guard("requeue-keeps-resources-honest/owned", (Admitted,), admission.nothing_owned),
    Guard("requeue-keeps-resources-honest/continues", (Admitted,), admission.continues),
    Guard("bounded/deadline", (Admitted,), admission.deadline_ahead),
    Guard("bounded/attempts", (Requeued,), admission.attempts_left),
    Guard("requeue-keeps-resources-honest/relayed", (Requeued,), admission.relayed_counts_on),
    Guard("settled-once/granted", (Reserved,), grants.granted_once),
    Guard("conservation/fits", (Reserved,), grants.grant_fits),
    Guard("whole-before-read/reserved", (Reserved,), grants.grant_whole),
    Guard("whole-before-read/growth", (Reserved,), grants.growth_follows),
    Guard("written-within-grant/party", (Transferred,), grants.writes_own_grant),
    Guard("written-within-grant/range", (Transferred,), grants.range_inside),
    Guard("written-within-grant/overlap", (Transferred,), grants.no_overlap),
    Guard("computed-before-sent/step", (Transferred,), grants.step_ended),
    Guard("whole-before-read/grants", (Verified,), ends.all_grants),
    Guard("whole-before-read/kinds", (Verified,), ends.all_kinds),
    Guard("whole-before-read/covered", (Verified,), ends.prompt_covered),
    Guard("exclusive-before-read/drained", (Verified,), ends.exclusive),
    Guard("read-what-was-written/verified", (Verified,), ends.pages_checked),
    Guard("read-what-was-written/reads", (Finished,), ends.reads_checked),
    Guard("first-cause-wins/length", (Finished,), ends.finished_length),
    Guard("time-is-no-proof/proof", (Drained,), ends.drain_by_whom),
    Guard("settled-once/drained", (Drained,), ends.drained_once),
    Guard("settled-once/owner", (Released,), ends.release_by_owner),
    Guard("settled-once/released", (Released,), ends.release_known),
    Guard("settled-once/quarantined", (Quarantined,), ends.quarantine_held),
    Guard("drained-before-released/parties", (Released,), ends.release_drained),
    Guard("acted-after-logged/unread", (Released,), ends.release_unread),
)
GUARDS = EARLY + LATE
