"""When two worlds are the same: a hashable value that leaves out what nobody acts on.

Owns: which differences count.
Must not know: how a search uses it.

Left out are numbers that only grow and are only compared for equality or order of one party
(positions, sequences, tickets, steps), bytes that no one may read (free pages, free staging),
and the order in which independent events reached the log.
Two worlds with equal keys can do the same things and be found wrong by the same oracles.
"""

from __future__ import annotations

from engine.decode import DecodeCore
from engine.effects import Answer, Publish, Synced
from engine.holdings import proposal_key
from engine.prefill import PrefillCore
from engine.world_checks import Checks
from engine.world_memory import Write, numbers
from engine.world_values import Core, Tokens
from lifecycle.events import Proposal
from lifecycle.ids import Party
from lifecycle.state import Phase, RequestState

Key = tuple[object, ...]


def state_key(state: RequestState) -> Key:
    """A request's state without its numbers of entries."""
    grants = frozenset(
        (
            g.reserved.grant,
            g.attempt,
            g.settlement,
            g.quarantine,
            frozenset(g.drained),
            frozenset((w.party, w.transfer.tokens) for w in g.written),
        )
        for g in state.grants
    )
    outcome = None if state.outcome is None else type(state.outcome)
    return (
        state.request,
        state.phase,
        state.attempt,
        state.deadline_ns,
        state.settle_by_ns,
        grants,
        outcome,
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


def core_key(core: Core, expected: int) -> Key:
    """An engine's state; `expected` is the number of its proposal that is to be taken next."""
    log = core.log
    own: Key = ()
    if isinstance(core, PrefillCore):
        own = (frozenset(core.reports), frozenset(core.posted.items()))
    elif isinstance(core, DecodeCore):
        own = (frozenset(core.fencing), frozenset(core.fenced))
    refused = (k for k, at in core.refused.items() if log.state(k[0]).sequence == at)  # type: ignore[arg-type]
    return (
        core.syncing,
        core.running,
        frozenset(state_key(s) for s in log.requests.values()),
        log.fleet.sequence,
        frozenset((h.reserved.grant, h.reserved.pages) for h in core.holdings.values()),
        tuple((name, _job(job)) for name, job in core.jobs.items()),
        tuple((n - expected, _proposal(p)) for n, p in core.outstanding.items()),
        frozenset(core.accepted),
        frozenset(refused),
        tuple(core.waiting),
        own,
    )


def _proposal(proposal: Proposal) -> Key:
    return proposal_key(proposal.request, proposal.attempt, proposal.body)


def _message(message: object, expected: int) -> object:
    match message:
        case Proposal():
            return (message.number - expected, *_proposal(message))
        case Tokens():
            return (message.request, message.attempt, message.first, len(message.tokens))
        case Answer():
            return (message.number - expected, message.position == 0)
        case Publish():
            entry = message.entry
            return (entry.request, entry.attempt, entry.event, message.payload is None)
        case Synced():
            return "synced"
        case _:
            return message


def write_key(write: Write) -> Key:
    """A write in flight without its ticket."""
    post = write.post
    flags = (write.landed > 0, write.doubted, write.ended, write.orphan, write.silent)
    return (write.party, post.grant, post.tokens, flags)


class Keyed(Checks):
    """A world that can be compared."""

    def key(self) -> Key:
        """A hashable value: equal keys mean that the same things can happen from here."""
        lines = self.scheduler.lines
        return (
            tuple(self._party_key(p, lines[p].expected if p in lines else 0) for p in self.cores),
            self._scheduler_key(),
            frozenset((e.request, e.event) for _, e in self.stored[self.durable :]),
            self.now,
            self.connected,
            frozenset(write_key(w) for w in self.writes.values()),
            tuple((c.got, c.ended, type(c.told), c.gone) for c in self.clients.values()),
            tuple((p, s.slices, tuple(w)) for p, (s, w) in self.steps.items()),
            frozenset((p, v.request, v.attempt) for p, v in self.verifies),
            frozenset((p, f.grant, f.party) for p, f in self.fences),
            self.exposed,
            self.refused,
            self.must_leave,
            tuple(self.budget.values()),
            self.asked,
        )

    def _party_key(self, party: Party, expected: int) -> Key:
        core, line = self.cores[party], self.scheduler.lines.get(party)
        answered = (
            (n - expected, line.answers[n].position == 0)
            for n in core.outstanding
            if line is not None and n in line.answers
        )
        channels = (self.up, self.publishes, self.down, self.answers)
        return (
            core_key(core, expected),
            tuple(answered),
            tuple(tuple(_message(m, expected) for m in c[party]) for c in channels),
            frozenset(self._unseen(party)),
            self._pages(party, core),
        )

    def _unseen(self, party: Party) -> list[Key]:
        if party in self.connected:
            return []
        core = self.cores[party]
        return [
            (e.request, e.event) for at, e in self.stored if at > core.position or not core.epoch
        ]

    def _pages(self, party: Party, core: Core) -> Key:
        pool = self.memory.pools[party]
        held = []
        for holding in core.holdings.values():
            tag = holding.reserved.tag
            for page in numbers(holding.reserved.pages):
                cell = pool[page]
                held.append((page, cell if cell is not None and cell.tag == tag else None))
        return tuple(sorted(held, key=lambda pair: pair[0]))

    def _scheduler_key(self) -> Key:
        scheduler = self.scheduler
        requests = scheduler.log.requests
        late = frozenset(
            (request, party)
            for request, state in requests.items()
            if state.phase is Phase.CLOSED
            for party, line in scheduler.lines.items()
            if line.acknowledged < scheduler.entries[request][-1][0]
        )
        return (
            scheduler.epoch,
            frozenset(state_key(s) for s in requests.values()),
            tuple(p.wanted.request for p in scheduler.queue.waiting()),
            tuple((n, r.attempt, r.held, len(r.tokens)) for n, r in scheduler.relays.items()),
            late,
            frozenset(scheduler.drops.items()),
            scheduler.log.fleet.sequence,
        )
