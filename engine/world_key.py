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

from engine.world_checks import Checks
from engine.world_memory import Write, holder, numbers
from engine.world_names import Names, core_key, entry_key, message_key, state_key, step_key
from engine.world_values import Core
from lifecycle.ids import Party
from lifecycle.state import Phase

Key = tuple[object, ...]


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
            tuple(tuple(message_key(m, expected, names) for m in c[party]) for c in channels),
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
