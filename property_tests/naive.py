"""A second opinion on logs: sets and dictionaries, written without a look at the guards.

Owns: the few claims that matter most, over the entries that were accepted.
Must not know: `lifecycle`'s states, guards, table and ledger; it reads events only.
"""

from __future__ import annotations

from lifecycle.events import (
    Aborted,
    Admitted,
    ByEngine,
    Drained,
    Dropped,
    Entry,
    Finished,
    Lost,
    Quarantined,
    Recovered,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Transferred,
    Verified,
)
from lifecycle.ids import FLEET, GrantId, Party, RequestId


class NaiveModel:
    """Takes accepted entries in and asserts that none of them harms anybody."""

    def __init__(self) -> None:
        self.sequence: dict[RequestId, int] = {}
        self.holder: dict[tuple[Party, int], GrantId] = {}
        self.grants: dict[GrantId, Reserved] = {}
        self.over: set[GrantId] = set()
        self.drained: set[tuple[GrantId, Party]] = set()
        self.tokens: dict[tuple[GrantId, Party], set[int]] = {}
        self.recovered: set[GrantId] = set()
        self.attempt: dict[RequestId, list[GrantId]] = {}
        self.prompt: dict[RequestId, int] = {}
        self.readable: set[RequestId] = set()
        self.live: set[RequestId] = set()
        self.answered: set[RequestId] = set()
        self.rejected: set[RequestId] = set()

    def take(self, entry: Entry) -> None:
        """Assert that an accepted entry keeps every claim."""
        request, event = entry.request, entry.event
        assert entry.sequence == self.sequence.get(request, 0), "a gap"
        self.sequence[request] = entry.sequence + 1
        if request == FLEET:
            self._fleet(entry)
            return
        if entry.sequence == 0:
            assert isinstance(event, Admitted | Rejected), "the first event decides"
        else:
            assert not isinstance(event, Rejected), "decided twice"
        assert request not in self.rejected or isinstance(event, Dropped)
        self._ends(request, entry)
        self._pages(request, entry)

    def _fleet(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Recovered):
            self.recovered.add(event.grant)
        elif isinstance(event, Lost):
            gone = (event.engine, event.incarnation)
            for key in [k for k in self.holder if (k[0].engine, k[0].incarnation) == gone]:
                del self.holder[key]

    def _ends(self, request: RequestId, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Admitted):
            assert request not in self.live, "an attempt begins while one runs"
            assert request not in self.answered, "an attempt begins after the answer"
            unsettled = set(self.attempt.get(request, ())) - self.over
            assert not unsettled, "an attempt begins while the last one owns something"
            self.live.add(request)
            self.readable.discard(request)
            self.attempt[request] = []
            self.prompt[request] = event.prompt_tokens
        elif isinstance(event, Rejected):
            self.rejected.add(request)
        elif isinstance(event, Finished | Aborted):
            assert request not in self.answered, "answered twice"
            assert isinstance(event, Aborted) or request in self.readable, "answered unread"
            self.answered.add(request)
            self.live.discard(request)
            self.readable.discard(request)
        elif isinstance(event, Requeued):
            assert request in self.live
            self.live.discard(request)
            self.readable.discard(request)

    def _pages(self, request: RequestId, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Reserved):
            assert request in self.live, "granted after the end"
            assert event.grant not in self.grants, "granted twice"
            for run in event.pages:
                for page in range(run.first, run.stop):
                    key = (event.grant.owner, page)
                    assert key not in self.holder, "two holders"
                    self.holder[key] = event.grant
            self.grants[event.grant] = event
            self.attempt[request].append(event.grant)
        elif isinstance(event, Transferred):
            self._write(request, entry, event)
        elif isinstance(event, Drained):
            assert (event.grant, event.party) not in self.drained
            self.drained.add((event.grant, event.party))
        elif isinstance(event, Verified):
            self._read(request, event)
        elif isinstance(event, Quarantined):
            assert event.grant not in self.over, "settled twice"
            self.over.add(event.grant)
        elif isinstance(event, Released):
            assert self._quiet(event.grant), "given back while somebody may write"
            held = [key for key, grant in self.holder.items() if grant == event.grant]
            assert held, "given back without being held"
            for key in held:
                del self.holder[key]
            self.over.add(event.grant)

    def _quiet(self, grant: GrantId) -> bool:
        assert grant in self.grants, "a grant that nobody made"
        parties = self.grants[grant].parties
        return grant in self.recovered or all((grant, party) in self.drained for party in parties)

    def _write(self, request: RequestId, entry: Entry, event: Transferred) -> None:
        assert isinstance(entry.proposer, ByEngine)
        writer = entry.proposer.party
        assert request in self.live, "written after the end"
        assert writer in self.grants[event.grant].parties, "written by a stranger"
        assert (event.grant, writer) not in self.drained, "written after Drained"
        new = set(range(event.tokens.start, event.tokens.stop))
        for (grant, _), old in self.tokens.items():
            assert grant != event.grant or not old & new, "written twice"
        self.tokens.setdefault((event.grant, writer), set()).update(new)

    def _read(self, request: RequestId, event: Verified) -> None:
        assert request in self.live, "read after the end"
        for grant in event.grants:
            assert self._quiet(grant), "read while somebody may write"
            have = {t for (g, _), tokens in self.tokens.items() if g == grant for t in tokens}
            assert have == set(range(self.prompt[request] - 1)), "read what is not there"
        self.readable.add(request)
