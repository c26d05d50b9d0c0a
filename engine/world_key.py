"""When two worlds are the same: a hashable value that leaves out what nobody acts on.

Owns: which differences count.
Must not know: how a search uses it.

Left out are numbers that only grow and are only compared for equality or order of one party
(positions, sequences, tickets, steps), bytes that no one may read (free pages, free staging),
and the order in which independent events reached the log.
Two worlds with equal keys can do the same things and be found wrong by the same oracles.

Symmetric worlds have equal keys, too, because names are put in a canonical order:
a page is named by its grant and its place in it, a grant by owner, request, attempt, purpose and
place, and requests that ask for the same are numbered by how far they are.
Where two such requests are equally far the order of their arrival decides, which merges less and
is never wrong.
Decisions that compare ids keep them: requeued requests wait in their order, and where growth may
make a request give way to an older one, requests are numbered as they came.
Only the order in which one decision looks at its requests is not kept by an exchange of names.
"""

from __future__ import annotations

from engine.decode import DecodeCore
from engine.effects import Answer, DecodeSlice, Publish, Step, Synced
from engine.holdings import proposal_key
from engine.prefill import PrefillCore
from engine.world_checks import Checks
from engine.world_memory import Write, holder, numbers
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
from lifecycle.ids import GrantId, Party, RequestId, count_pages
from lifecycle.state import Phase, RequestState

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


def _message(message: object, expected: int, names: Names) -> object:
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


class Keyed(Checks):
    """A world that can be compared."""

    def key(self) -> Key:
        """A hashable value: equal keys mean that the same things can happen from here."""
        lines = self.scheduler.lines
        names = self._names()
        told = sorted((names.requests[r], c) for r, c in self.clients.items())
        return (
            tuple(
                self._party_key(p, lines[p].expected if p in lines else 0, names)
                for p in self.cores
            ),
            self._scheduler_key(names),
            frozenset(entry_key(e, names) for _, e in self.stored[self.durable :]),
            self.now,
            self.connected,
            frozenset(self._write_key(w, names) for w in self.writes.values()),
            tuple((c.asked, c.epoch, c.got, c.ended, type(c.told), c.gone) for _, c in told),
            tuple(
                (p, step_key(s, names), tuple(names(r) for r in w))
                for p, (s, w) in self.steps.items()
            ),
            frozenset((p, names(v.request), v.attempt) for p, v in self.verifies),
            frozenset((p, names(f.grant), f.party) for p, f in self.fences),
            frozenset(names(g) for g in self.exposed),
            frozenset((names(g), p) for g, p in self.refused),
            self.must_leave,
            tuple(self.budget.values()),
            self.asked,
        )

    def _names(self) -> Names:
        logs = [self.scheduler.log, *(core.log for core in self.cores.values())]
        grown = any(a.new_tokens > self.scenario.growth_tokens for a in self.scenario.asked)
        orders = []
        for order, (request, client) in enumerate(self.clients.items()):
            asked = client.asked
            states = () if grown else tuple(log.state(request) for log in logs)
            seen = tuple((s.sequence, s.phase.value) for s in states)
            alike = (asked.prompt_tokens, asked.new_tokens, asked.deadline_ns, client.epoch)
            far = (seen, client.got, client.ended)
            orders.append(((order,) if grown else (alike, far, order), request))
        names = Names({place[-1]: number for number, place in enumerate(sorted(orders))})
        for log in logs:
            for state in log.requests.values():
                for grant in state.grants:
                    names.learn(state.request, grant.attempt, grant.reserved)
        for core in self.cores.values():
            for holding in core.holdings.values():
                names.learn(holding.request, holding.attempt, holding.reserved)
        return names

    def _write_key(self, write: Write, names: Names) -> Key:
        """A write in flight without its ticket; where it lands when its plane lies."""
        post = write.post
        flags = (write.landed > 0, write.doubted, write.ended, write.orphan, write.silent)
        places: Key = ()
        owner = self.cores.get(post.grant.owner)
        if write.ended and owner is not None:
            places = tuple(self._place(owner, page, names) for page in numbers(post.target_pages))
        return (write.party, names(post.grant), post.tokens, flags, places)

    @staticmethod
    def _place(owner: Core, page: int, names: Names) -> Key | None:
        found = holder(owner, page)
        if found is None:
            return None
        pages = numbers(found.reserved.pages)
        return (names(found.reserved.grant), pages.index(page))

    def _party_key(self, party: Party, expected: int, names: Names) -> Key:
        core, line = self.cores[party], self.scheduler.lines.get(party)
        answered = (
            (n - expected, line.answers[n].position == 0)
            for n in core.outstanding
            if line is not None and n in line.answers
        )
        channels = (self.up, self.publishes, self.down, self.answers)
        return (
            core_key(core, expected, names),
            tuple(answered),
            tuple(tuple(_message(m, expected, names) for m in c[party]) for c in channels),
            frozenset(self._unseen(party, names)),
            self._pages(party, core, names),
        )

    def _unseen(self, party: Party, names: Names) -> list[Key]:
        if party in self.connected:
            return []
        core = self.cores[party]
        return [
            entry_key(e, names) for at, e in self.stored if at > core.position or not core.epoch
        ]

    def _pages(self, party: Party, core: Core, names: Names) -> Key:
        pool = self.memory.pools[party]
        held = []
        for holding in core.holdings.values():
            tag = holding.reserved.tag
            cells = []
            for page in numbers(holding.reserved.pages):
                cell = pool[page]
                own = cell is not None and cell.tag == tag
                cells.append(
                    (cell.position, tuple((names(r), a, t) for r, a, t in cell.tokens))
                    if own and cell is not None
                    else None
                )
            held.append((names(holding.reserved.grant), tuple(cells)))
        return (frozenset(held),)

    def _scheduler_key(self, names: Names) -> Key:
        scheduler = self.scheduler
        requests = scheduler.log.requests
        late = frozenset(
            (names(request), party)
            for request, state in requests.items()
            if state.phase is Phase.CLOSED
            for party, line in scheduler.lines.items()
            if line.acknowledged < scheduler.entries[request][-1][0]
        )
        waiting = [p.wanted for p in scheduler.queue.waiting()]
        relays = scheduler.relays.items()
        return (
            scheduler.epoch,
            frozenset(state_key(s, names) for s in requests.values()),
            tuple((names(w.request), w.deadline_ns) for w in waiting),
            # Requeued requests go on in the order of their ids.
            tuple(names(r) for r in sorted(w.request for w in waiting)),
            frozenset((names(n), r.attempt, r.held, len(r.tokens)) for n, r in relays),
            late,
            frozenset((names.each(k), count) for k, count in scheduler.drops.items()),
            scheduler.log.fleet.sequence,
        )
