"""What prefill and decode share: a copy of the log, a pool's free list, numbered proposals.

Owns: how an engine learns, proposes, repeats, and forgets on a new epoch.
Must not know: what its shell does; IO, time and torch.

The cores are level-triggered: after whatever was learnt, `_advance` compares a request's state
with what the engine has done for it and asks for what is missing.
So nothing depends on the order in which news arrive, and a resync is no special case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Generic, Self, TypeVar

from engine.allocator import PageAllocator
from engine.digests import Keyed
from engine.effects import EngineEffect, Forget, Payload, Propose, Step
from engine.holdings import OWED, Holding, Job, Key, proposal_key
from lifecycle.events import (
    Admitted,
    ByEngine,
    Cause,
    Drained,
    Entry,
    Failed,
    Proof,
    Proposable,
    Proposal,
    Purpose,
    Released,
    Reserved,
)
from lifecycle.history import History
from lifecycle.ids import FLEET, GrantId, PageRange, Party, RequestId, TokenRange
from lifecycle.phases import TABLE
from lifecycle.state import LIVE, Grant, Phase, RequestState, Settlement
from lifecycle.wording import counted

PROPOSALS_OUTSTANDING_MAX = 4096


class LogDivergedError(RuntimeError):
    """A published entry is illegal in this engine's copy: the copy or the scheduler is wrong."""

    def __init__(self, *, party: Party, position: int, rule: str, message: str) -> None:
        super().__init__(f"{party}: entry at position {position} breaks {rule}: {message}")
        self.party = party
        self.position = position
        self.rule = rule


JobT = TypeVar("JobT", bound=Job)


class EngineCore(Generic[JobT]):
    """One rank's decisions. Subclasses say what a request needs in `_advance`."""

    purpose: Purpose
    """What this engine's first grant of an attempt is for."""
    outstanding_max = PROPOSALS_OUTSTANDING_MAX
    """How many proposals wait for an answer; a failure, at most one a job, comes on top of them."""

    def __init__(
        self,
        party: Party,
        *,
        pages: int,
        page_tokens: int,
        mint: Callable[[], int],
        digest: Keyed,
    ) -> None:
        """Begin with an empty copy; `mint` draws grants' tags, `digest` digests a prompt."""
        self.party = party
        self.page_tokens = page_tokens
        self.epoch = 0
        self.position = 0
        self.log = History(crossguards=False)
        self.allocator = PageAllocator(pages)
        self.holdings: dict[GrantId, Holding] = {}
        self.jobs: dict[RequestId, JobT] = {}
        self.outstanding: dict[int, Proposal] = {}
        self.keys: set[Key] = set()
        self.accepted: dict[Key, int] = {}
        self.refused: dict[Key, int] = {}
        self.next_number = 1
        self.next_serial = 1
        self.steps_started = 0
        self.steps_ended = 0
        self.running: frozenset[RequestId] = frozenset()
        self.syncing = True
        self.effects: list[EngineEffect] = []
        self.waiting: dict[RequestId, None] = {}
        self._mint = mint
        self._digest = digest

    def copy(self, mint: Callable[[], int]) -> Self:
        """An independent copy that draws its tags elsewhere; values inside are shared."""
        other = copy.copy(self)
        other.log = self.log.copy()
        other.allocator = self.allocator.copy()
        other.holdings = dict(self.holdings)
        other.jobs = {name: copy.copy(job) for name, job in self.jobs.items()}
        other.outstanding = dict(self.outstanding)
        other.keys = set(self.keys)
        other.accepted = dict(self.accepted)
        other.refused = dict(self.refused)
        other.effects = list(self.effects)
        other.waiting = dict(self.waiting)
        other._mint = mint  # noqa: SLF001 - a copy of its own class
        return other

    # --- learning -----------------------------------------------------------------------------

    def begin_sync(self, epoch: int) -> None:
        """Obey a new epoch: forget the copy of the log and what was proposed, not the pool."""
        self.epoch = epoch
        self.position = 0
        self.log = History(crossguards=False)
        self.outstanding.clear()
        self.keys.clear()
        self.accepted.clear()
        self.refused.clear()
        self.syncing = True

    def end_sync(self) -> list[EngineEffect]:
        """Take back what the log does not know, and go on with everything that it knows."""
        self.syncing = False
        for job in tuple(self.jobs.values()):
            if self.log.state(job.request).phase is Phase.NEW:
                self._orphaned(job)
        return self.advance_all()

    def receive(
        self, position: int, entry: Entry, payload: Payload | None = None
    ) -> list[EngineEffect]:
        """Take in a published entry. Raises LogDivergedError when the copy says it is illegal."""
        if self._known(position, entry):
            return []
        self.position = max(self.position, position)
        self.accepted = {k: p for k, p in self.accepted.items() if p > position}
        if self._forgotten(entry):
            return []
        violation = self.log.apply(entry)
        if violation is not None:
            raise LogDivergedError(
                party=self.party,
                position=position,
                rule=violation.rule,
                message=violation.message,
            )
        if entry.request == FLEET:
            return self.advance_all()
        if payload is not None:
            self._begin(self.log.state(entry.request), payload)
        return self.advance_all(entry.request)

    def _known(self, position: int, entry: Entry) -> bool:
        """Whether the entry was taken in before; an engine that joins late gets old positions."""
        if entry.request == FLEET:
            return entry.sequence < self.log.fleet.sequence
        sequence = self.log.state(entry.request).sequence
        forgotten = sequence == 0 and entry.sequence > 0 and position <= self.position
        return entry.sequence < sequence or forgotten

    def answer(self, number: int, position: int, rule: str = "") -> list[EngineEffect]:
        """Take in the answer to a proposal; a dropped one means that the world has moved on."""
        full = self._full()
        proposal = self.outstanding.pop(number, None)
        if proposal is None:
            return []
        key = proposal_key(proposal.request, proposal.attempt, proposal.body)
        self.keys.discard(key)
        if position > self.position:
            self.accepted[key] = position
        elif position == 0:
            self.refused[key] = self.log.state(proposal.request).sequence
            self._dropped(proposal, rule)
        # Anybody's proposal may have had to wait for room among them.
        return self.advance_all() if full else self.advance_all(proposal.request)

    def inventory(self) -> tuple[tuple[GrantId, ...], int]:
        """Grants held, and the highest proposal number used."""
        return tuple(self.holdings), self.next_number - 1

    # --- acting -------------------------------------------------------------------------------

    def advance_all(self, *requests: RequestId) -> list[EngineEffect]:
        """Ask for what those requests miss, or else all; then those that wait for room."""
        if not self.syncing:
            names: Iterable[RequestId]
            if not requests:
                held = dict.fromkeys(h.request for h in self.holdings.values())
                names = [n for n in {**held, **self.jobs, **self.log.requests} if n != FLEET]
            else:
                names = [*requests, *self.waiting]
            for name in names:
                self._take_back(name)
                self._advance(self.log.state(name))
                self._close(name)
        effects, self.effects = self.effects, []
        return effects

    def retransmit(self) -> tuple[Proposal, ...]:
        """Everything that was proposed and not yet answered, in order."""
        return tuple(self.outstanding.values())

    def propose(self, state: RequestState, body: Proposable) -> bool:
        """Propose what this copy makes legal; False when it is not, or not yet, or not again."""
        key = proposal_key(state.request, state.attempt, body)
        if key in self.keys or key in self.accepted:
            return False
        if self.refused.get(key) == state.sequence:
            return False
        if not isinstance(body, Failed):
            if self._full():
                return False
            by = ByEngine(self.party, self.next_number)
            attempt = state.attempt
            entry = Entry(state.request, state.sequence, attempt, by, state.time_ns, body)
            violation = self.log.check(entry)
            if violation is not None and isinstance(body, OWED) and state.request in self.jobs:
                message = f"{type(body).__name__} breaks {violation.guard}: {violation.message}"
                self.fail(self.jobs[state.request], Failed(Cause.ENGINE_FAILED, message))
            if violation is not None:
                return False
        proposal = Proposal(self.party, self.next_number, state.request, state.attempt, body)
        self.outstanding[self.next_number] = proposal
        self.keys.add(key)
        self.next_number += 1
        self.effects.append(Propose(proposal))
        return True

    def _full(self) -> bool:
        return len(self.outstanding) >= self.outstanding_max

    def is_live(self, job: Job) -> bool:
        """Whether this job's attempt is running in the copy."""
        state = self.log.state(job.request)
        return state.phase in LIVE and state.attempt == job.attempt and not job.failed

    def fail(self, job: Job, failed: Failed) -> None:
        """Stop working for this attempt and say why."""
        state = self.log.state(job.request)
        if state.phase in LIVE and state.attempt == job.attempt:
            job.failed = True
            self.propose(state, failed)

    # --- pages --------------------------------------------------------------------------------

    def take(self, count: int, after: int | None = None) -> tuple[PageRange, ...] | None:
        """Take pages from the free list, behind page `after` if that can be."""
        if after is not None:
            adjacent = self.allocator.take_adjacent(after, count)
            if adjacent is not None:
                return (PageRange(*adjacent),)
        runs = self.allocator.take(count)
        return None if runs is None else tuple(PageRange(*run) for run in runs)

    def hold(
        self,
        job: Job,
        purpose: Purpose,
        pages: tuple[PageRange, ...],
        tokens: TokenRange,
        *,
        kind: str,
        parties: tuple[Party, ...] = (),
    ) -> Reserved:
        """Make a grant of pages that were taken; it owns nothing before it is logged."""
        grant = GrantId(self.party, self.next_serial)
        self.next_serial += 1
        reserved = Reserved(grant, purpose, pages, tokens, kind, self._mint(), parties)
        self.holdings[grant] = Holding(job.request, job.attempt, reserved)
        return reserved

    def held_for(self, request: RequestId) -> list[Holding]:
        """What this engine holds for a request, in the order of granting."""
        return [h for h in self.holdings.values() if h.request == request]

    def touched(self, request: RequestId) -> bool:
        """Whether a step or a copy in flight may touch this request's pages."""
        return request in self.running

    def _take_back(self, request: RequestId) -> None:
        """Return pages whose grant was never logged once its attempt is over, and released ones."""
        if self.touched(request):
            return
        state = self.log.state(request)
        for holding in self.held_for(request):
            grant = state.grant(holding.reserved.grant)
            over = state.attempt != holding.attempt or state.phase not in LIVE
            gone = grant is None and over
            if gone or (grant is not None and grant.settlement is Settlement.RELEASED):
                self._give_back(holding)

    def _give_back(self, holding: Holding) -> None:
        del self.holdings[holding.reserved.grant]
        self.allocator.give_back((r.first, r.count) for r in holding.reserved.pages)

    def _release(self, state: RequestState, grant: Grant) -> None:
        if grant.settlement is not Settlement.RELEASED and not self.touched(state.request):
            self.propose(state, Released(grant.id))

    def _settle(self, state: RequestState) -> None:
        """After the end of an attempt: drain as a writer, release as an owner, never post."""
        for grant in state.grants:
            running = grant.attempt == state.attempt and state.phase in LIVE
            if running or grant.settlement is Settlement.RELEASED:
                continue
            if self.party in grant.undrained and not self._writing(grant.id):
                self.propose(state, Drained(grant.id, self.party, Proof.ACKNOWLEDGED))
            if grant.id.owner == self.party:
                self._release(state, grant)

    def _close(self, request: RequestId) -> None:
        """Forget a request that can no longer concern this engine."""
        state = self.log.state(request)
        job = self.jobs.get(request)
        if job is not None and not self.touched(request):
            stale = state.attempt > job.attempt or state.phase not in LIVE
            if stale and not self._unsettled(state) and not self._busy(request):
                del self.jobs[request]
                self.waiting.pop(request, None)
                self.effects.append(Forget(request))
        if request in self.log.requests and request not in self.jobs:
            settled = not any(
                g.settlement is Settlement.QUARANTINED and self.party in (g.id.owner, *g.undrained)
                for g in state.grants
            )
            if state.phase is Phase.CLOSED and settled and not self.held_for(request):
                self._forget_log(request)

    def _forgotten(self, entry: Entry) -> bool:
        """Whether this copy closed and forgot the request: what comes after that changes nothing.

        Only late proofs about others' grants and `Dropped` can follow; anything else for an
        unknown request still shows that this copy lacks its beginning.
        """
        late = type(entry.event) in TABLE[Phase.CLOSED]
        return entry.sequence > 0 and late and entry.request not in self.log.requests

    def _unsettled(self, state: RequestState) -> bool:
        """Whether pages of the request are still on their way home; quarantine may last for ever."""
        grants = (state.grant(h.reserved.grant) for h in self.held_for(state.request))
        return any(g is None or g.settlement is not Settlement.QUARANTINED for g in grants)

    def _forget_log(self, request: RequestId) -> None:
        del self.log.requests[request]
        for key in [k for k in self.refused if k[0] == request]:
            del self.refused[key]

    def _same_prompt(self, admitted: Admitted, job: Job) -> bool:
        """Whether the payload is the prompt that was admitted; the attempt fails where it is not."""
        tokens = job.payload.tokens
        if job.digested is None or job.digested[0] is not tokens:
            job.digested = (tokens, self._digest(job.request, tokens))
        mine = (len(tokens), job.digested[1])
        if mine == (admitted.prompt_tokens, admitted.prompt_digest):
            return True
        message = (
            f"{counted(len(tokens), 'prompt token')} came with an admission of "
            f"{admitted.prompt_tokens}"
        )
        self.fail(job, Failed(Cause.PROMPT_MISMATCH, message))
        return False

    # --- what subclasses say ------------------------------------------------------------------

    def can_step(self) -> bool:
        """Whether a step could be planned now."""
        raise NotImplementedError

    def plan_step(self) -> Step | None:
        """Plan a step and count its requests as running, or None."""
        raise NotImplementedError

    def _begin(self, state: RequestState, payload: Payload) -> None:
        """An `Admitted` came with its payload."""
        raise NotImplementedError

    def _advance(self, state: RequestState) -> None:
        """Ask for whatever this request misses."""
        raise NotImplementedError

    def _dropped(self, proposal: Proposal, rule: str) -> None:
        """Undo what was done in expectation of this proposal."""

    def _orphaned(self, job: JobT) -> None:
        """The log does not know this job's request."""

    def _writing(self, _grant: GrantId) -> bool:
        """Whether a write of this engine into the grant may still land."""
        return False

    def _busy(self, _request: RequestId) -> bool:
        """Whether something in flight still belongs to the request."""
        return False
