"""Strategies for everything that can stand in a log.

Owns: how values, events, entries and proposals are drawn, each well formed by itself.
Must not know: which event is legal when; sequences drawn here obey no lifecycle.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    ByEngine,
    ByScheduler,
    Cause,
    Drained,
    Draining,
    Dropped,
    Entry,
    Event,
    Failed,
    FenceScope,
    Finished,
    FinishReason,
    Leg,
    Lost,
    LostCause,
    Proof,
    Proposal,
    Proposer,
    Purpose,
    QuarantineCause,
    Quarantined,
    Recovered,
    RecoveryProof,
    RejectCode,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Resumed,
    Role,
    Transferred,
    Verified,
)
from lifecycle.ids import (
    PAGES_MAX,
    RANKS_MAX,
    EngineId,
    GrantId,
    PageRange,
    Party,
    RequestId,
    TokenRange,
    request_id,
)

WORD = (1 << 64) - 1
RANK = (1 << 32) - 1

naturals = st.integers(0, WORD)
positives = st.integers(1, WORD)
page_counts = st.integers(1, PAGES_MAX // 2)
words = st.integers(0, WORD)
tags = st.integers(1, WORD)
texts = st.text(max_size=12)
digests = st.binary(max_size=32)


def engine_ids() -> SearchStrategy[EngineId]:
    return texts.map(EngineId)


def request_ids() -> SearchStrategy[RequestId]:
    """Minted ids, of a few epochs and serials so that requests meet again."""
    return st.builds(request_id, epoch=st.integers(0, 3), serial=st.integers(0, 5))


def parties() -> SearchStrategy[Party]:
    return st.builds(Party, engine_ids(), positives, st.integers(0, RANK))


def grant_ids() -> SearchStrategy[GrantId]:
    return st.builds(GrantId, parties(), positives)


def page_ranges() -> SearchStrategy[tuple[PageRange, ...]]:
    return st.lists(st.builds(PageRange, page_counts, page_counts), min_size=1, max_size=3).map(
        tuple
    )


@st.composite
def token_ranges(draw: st.DrawFn) -> TokenRange:
    start = draw(naturals)
    return TokenRange(start, draw(st.integers(start, WORD)))


def proposers() -> SearchStrategy[Proposer]:
    return st.builds(ByEngine, parties(), positives) | st.builds(ByScheduler, positives)


def legs() -> SearchStrategy[Leg]:
    return st.builds(
        Leg,
        engine=engine_ids(),
        incarnation=positives,
        ranks=st.integers(1, RANKS_MAX),
        page_tokens=positives,
        pages_needed=positives,
        pages_booked=positives,
        pages_capacity=naturals,
        pages_free=naturals,
        layout=texts,
    )


def admitted() -> SearchStrategy[Admitted]:
    return st.builds(
        Admitted,
        prompt_tokens=positives,
        prompt_digest=digests,
        new_tokens_max=positives,
        context_tokens=positives,
        prefill=legs(),
        decode=legs(),
        tenant=texts,
        deadline_ns=positives,
        settle_ns=positives,
        attempts_max=positives,
        fleet_position=naturals,
        kinds=st.lists(texts, max_size=2).map(tuple),
    )


def rejected() -> SearchStrategy[Rejected]:
    return st.builds(
        Rejected,
        code=st.sampled_from(RejectCode),
        reason=texts,
        prompt_tokens=naturals,
        new_tokens_max=naturals,
        context_tokens=naturals,
        capacity_tokens=naturals,
        tenant=texts,
        fleet_position=naturals,
    )


@st.composite
def reserved(draw: st.DrawFn) -> Reserved:
    """A grant; only a destination lets anybody in."""
    purpose = draw(st.sampled_from(Purpose))
    let_in = st.lists(parties(), min_size=1, max_size=3).map(tuple)
    return Reserved(
        grant=draw(grant_ids()),
        purpose=purpose,
        pages=draw(page_ranges()),
        tokens=draw(token_ranges()),
        kind=draw(texts),
        tag=draw(tags),
        parties=draw(let_in) if purpose is Purpose.DESTINATION else (),
    )


def transferred() -> SearchStrategy[Transferred]:
    return st.builds(
        Transferred,
        grant=grant_ids(),
        tokens=token_ranges(),
        pages=page_ranges(),
        size_bytes=positives,
        digest=words,
        step=naturals,
        steps_ended=naturals,
    )


def drained() -> SearchStrategy[Drained]:
    return st.builds(Drained, grant_ids(), parties(), st.sampled_from(Proof))


def verified() -> SearchStrategy[Verified]:
    return st.builds(
        Verified,
        grants=st.lists(grant_ids(), min_size=1, max_size=3).map(tuple),
        pages=naturals,
        headers_checked=naturals,
        digests_checked=naturals,
        method=texts,
    )


def finished() -> SearchStrategy[Finished]:
    return st.builds(
        Finished,
        reason=st.sampled_from(FinishReason),
        tokens=positives,
        first_token_ns=naturals,
        digest=digests,
        pages_read=naturals,
        reads_checked=naturals,
        reads_unchecked=naturals,
    )


def aborted() -> SearchStrategy[Aborted]:
    return st.builds(
        Aborted,
        cause=st.sampled_from(Cause),
        reported_by=texts,
        message=texts,
        page=st.none() | naturals,
        tag_expected=st.none() | words,
        tag_found=st.none() | words,
    )


def requeued() -> SearchStrategy[Requeued]:
    return st.builds(Requeued, st.sampled_from(Cause), texts, naturals)


def quarantined() -> SearchStrategy[Quarantined]:
    return st.builds(Quarantined, grant_ids(), st.sampled_from(QuarantineCause))


def released() -> SearchStrategy[Released]:
    return st.builds(Released, grant_ids())


def dropped() -> SearchStrategy[Dropped]:
    return st.builds(
        Dropped,
        party=parties(),
        number=positives,
        kind=texts,
        rule=texts,
        grant=st.none() | grant_ids(),
        count=positives,
    )


def attached() -> SearchStrategy[Attached]:
    return st.builds(
        Attached,
        engine=engine_ids(),
        incarnation=positives,
        role=st.sampled_from(Role),
        ranks=st.integers(1, RANKS_MAX),
        pages=page_counts,
        page_tokens=positives,
        layers=positives,
        slots=positives,
        context_tokens=positives,
        layout=texts,
        endpoints=st.lists(texts, max_size=3).map(tuple),
        plane=texts,
        fence_scope=st.sampled_from(FenceScope),
    )


def draining() -> SearchStrategy[Draining]:
    return st.builds(Draining, engine_ids(), positives)


def lost() -> SearchStrategy[Lost]:
    return st.builds(Lost, engine_ids(), positives, st.sampled_from(LostCause))


def resumed() -> SearchStrategy[Resumed]:
    return st.builds(Resumed, positives, naturals)


def recovered() -> SearchStrategy[Recovered]:
    return st.builds(Recovered, grant_ids(), st.sampled_from(RecoveryProof))


def failed() -> SearchStrategy[Failed]:
    return st.builds(
        Failed,
        cause=st.sampled_from(Cause),
        message=texts,
        page=st.none() | naturals,
        tag_expected=st.none() | words,
        tag_found=st.none() | words,
    )


EVENTS: dict[type[Event], SearchStrategy[Event]] = {
    Admitted: admitted(),
    Rejected: rejected(),
    Reserved: reserved(),
    Transferred: transferred(),
    Drained: drained(),
    Verified: verified(),
    Finished: finished(),
    Aborted: aborted(),
    Requeued: requeued(),
    Quarantined: quarantined(),
    Released: released(),
    Dropped: dropped(),
    Attached: attached(),
    Draining: draining(),
    Lost: lost(),
    Resumed: resumed(),
    Recovered: recovered(),
}
"""One strategy for each event; a test compares the keys with the union."""


def events() -> SearchStrategy[Event]:
    """Any event."""
    return st.one_of(*EVENTS.values())


def entries(of: SearchStrategy[Event] | None = None) -> SearchStrategy[Entry]:
    """Any entry, or one around an event of the given strategy."""
    return st.builds(
        Entry,
        request=request_ids(),
        sequence=naturals,
        attempt=naturals,
        proposer=proposers(),
        time_ns=naturals,
        event=events() if of is None else of,
    )


def proposals() -> SearchStrategy[Proposal]:
    """Any proposal."""
    bodies = st.one_of(
        reserved(), transferred(), drained(), verified(), finished(), released(), failed()
    )
    return st.builds(
        Proposal,
        party=parties(),
        number=positives,
        request=request_ids(),
        attempt=positives,
        body=bodies,
    )
