"""Canonical names in a small world, and what of its parts counts when worlds are compared.

Owns: the names of requests and grants; keys of states, cores, entries, messages and steps.
Must not know: a whole world; that is `world_key`'s.
"""

from __future__ import annotations

from engine.decode import DecodeCore
from engine.effects import Answer, DecodeSlice, Publish, Step, Synced
from engine.holdings import proposal_key
from engine.prefill import PrefillCore
from engine.world_values import Core, Tokens
from lifecycle.events import (
    Aborted,
    Admitted,
    Drained,
    Dropped,
    Entry,
    Finished,
    Proposal,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import GrantId, RequestId, count_pages
from lifecycle.state import RequestState

Key = tuple[object, ...]


class Names:
    """Canonical names of one world's requests and grants."""

    def __init__(self, requests: dict[RequestId, int]) -> None:
        """With the order of the requests; grants are learned one by one."""
        self.requests = requests
        self.grants: dict[GrantId, Key] = {}
        self.places: dict[Key, int] = {}

    def learn(self, request: RequestId, attempt: int, reserved: Reserved) -> None:
        """Name a grant; those of one owner for one attempt are told in the order of serials."""
        if reserved.grant not in self.grants:
            base = (
                reserved.grant.owner,
                self.requests.get(request),
                attempt,
                reserved.purpose,
            )
            place = self.places.get(base, 0)
            self.places[base] = place + 1
            self.grants[reserved.grant] = (*base, place)

    def __call__(self, value: object) -> object:
        """The canonical name of a request or a grant; other things stay as they are."""
        if isinstance(value, GrantId):
            return self.grants.get(value, value)
        if isinstance(value, str):
            return self.requests.get(RequestId(value), value)
        return value

    def each(self, values: tuple[object, ...]) -> Key:
        """A tuple by its canonical names."""
        return tuple(self(value) for value in values)


def state_key(state: RequestState, names: Names) -> Key:
    """A request's state without its numbers of entries."""
    grants = frozenset(
        (
            names(g.reserved.grant),
            g.attempt,
            g.settlement,
            g.quarantine,
            frozenset(g.drained),
            frozenset((w.party, w.transfer.tokens) for w in g.written),
        )
        for g in state.grants
    )
    return (
        names(state.request),
        state.phase,
        state.attempt,
        state.deadline_ns,
        state.settle_by_ns,
        grants,
        None if state.outcome is None else type(state.outcome),
        state.relayed,
    )


def _job(job: object) -> Key:
    return (
        getattr(job, "attempt", 0),
        getattr(job, "failed", False),
        getattr(job, "source", None) is not None,
        getattr(job, "computed", 0),
        getattr(job, "computing", 0),
        len(getattr(job, "reserved", ())),
        len(getattr(job, "exposed", ())),
        getattr(job, "verifying", False),
        getattr(job, "verified", None) is not None,
        getattr(job, "given", 0),
        getattr(job, "growing", None) is not None,
        getattr(job, "finished", None) is not None,
    )


def core_key(core: Core, expected: int, names: Names) -> Key:
    """An engine's state; `expected` is the number of its proposal that is to be taken next."""
    log = core.log
    own: Key = ()
    if isinstance(core, PrefillCore):
        own = (
            frozenset((names(g), tokens) for g, tokens in core.reports),
            frozenset((names(g), done) for g, done in core.posted.items()),
        )
    elif isinstance(core, DecodeCore):
        own = (
            frozenset((names(g), party) for g, party in core.fencing),
            frozenset((names(g), party) for g, party in core.fenced),
        )
    refused = (k for k, at in core.refused.items() if log.state(k[0]).sequence == at)  # type: ignore[arg-type]
    return (
        core.syncing,
        frozenset(names(r) for r in core.running),
        frozenset(state_key(s, names) for s in log.requests.values()),
        log.fleet.sequence,
        frozenset(
            (names(h.reserved.grant), count_pages(h.reserved.pages)) for h in core.holdings.values()
        ),
        tuple((names(name), _job(job)) for name, job in core.jobs.items()),
        tuple((n - expected, _proposal(p, names)) for n, p in core.outstanding.items()),
        frozenset(names.each(k) for k in core.accepted),
        frozenset(names.each(k) for k in refused),
        tuple(names(r) for r in core.waiting),
        own,
    )


def _proposal(proposal: Proposal, names: Names) -> Key:
    return names.each(proposal_key(proposal.request, proposal.attempt, proposal.body))


def entry_key(entry: Entry, names: Names) -> Key:
    """An entry without times, digests, page numbers and what its own request's state says."""
    event = entry.event
    own: object = None
    match event:
        case Admitted():
            lives = (event.prefill.incarnation, event.decode.incarnation)
            own = (event.prompt_tokens, event.new_tokens_max, event.deadline_ns, lives)
        case Reserved():
            own = (names(event.grant), count_pages(event.pages))
        case Transferred():
            own = (names(event.grant), event.tokens)
        case Drained():
            own = (names(event.grant), event.party, event.proof)
        case Quarantined():
            own = (names(event.grant), event.cause)
        case Released():
            own = names(event.grant)
        case Dropped():
            own = (event.party, event.kind, event.rule, names(event.grant), event.count)
        case Requeued():
            own = (event.cause, event.tokens_relayed)
        case Aborted():
            own = event.cause
        case Rejected():
            own = event.code
        case Verified() | Finished():
            pass
        case _:
            own = event
    return (names(entry.request), entry.attempt, type(event), own)


def message_key(message: object, expected: int, names: Names) -> object:
    match message:
        case Proposal():
            return (message.number - expected, *_proposal(message, names))
        case Tokens():
            return (names(message.request), message.attempt, message.first, len(message.tokens))
        case Answer():
            return (message.number - expected, message.position == 0)
        case Publish():
            return (entry_key(message.entry, names), message.payload is None)
        case Synced():
            return "synced"
        case _:
            return message


def step_key(step: Step, names: Names) -> Key:
    """A forward pass without its number, its pages and its tags."""
    return tuple(
        (names(part.request), part.attempt, part.position, part.index)
        if isinstance(part, DecodeSlice)
        else (names(part.request), part.attempt, part.start, part.count)
        for part in step.slices
    )
