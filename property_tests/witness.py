"""A second opinion on everything that a guard may refuse, over the entries that were accepted.

Owns: claims about numbers, speakers, lives and pages, in plain sets and dictionaries.
Must not know: `lifecycle`'s states, guards, table and ledger; it reads events only.

`NaiveModel` holds the few claims that matter most; this one holds the rest, so that a log which a
reducer without some guard accepted is judged by somebody else.
"""

from __future__ import annotations

from collections import defaultdict

from lifecycle.events import (
    Aborted,
    Admitted,
    Attached,
    ByEngine,
    ByScheduler,
    Drained,
    Draining,
    Dropped,
    Entry,
    FenceScope,
    Finished,
    Lost,
    Proof,
    Purpose,
    QuarantineCause,
    Quarantined,
    Rejected,
    Released,
    Requeued,
    Reserved,
    Resumed,
    Role,
    Transferred,
    Verified,
)
from lifecycle.ids import FLEET, EngineId, GrantId, Party, RequestId
from property_tests.naive import NaiveModel

Life = tuple[EngineId, int]


def pages_of(reserved: Reserved) -> list[int]:
    """Every page of a grant, in its order."""
    return [page for run in reserved.pages for page in range(run.first, run.stop)]


def whole(tokens: int, size: int) -> int:
    """Pages that hold so many tokens."""
    return (tokens + size - 1) // size


class Witness(NaiveModel):
    """Takes accepted entries in and asserts every claim about each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.epoch = 0
        self.fleet_entries = 0
        self.attached: dict[Life, Attached] = {}
        self.newest: dict[EngineId, int] = {}
        self.lost: set[Life] = set()
        self.draining: set[Life] = set()
        self.first: dict[RequestId, Admitted] = {}
        self.now: dict[RequestId, Admitted] = {}
        self.number: dict[RequestId, int] = defaultdict(int)
        self.relayed: dict[RequestId, int] = defaultdict(int)
        self.of: dict[GrantId, tuple[RequestId, int]] = {}
        self.written: dict[GrantId, int] = defaultdict(int)
        self.promised: dict[Party, dict[RequestId, int]] = defaultdict(dict)
        self.serial: dict[Party, int] = defaultdict(int)
        self.isolated: set[GrantId] = set()
        self.back: set[GrantId] = set()

    def take(self, entry: Entry) -> None:
        """Assert that an accepted entry keeps every claim."""
        assert entry.time_ns >= self.time, "time runs back"
        self.time = entry.time_ns
        if entry.request != FLEET:
            self._speaker(entry)
            self._claims(entry)
        super().take(entry)
        self._remember(entry)

    # --- who ----------------------------------------------------------------------------------

    def _speaker(self, entry: Entry) -> None:
        event, by = entry.event, entry.proposer
        decided = isinstance(
            event, Admitted | Rejected | Aborted | Requeued | Quarantined | Dropped
        )
        assert decided == isinstance(by, ByScheduler), "said by the wrong one"
        if isinstance(by, ByScheduler):
            assert by.epoch == self.epoch, "an old epoch speaks"
            return
        party = by.party
        if not isinstance(event, Drained):
            life = self.attached.get((party.engine, party.incarnation))
            assert life is not None, "a stranger speaks"
            assert party.rank < life.ranks, "a stranger speaks"
            assert (party.engine, party.incarnation) not in self.lost, "a lost life speaks"
        if isinstance(event, Reserved | Transferred | Verified | Finished):
            assert entry.attempt == self.number[entry.request], "another attempt speaks"
        if isinstance(event, Verified | Finished):
            assert party in self.now[entry.request].decode.parties(), "not its decode"
        if isinstance(event, Reserved | Released):
            assert party == event.grant.owner, "not its owner"

    # --- what ---------------------------------------------------------------------------------

    def _claims(self, entry: Entry) -> None:
        request, event = entry.request, entry.event
        if isinstance(event, Admitted):
            self._admitted(entry, event)
        elif isinstance(event, Rejected):
            assert event.fleet_position == self.fleet_entries
        elif isinstance(event, Requeued):
            assert entry.attempt == self.number[request], "another attempt is requeued"
            assert entry.attempt < self.now[request].attempts_max, "no attempt is left"
            assert self.relayed[request] <= event.tokens_relayed
            assert event.tokens_relayed < self.first[request].new_tokens_max
        elif isinstance(event, Reserved):
            self._reserved(request, event)
        elif isinstance(event, Transferred):
            self._transferred(request, event)
        elif isinstance(event, Drained):
            self._drained(entry, event)
        elif isinstance(event, Verified):
            self._verified(request, event)
        elif isinstance(event, Finished):
            assert not event.reads_unchecked
            assert event.tokens <= self.now[request].new_tokens_max
            assert event.pages_read <= sum(
                len(pages_of(self.grants[g]))
                for g in self.attempt[request]
                if self.grants[g].purpose is not Purpose.SOURCE
            )
        elif isinstance(event, Released):
            assert self.of[event.grant][0] == request, "another request's grant"
            assert event.grant not in self.isolated, "unsafe pages come back"
            assert event.grant not in self.back, "given back twice"
            mine = self.of[event.grant] == (request, self.number[request])
            source = self.grants[event.grant].purpose is Purpose.SOURCE
            assert source or not (mine and request in self.live), "given back while it is read"
        elif isinstance(event, Quarantined):
            assert self.of[event.grant][0] == request, "another request's grant"
            owner = event.grant.owner
            gone = (owner.engine, owner.incarnation) in self.lost
            assert gone == (event.cause is QuarantineCause.OWNER_LOST)

    def _admitted(self, entry: Entry, event: Admitted) -> None:
        request = entry.request
        assert entry.attempt == self.number[request] + 1, "attempts count up"
        assert event.prompt_tokens + event.new_tokens_max <= event.context_tokens
        assert event.deadline_ns > entry.time_ns
        assert event.fleet_position == self.fleet_entries
        assert event.prefill.layout == event.decode.layout
        assert event.prefill.page_tokens == event.decode.page_tokens
        size = event.prefill.page_tokens
        source = whole(max(1, event.prompt_tokens - 1), size)
        total = whole(event.prompt_tokens + event.new_tokens_max, size)
        least = whole(event.prompt_tokens, size)
        assert (event.prefill.pages_needed, event.decode.pages_needed) == (source, total)
        assert event.prefill.pages_booked >= source
        assert event.decode.pages_booked >= least
        for leg, role in ((event.prefill, Role.PREFILL), (event.decode, Role.DECODE)):
            life = (leg.engine, leg.incarnation)
            joined = self.attached.get(life)
            assert joined is not None
            assert self.newest[leg.engine] == leg.incarnation
            assert life not in self.lost | self.draining
            assert (joined.role, joined.ranks) == (role, leg.ranks)
            assert (joined.layout, joined.page_tokens) == (leg.layout, leg.page_tokens)
            assert leg.pages_needed <= leg.pages_capacity
            assert leg.pages_booked <= leg.pages_free
            for party in leg.parties():
                assert len(self.promised[party]) < joined.slots, "no slot is left"
            assert leg.pages_capacity == min(self._usable(p) for p in leg.parties())
            assert leg.pages_free == min(self._free(p) for p in leg.parties())
        if request in self.first:
            first, relayed = self.first[request], self.relayed[request]
            assert event.prompt_tokens == first.prompt_tokens + relayed
            assert event.new_tokens_max == first.new_tokens_max - relayed

    def _usable(self, party: Party) -> int:
        away = [g for (p, _), g in self.holder.items() if p == party and g in self.over]
        return self.attached[(party.engine, party.incarnation)].pages - len(away)

    def _free(self, party: Party) -> int:
        held = sum(1 for p, _ in self.holder if p == party)
        pages = self.attached[(party.engine, party.incarnation)].pages
        return pages - held - sum(self.promised[party].values())

    def _reserved(self, request: RequestId, event: Reserved) -> None:
        now, owner = self.now[request], event.grant.owner
        leg = now.prefill if event.purpose is Purpose.SOURCE else now.decode
        assert owner in leg.parties(), "not on the leg"
        assert set(event.parties) <= set(now.prefill.parties()), "a stranger is let in"
        pages = pages_of(event)
        assert len(set(pages)) == len(pages), "a page twice in one grant"
        assert max(pages) < self.attached[(owner.engine, owner.incarnation)].pages
        assert event.grant.serial > self.serial[owner], "a serial comes again"
        assert event.tokens.count <= len(pages) * leg.page_tokens, "more tokens than pages"
        room = self._free(owner) + self.promised[owner].get(request, 0)
        assert len(pages) <= room, "more pages than were promised"
        same = [
            self.grants[g]
            for g in self.attempt[request]
            if (self.grants[g].grant.owner, self.grants[g].kind) == (owner, event.kind)
        ]
        if event.purpose is Purpose.GROWTH:
            assert request in self.readable, "grows unread"
            ends = [g.tokens.stop for g in same]
            assert ends
            assert event.tokens.start == max(ends), "growth leaves a gap"
            return
        last = now.prompt_tokens - (event.purpose is Purpose.SOURCE)
        assert event.tokens.start == 0
        assert event.tokens.stop >= max(1, last), "not for the whole prompt"
        assert event.kind in now.kinds
        assert not [g for g in same if g.purpose is event.purpose], "granted for the same again"

    def _transferred(self, request: RequestId, event: Transferred) -> None:
        assert self.of[event.grant] == (request, self.number[request]), "not this attempt's grant"
        assert event.grant not in self.over, "no longer held"
        now, size = self.now[request], self.now[request].decode.page_tokens
        start, stop = event.tokens.start, event.tokens.stop
        assert start < stop <= now.prompt_tokens - 1
        assert start % size == 0
        assert stop % size == 0 or stop == now.prompt_tokens - 1
        wanted = pages_of(self.grants[event.grant])[start // size : whole(stop, size)]
        assert [p for run in event.pages for p in range(run.first, run.stop)] == wanted
        assert 1 <= event.step <= event.steps_ended, "sent before it was computed"

    def _drained(self, entry: Entry, event: Drained) -> None:
        assert self.of[event.grant][0] == entry.request, "another request's grant"
        assert event.party in self.grants[event.grant].parties, "never let in"
        assert event.grant not in self.back, "drained after it was given back"
        assert isinstance(entry.proposer, ByEngine)
        owner = event.grant.owner
        if event.proof is Proof.FENCED:
            assert entry.proposer.party == owner
            joined = self.attached[(owner.engine, owner.incarnation)]
            assert joined.fence_scope is not FenceScope.NONE
        else:
            assert entry.proposer.party == event.party

    def _verified(self, request: RequestId, event: Verified) -> None:
        now = self.now[request]
        mine = [g for g in self.attempt[request] if self.grants[g].purpose is Purpose.DESTINATION]
        assert sorted(event.grants) == sorted(mine), "not every grant is verified"
        have = {(g.owner, self.grants[g].kind) for g in mine}
        assert have == {(p, kind) for p in now.decode.parties() for kind in now.kinds}
        let_in = {p for g in mine for p in self.grants[g].parties}
        assert set(now.prefill.parties()) <= let_in, "a writer was never let in"
        assert event.pages == sum(self.written[g] for g in mine)
        assert min(event.headers_checked, event.digests_checked) >= event.pages

    # --- afterwards ---------------------------------------------------------------------------

    def _remember(self, entry: Entry) -> None:
        request, event = entry.request, entry.event
        if isinstance(event, Resumed):
            assert event.epoch > self.epoch
            self.epoch = event.epoch
        elif isinstance(event, Attached):
            self.attached[(event.engine, event.incarnation)] = event
            self.newest[event.engine] = event.incarnation
        elif isinstance(event, Lost):
            self.lost.add((event.engine, event.incarnation))
        elif isinstance(event, Draining):
            self.draining.add((event.engine, event.incarnation))
        elif isinstance(event, Admitted):
            self.first.setdefault(request, event)
            self.now[request] = event
            self.number[request] = entry.attempt
            for leg in (event.prefill, event.decode):
                for party in leg.parties():
                    self.promised[party][request] = leg.pages_booked
        elif isinstance(event, Finished | Aborted | Requeued):
            if isinstance(event, Requeued):
                self.relayed[request] = event.tokens_relayed
            for promises in self.promised.values():
                promises.pop(request, None)
        elif isinstance(event, Reserved):
            owner, count = event.grant.owner, len(pages_of(event))
            self.of[event.grant] = (request, entry.attempt)
            self.serial[owner] = event.grant.serial
            if request in self.promised[owner]:
                left = self.promised[owner][request] - count
                self.promised[owner][request] = max(0, left)
        elif isinstance(event, Transferred):
            self.written[event.grant] += sum(run.count for run in event.pages)
        elif isinstance(event, Quarantined) and event.cause is QuarantineCause.ISOLATION:
            self.isolated.add(event.grant)
        elif isinstance(event, Released):
            self.back.add(event.grant)
        if request == FLEET:
            self.fleet_entries += 1
