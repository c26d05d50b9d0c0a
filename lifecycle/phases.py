"""The one table of legality: phase by event, to the phases that may follow.

Theory of operation
-------------------
A request begins in NEW, before its first entry.
The scheduler decides once: `Rejected` ends it there, owning nothing; `Admitted` opens an attempt.

ADMITTED is an attempt whose pages are booked, reserved, written and drained, in any order that
the guards allow; how far it has come is read from its grants, never from a phase.
`Verified` is the only door to DECODING: decode has compared every page of the prompt.
In DECODING decode grows by further grants, and prefill gives its source pages back.

An attempt ends in one of three ways.
`Finished` and `Aborted` are the client's answer: the request is ENDED while a grant is still
held, and CLOSED as soon as each is released or quarantined.
`Requeued` is no answer: REQUEUED waits until the attempt's grants are settled, and then the
next `Admitted` opens the next attempt.
After an end nothing is granted, transferred or verified; late results may only settle.

CLOSED and REJECTED are terminal.
CLOSED still takes a late `Drained` or `Released` of a quarantined grant, because a proof that
comes late is still a proof, and brings capacity back.
`Dropped` is legal everywhere but in NEW: it says that a proposal changed nothing.

Where a cell names two phases, `settled` picks: CLOSED when nothing is held any more.
The table knows neither attempts nor grants nor numbers: that is what `guards` are for.
"""

from __future__ import annotations

from lifecycle.events import (
    Aborted,
    Admitted,
    Drained,
    Dropped,
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
from lifecycle.state import HELD, Grant, Phase

ENDING = (Phase.ENDED, Phase.CLOSED)

TABLE: dict[Phase, dict[type[RequestEvent], tuple[Phase, ...]]] = {
    Phase.NEW: {
        Admitted: (Phase.ADMITTED,),
        Rejected: (Phase.REJECTED,),
    },
    Phase.REJECTED: {
        Dropped: (Phase.REJECTED,),
    },
    Phase.ADMITTED: {
        Reserved: (Phase.ADMITTED,),
        Transferred: (Phase.ADMITTED,),
        Drained: (Phase.ADMITTED,),
        Released: (Phase.ADMITTED,),
        Quarantined: (Phase.ADMITTED,),
        Verified: (Phase.DECODING,),
        Aborted: ENDING,
        Requeued: (Phase.REQUEUED,),
        Dropped: (Phase.ADMITTED,),
    },
    Phase.DECODING: {
        Reserved: (Phase.DECODING,),
        Drained: (Phase.DECODING,),
        Released: (Phase.DECODING,),
        Quarantined: (Phase.DECODING,),
        Finished: ENDING,
        Aborted: ENDING,
        Requeued: (Phase.REQUEUED,),
        Dropped: (Phase.DECODING,),
    },
    Phase.REQUEUED: {
        Admitted: (Phase.ADMITTED,),
        Drained: (Phase.REQUEUED,),
        Released: (Phase.REQUEUED,),
        Quarantined: (Phase.REQUEUED,),
        Aborted: ENDING,
        Dropped: (Phase.REQUEUED,),
    },
    Phase.ENDED: {
        Drained: (Phase.ENDED,),
        Released: ENDING,
        Quarantined: ENDING,
        Dropped: (Phase.ENDED,),
    },
    Phase.CLOSED: {
        Drained: (Phase.CLOSED,),
        Released: (Phase.CLOSED,),
        Dropped: (Phase.CLOSED,),
    },
}


def settled(grants: tuple[Grant, ...]) -> Phase:
    """Pick between ENDED and CLOSED: closed when no grant is held."""
    for grant in grants:
        if grant.settlement is HELD:
            return Phase.ENDED
    return Phase.CLOSED


def refusal(phase: Phase, event: type[Event]) -> str:
    """Name the rule that an event breaks which has no cell in this phase's row."""
    if event in {Admitted, Rejected} or phase in {Phase.NEW, Phase.REJECTED}:
        return "one-decision"
    if event in {Finished, Aborted}:
        return "quiet-after-end" if phase is Phase.REQUEUED else "first-cause-wins"
    if event is Quarantined:
        return "settled-once"
    if phase is Phase.DECODING:
        return "whole-before-read"
    return "quiet-after-end"
