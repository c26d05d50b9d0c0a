"""Logs made by hand: a small fleet, one request with small numbers, and every phase it can be in.

Owns: canonical events of one request (7 prompt tokens, 10 new tokens, pages of 4 tokens).
Must not know: the engines' and the scheduler's cores; a log by hand may be one that they never make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from lifecycle.events import (
    KV,
    Aborted,
    Admitted,
    Attached,
    ByEngine,
    ByScheduler,
    Cause,
    Drained,
    Dropped,
    Entry,
    Event,
    FenceScope,
    Finished,
    FinishReason,
    Leg,
    Proof,
    Proposer,
    Purpose,
    QuarantineCause,
    Quarantined,
    RejectCode,
    Rejected,
    Released,
    RequestEvent,
    Requeued,
    Reserved,
    Resumed,
    Role,
    Transferred,
    Verified,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, EngineId, GrantId, PageRange, Party, RequestId, TokenRange
from lifecycle.ids import request_id as make_id
from lifecycle.state import Phase, RequestState, Violation

EPOCH = 1
PAGE_TOKENS = 4
PAGES = 16
PROMPT = 7
NEW = 10
SETTLE_NS = 1_000
DEADLINE_NS = 1_000_000

PREFILL = Party(EngineId("p0"), 1, 0)
DECODE = Party(EngineId("d0"), 1, 0)
STRANGER = Party(EngineId("x0"), 1, 0)
SOURCE = GrantId(PREFILL, 1)
DESTINATION = GrantId(DECODE, 1)
GROWTH = GrantId(DECODE, 2)
ONE = make_id(epoch=EPOCH, serial=1)
TWO = make_id(epoch=EPOCH, serial=2)


def attached(
    party: Party,
    role: Role,
    *,
    pages: int = PAGES,
    slots: int = 4,
    layout: str = "L",
    scope: FenceScope = FenceScope.GRANT,
) -> Attached:
    """A life with one rank."""
    return Attached(
        engine=party.engine,
        incarnation=party.incarnation,
        role=role,
        ranks=1,
        pages=pages,
        page_tokens=PAGE_TOKENS,
        layers=2,
        slots=slots,
        context_tokens=64,
        layout=layout,
        endpoints=("endpoint",),
        plane="naive",
        fence_scope=scope,
    )


def leg(
    party: Party,
    *,
    needed: int,
    booked: int,
    free: int = PAGES,
    capacity: int = PAGES,
    ranks: int = 1,
) -> Leg:
    """A leg; on an empty pool without quarantine, if not said otherwise."""
    return Leg(
        engine=party.engine,
        incarnation=party.incarnation,
        ranks=ranks,
        page_tokens=PAGE_TOKENS,
        pages_needed=needed,
        pages_booked=booked,
        pages_capacity=capacity,
        pages_free=free,
        layout="L",
    )


def admitted(**changes: Any) -> Admitted:
    """The canonical admission: 2 pages on prefill, 5 needed and 3 booked on decode."""
    event = Admitted(
        prompt_tokens=PROMPT,
        prompt_digest=b"digest",
        new_tokens_max=NEW,
        context_tokens=64,
        prefill=leg(PREFILL, needed=2, booked=2),
        decode=leg(DECODE, needed=5, booked=3),
        tenant="tenant",
        deadline_ns=DEADLINE_NS,
        settle_ns=SETTLE_NS,
        attempts_max=2,
        fleet_position=3,
    )
    return attrs.evolve(event, **changes)


def rejected(**changes: Any) -> Rejected:
    """A rejection for a full queue."""
    event = Rejected(
        code=RejectCode.QUEUE_FULL,
        reason="1 request waits in a queue of 1",
        prompt_tokens=PROMPT,
        new_tokens_max=NEW,
        context_tokens=64,
        capacity_tokens=0,
        tenant="tenant",
        fleet_position=3,
    )
    return attrs.evolve(event, **changes)


def source(**changes: Any) -> Reserved:
    """Prefill's own two pages."""
    event = Reserved(SOURCE, Purpose.SOURCE, (PageRange(0, 2),), TokenRange(0, 6), KV, 11)
    return attrs.evolve(event, **changes)


def destination(**changes: Any) -> Reserved:
    """Three pages of decode that prefill may write."""
    event = Reserved(
        DESTINATION, Purpose.DESTINATION, (PageRange(0, 3),), TokenRange(0, 12), KV, 12, (PREFILL,)
    )
    return attrs.evolve(event, **changes)


def growth(**changes: Any) -> Reserved:
    """Two more pages of decode, behind the destination."""
    event = Reserved(GROWTH, Purpose.GROWTH, (PageRange(3, 2),), TokenRange(12, 20), KV, 13)
    return attrs.evolve(event, **changes)


def transferred(start: int = 0, stop: int = 6, **changes: Any) -> Transferred:
    """Tokens `start` to `stop - 1` written into their pages of the destination."""
    first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
    event = Transferred(
        grant=DESTINATION,
        tokens=TokenRange(start, stop),
        pages=(PageRange(first, last - first),),
        size_bytes=64,
        digest=5,
        step=1,
        steps_ended=1,
    )
    return attrs.evolve(event, **changes)


def drained(**changes: Any) -> Drained:
    """Prefill acknowledges that it never writes the destination again."""
    return attrs.evolve(Drained(DESTINATION, PREFILL, Proof.ACKNOWLEDGED), **changes)


def verified(**changes: Any) -> Verified:
    """Both written pages were compared."""
    return attrs.evolve(Verified((DESTINATION,), 2, 2, 2, "wsum32"), **changes)


def finished(**changes: Any) -> Finished:
    """Three new tokens, and a stop."""
    event = Finished(
        reason=FinishReason.STOP,
        tokens=3,
        first_token_ns=1,
        digest=b"",
        pages_read=3,
        reads_checked=9,
        reads_unchecked=0,
    )
    return attrs.evolve(event, **changes)


def requeued(**changes: Any) -> Requeued:
    """The attempt gave two tokens before its pages ran out."""
    return attrs.evolve(Requeued(Cause.OUT_OF_PAGES, str(DECODE), 2), **changes)


def again(**changes: Any) -> Admitted:
    """The second attempt: it continues after the two relayed tokens."""
    event = admitted(prompt_tokens=PROMPT + 2, new_tokens_max=NEW - 2)
    return attrs.evolve(event, **changes)


ABORTED = Aborted(Cause.CLIENT_CANCEL, "client")
DROPPED = Dropped(PREFILL, 9, "Transferred", "quiet-after-end", DESTINATION)


def speaker(event: Event) -> Proposer:
    """Who usually says this."""
    if isinstance(event, Reserved | Released):
        return ByEngine(event.grant.owner, 1)
    if isinstance(event, Transferred):
        return ByEngine(PREFILL, 1)
    if isinstance(event, Drained):
        return ByEngine(event.party if event.proof is Proof.ACKNOWLEDGED else event.grant.owner, 1)
    if isinstance(event, Verified | Finished):
        return ByEngine(DECODE, 1)
    return ByScheduler(EPOCH)


class Log:
    """A history with its entries; `add` insists that an entry is legal, `judge` only asks."""

    def __init__(
        self, *, without: Iterable[str] = (), scope: FenceScope = FenceScope.GRANT
    ) -> None:
        """Begin with a fleet of one prefill and one decode engine."""
        self.history = History(without=without)
        self.entries: list[tuple[int, Entry]] = []
        self.now_ns = 1
        self.add(Resumed(EPOCH, 0), request=FLEET)
        self.add(attached(PREFILL, Role.PREFILL), request=FLEET)
        self.add(attached(DECODE, Role.DECODE, scope=scope), request=FLEET)

    def state(self, request: RequestId = ONE) -> RequestState:
        """The request's state."""
        return self.history.state(request)

    def entry(
        self,
        event: Event,
        *,
        request: RequestId = ONE,
        by: Proposer | None = None,
        attempt: int | None = None,
        skip: int = 0,
        time_ns: int | None = None,
    ) -> Entry:
        """The next entry around an event; `skip` leaves a gap in the sequence."""
        state = self.history.state(request)
        sequence = self.history.fleet.sequence if request == FLEET else state.sequence
        if attempt is None:
            attempt = state.attempt + 1 if isinstance(event, Admitted) else state.attempt
        now_ns = self.now_ns if time_ns is None else time_ns
        return Entry(request, sequence + skip, attempt, by or speaker(event), now_ns, event)

    def judge(self, event: Event, **how: Any) -> Violation | None:
        """Say what would be wrong with the event as the next entry."""
        return self.history.check(self.entry(event, **how))

    def add(self, *events: Event, **how: Any) -> Log:
        """Append legal entries."""
        for event in events:
            entry = self.entry(event, **how)
            violation = self.history.apply(entry)
            assert violation is None, violation
            self.entries.append((len(self.entries) + 1, entry))
            self.now_ns += 1
        return self


Builder = Callable[[Log], Log]


def new(log: Log) -> Log:
    """Only the fleet."""
    return log


def new_admitted(log: Log) -> Log:
    """Admitted, and nothing is reserved yet."""
    return log.add(admitted())


def reserved_both(log: Log) -> Log:
    """Admitted, and both legs hold their grants."""
    return log.add(admitted(), source(), destination())


def written(log: Log) -> Log:
    """Everything is written, nobody has drained."""
    return reserved_both(log).add(transferred())


def handed_over(log: Log) -> Log:
    """Everything is written, and the writer has drained."""
    return written(log).add(drained())


def decoding(log: Log) -> Log:
    """Verified; all grants are held."""
    return handed_over(log).add(verified())


def requeued_holding(log: Log) -> Log:
    """Requeued while both grants are held."""
    return decoding(log).add(requeued())


def requeued_settled(log: Log) -> Log:
    """Requeued, and nothing is held any more."""
    return requeued_holding(log).add(Released(SOURCE), Released(DESTINATION))


def second_decoding(log: Log) -> Log:
    """Attempt 2 decodes; attempt 1 left its destination undrained in quarantine."""
    written(log).add(
        requeued(tokens_relayed=0),
        Released(SOURCE),
        Quarantined(DESTINATION, QuarantineCause.NO_PROOF),
    )
    left = PAGES - 3
    decode = leg(DECODE, needed=5, booked=3, free=left, capacity=left)
    return log.add(
        admitted(decode=decode),
        source(grant=GrantId(PREFILL, 2)),
        destination(grant=GROWTH, pages=(PageRange(4, 3),)),
        transferred(grant=GROWTH, pages=(PageRange(4, 2),)),
        drained(grant=GROWTH),
        verified(grants=(GROWTH,)),
    )


def ended(log: Log) -> Log:
    """Aborted while both grants are held and the writer has not drained."""
    return written(log).add(ABORTED)


def closed(log: Log) -> Log:
    """Closed: the source is released, the destination went to quarantine without a proof."""
    return ended(log).add(Released(SOURCE), Quarantined(DESTINATION, QuarantineCause.NO_PROOF))


def turned_away(log: Log) -> Log:
    """Rejected."""
    return log.add(rejected(), attempt=0)


PHASES: dict[Phase, Builder] = {
    Phase.NEW: new,
    Phase.REJECTED: turned_away,
    Phase.ADMITTED: written,
    Phase.DECODING: decoding,
    Phase.REQUEUED: requeued_holding,
    Phase.ENDED: ended,
    Phase.CLOSED: closed,
}
"""A log for each phase."""

USUAL: dict[type[RequestEvent], RequestEvent] = {
    Admitted: admitted(),
    Rejected: rejected(),
    Reserved: destination(),
    Transferred: transferred(),
    Drained: drained(),
    Verified: verified(),
    Finished: finished(),
    Aborted: ABORTED,
    Requeued: requeued(),
    Quarantined: Quarantined(DESTINATION, QuarantineCause.NO_PROOF),
    Released: Released(SOURCE),
    Dropped: DROPPED,
}
"""One event of every kind."""
