"""A decode rank's decisions: reserve, check what arrived, run one token a step, grow, finish.

Owns: which requests run, how far each is, and which growth is asked for.
Must not know: torch, sampling, text, the data plane, time.

Decode samples every token; its first step for a request runs the last prompt token.
A request's pages are its destination grant, then its growth grants, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import attrs

from engine.core import EngineCore
from engine.digests import Keyed
from engine.effects import (
    DecodeSlice,
    EngineEffect,
    Expose,
    Fence,
    Payload,
    Retire,
    Step,
    VerifyPages,
)
from engine.holdings import Job, proposal_key
from lifecycle.events import (
    Cause,
    Drained,
    Failed,
    Finished,
    Proof,
    Proposal,
    Purpose,
    Reserved,
    Verified,
)
from lifecycle.fleet import may_fence
from lifecycle.ids import GrantId, PageRange, Party, RequestId, TokenRange, count_pages
from lifecycle.state import LIVE, Grant, Phase, RequestState, Settlement
from lifecycle.wording import counted


@attrs.frozen
class Seat:
    """Where a request's tokens lie, by one state of its log: pages with their tags, and the room.

    States never change, so a seat holds for as long as its state is the request's.
    """

    state: RequestState
    room: int
    pages: tuple[PageRange, ...]
    tags: tuple[int, ...]


@attrs.define
class DecodeJob(Job):
    """One attempt: its destination grants, the tokens it gave, and the step that it is in.

    `given` counts this attempt's new tokens; `growing` is the growth that is proposed and not
    yet logged.
    """

    reserved: tuple[Reserved, ...] = ()
    exposed: tuple[GrantId, ...] = ()
    verifying: bool = False
    verified: Verified | None = None
    given: int = 0
    growing: Reserved | None = None
    finished: Finished | None = None
    seat: Seat | None = None


class DecodeCore(EngineCore[DecodeJob]):
    """One rank that checks what prefill wrote and decodes."""

    purpose = Purpose.DESTINATION

    def __init__(
        self,
        party: Party,
        *,
        pages: int,
        page_tokens: int,
        mint: Callable[[], int],
        batch: int,
        growth_tokens: int,
        digest: Keyed,
    ) -> None:
        """A step runs at most `batch` requests; growth begins with `growth_tokens` and doubles."""
        super().__init__(party, pages=pages, page_tokens=page_tokens, mint=mint, digest=digest)
        self.batch = batch
        self.growth_tokens = growth_tokens
        self.fencing: set[tuple[GrantId, Party]] = set()
        self.fenced: set[tuple[GrantId, Party]] = set()
        self.retired: set[GrantId] = set()
        self._turn = 0

    def copy(self, mint: Callable[[], int]) -> Self:
        """As the base class says."""
        other = super().copy(mint)
        other.fencing = set(self.fencing)
        other.fenced = set(self.fenced)
        other.retired = set(self.retired)
        return other

    # --- checking -----------------------------------------------------------------------------

    def verify_ended(
        self, request: RequestId, attempt: int, result: Verified | Failed
    ) -> list[EngineEffect]:
        """The headers and digests of what arrived were compared."""
        job = self.jobs.get(request)
        if job is not None and job.attempt == attempt:
            job.verifying = False
            if isinstance(result, Failed):
                self.fail(job, result)
            else:
                job.verified = result
        return self.advance_all(request)

    def fence_ended(self, grant: GrantId, party: Party) -> list[EngineEffect]:
        """The data plane proved that the party is shut out of the grant."""
        self.fencing.discard((grant, party))
        self.fenced.add((grant, party))
        return self.advance_all()

    # --- steps --------------------------------------------------------------------------------

    def can_step(self) -> bool:
        """Whether `plan_step` would plan something."""
        return any(self._runnable(job) for job in self.jobs.values())

    def plan_step(self) -> Step | None:
        """One token for as many decoding requests as fit a batch, in turn, or None."""
        ready = [job for job in self.jobs.values() if self._runnable(job)]
        if not ready:
            return None
        if len(ready) > self.batch:
            start = self._turn % len(ready)
            ready = (ready + ready)[start : start + self.batch]
            self._turn = start + self.batch
        self.steps_started += 1
        self.running = frozenset([job.request for job in ready])
        return Step(self.steps_started, tuple([self._slice(job) for job in ready]))

    def _runnable(self, job: DecodeJob) -> bool:
        state = self.log.state(job.request)
        return self._decodes(job, state) and self._position(job) < self._seat(job, state).room

    @staticmethod
    def _decodes(job: DecodeJob, state: RequestState) -> bool:
        """Whether this attempt gives tokens and is to give more."""
        running = state.phase is Phase.DECODING and state.attempt == job.attempt
        return running and not job.failed and job.finished is None

    def _position(self, job: DecodeJob) -> int:
        return len(job.payload.tokens) - 1 + job.given

    def _mine(self, state: RequestState) -> list[Grant]:
        grants = state.current(Purpose.DESTINATION) + state.current(Purpose.GROWTH)
        return [g for g in grants if g.id.owner == self.party]

    def _seat(self, job: DecodeJob, state: RequestState) -> Seat:
        """The request's pages on this rank, and how many tokens they hold."""
        seat = job.seat
        if seat is None or seat.state is not state:
            grants = [grant.reserved for grant in self._mine(state)]
            room = max((reserved.tokens.stop for reserved in grants), default=0)
            placed = [(run, reserved.tag) for reserved in grants for run in reserved.pages]
            pages, tags = tuple(run for run, _ in placed), tuple(tag for _, tag in placed)
            seat = job.seat = Seat(state, room, pages, tags)
        return seat

    def _slice(self, job: DecodeJob) -> DecodeSlice:
        seat = job.seat
        assert seat is not None, "what may run has been seated for that"
        return DecodeSlice(
            job.request, job.attempt, self._position(job), job.given, seat.pages, seat.tags
        )

    def step_ended(
        self,
        step: Step,
        *,
        failed: dict[RequestId, Failed] | None = None,
        finished: dict[RequestId, Finished] | None = None,
    ) -> list[EngineEffect]:
        """A pass has ended: one more token each, except for requests that failed in it.

        The shell sends the tokens before it performs these effects, so that `Finished` never
        overtakes a token that it counts.
        """
        self.steps_ended = step.number
        self.running = frozenset()
        failed, finished = failed or {}, finished or {}
        for part in step.slices:
            job = self.jobs.get(part.request)
            if job is None or job.attempt != part.attempt:
                continue
            why = failed.get(part.request)
            if why is not None:
                self.fail(job, why)
                continue
            job.given += 1
            job.finished = finished.get(part.request)
        names = [part.request for part in step.slices if self._asks(part.request)]
        return self.advance_all(*(names or self.waiting)) if names or self.waiting else []

    def _asks(self, request: RequestId) -> bool:
        """Whether a step may have changed what its request misses; most only count a token."""
        job, state = self.jobs.get(request), self.log.state(request)
        return job is None or not self._decodes(job, state) or self._near_end(job, state)

    def _near_end(self, job: DecodeJob, state: RequestState) -> bool:
        """Whether less than half a page of room is left."""
        return self._seat(job, state).room - self._position(job) <= self.page_tokens // 2

    # --- what a request needs -----------------------------------------------------------------

    def _begin(self, state: RequestState, payload: Payload) -> None:
        admitted = state.admitted
        if admitted is None or self.party not in admitted.decode.parties():
            return
        job = self.jobs.get(state.request)
        if job is not None and job.attempt == state.attempt:
            job.payload = payload
            return
        self.jobs[state.request] = DecodeJob(state.request, state.attempt, payload)

    def _advance(self, state: RequestState) -> None:
        self._settle(state)
        self._fence_lost(state)
        job = self.jobs.get(state.request)
        if job is None or not self.is_live(job) or state.admitted is None:
            self.waiting.pop(state.request, None)
            return
        if not self._same_prompt(state.admitted, job):
            return
        if not job.reserved:
            self._reserve(state, job)
        for reserved in job.reserved:
            if state.grant(reserved.grant) is None:
                self.propose(state, reserved)
            elif reserved.grant not in job.exposed:
                job.exposed = (*job.exposed, reserved.grant)
                self.effects.append(Expose(reserved))
        if state.phase is Phase.ADMITTED:
            self._check_arrived(state, job)
        elif job.finished is not None:
            self.propose(state, job.finished)
        else:
            self._grow(state, job)

    def _reserve(self, state: RequestState, job: DecodeJob) -> None:
        admitted = state.admitted
        assert admitted is not None
        pages = self.take(admitted.decode.pages_booked)
        if pages is None:
            self.waiting[state.request] = None
            return
        self.waiting.pop(state.request, None)
        covered = TokenRange(0, count_pages(pages) * self.page_tokens)
        writers = admitted.prefill.parties()
        job.reserved = tuple(
            self.hold(job, Purpose.DESTINATION, pages, covered, kind=kind, parties=writers)
            for kind in admitted.kinds[:1]
        )

    def _check_arrived(self, state: RequestState, job: DecodeJob) -> None:
        """Compare what arrived once every token is covered and every writer has drained."""
        if job.verified is not None:
            self.propose(state, job.verified)
            return
        grants = [g for g in state.current(Purpose.DESTINATION) if g.id.owner == self.party]
        if job.verifying or not grants or any(g.undrained for g in grants):
            return
        if len(grants) < len(job.reserved):
            return
        writes = tuple(
            (g.reserved, w.transfer.tokens, w.transfer.pages, w.transfer.digest)
            for g in grants
            for w in g.written
        )
        wanted = len(job.payload.tokens) - 1
        if sum(tokens.count for _, tokens, _, _ in writes) != wanted * len(grants):
            message = (
                f"every writer drained before all of {counted(wanted, 'prompt token')} was covered"
            )
            self.fail(job, Failed(Cause.TRANSFER_FAILED, message))
            return
        job.verifying = True
        self.effects.append(VerifyPages(state.request, state.attempt, writes))

    def _grow(self, state: RequestState, job: DecodeJob) -> None:
        """Ask for the next pages one page ahead of need; say so when none can be had."""
        if job.growing is not None:
            if state.grant(job.growing.grant) is None:
                self.propose(state, job.growing)
                return
            job.growing = None
        admitted = state.admitted
        if admitted is None or not self._near_end(job, state):
            return
        room = self._seat(job, state).room
        most = admitted.prompt_tokens + admitted.new_tokens_max
        if room >= most:
            return
        grown = room - admitted.prompt_tokens
        wanted = min(most - room, max(self.growth_tokens, grown))
        pages = -(-wanted // self.page_tokens)
        account = self.log.ledger.get(self.party)
        spare = min(account.free_pages, self.allocator.free) if account is not None else 0
        taken = None
        if spare > 0:
            last = self._mine(state)[-1].reserved.pages[-1].stop - 1
            taken = self.take(min(pages, spare), after=last)
        if taken is None:
            self.waiting[state.request] = None
            if room <= self._position(job) and not self._coming_home():
                self.propose(
                    state, Failed(Cause.OUT_OF_PAGES, f"{counted(pages, 'page')}, {spare} spare")
                )
            return
        self.waiting.pop(state.request, None)
        tokens = TokenRange(room, room + count_pages(taken) * self.page_tokens)
        kind = job.reserved[0].kind
        job.growing = self.hold(job, Purpose.GROWTH, taken, tokens, kind=kind)
        self.propose(state, job.growing)

    def _coming_home(self) -> bool:
        """Whether pages of ended attempts are on their way back, so that waiting is enough."""
        return any(
            grant.id.owner == self.party
            for state in self.log.requests.values()
            if state.phase not in LIVE
            for grant in state.unsettled
        )

    def touched(self, request: RequestId) -> bool:
        """Whether a step, or a comparison of what arrived, may touch this request's pages."""
        job = self.jobs.get(request)
        return request in self.running or (job is not None and job.verifying)

    def _dropped(self, proposal: Proposal, rule: str) -> None:
        body = proposal.body
        job = self.jobs.get(proposal.request)
        if isinstance(body, Reserved) and body.grant in self.holdings:
            # It was never logged, so nobody else ever heard of these pages.
            self._give_back(self.holdings[body.grant])
            if job is not None and job.growing is not None and job.growing.grant == body.grant:
                job.growing = None
                self.waiting[proposal.request] = None
            elif job is not None and job.attempt == proposal.attempt:
                self.fail(job, Failed(Cause.ENGINE_FAILED, f"a reservation broke {rule}"))
        elif isinstance(body, Failed) and body.cause is Cause.OUT_OF_PAGES:
            # Pages were on their way to it; if they go elsewhere, it says so again.
            self.refused.pop(proposal_key(proposal.request, proposal.attempt, body), None)

    def _orphaned(self, job: DecodeJob) -> None:
        job.failed = True

    # --- access -------------------------------------------------------------------------------

    def _fence_lost(self, state: RequestState) -> None:
        """Shut lost writers out of what they may still write, as far as the plane can."""
        for grant in state.grants:
            if grant.id.owner != self.party or grant.settlement is Settlement.RELEASED:
                continue
            if not grant.undrained:
                self._retire(grant)
            for party in grant.undrained:
                life = self.log.fleet.life(party.engine, party.incarnation)
                mine = self.log.fleet.life(self.party.engine, self.party.incarnation)
                if life is None or life.lost is None or not may_fence(mine):
                    continue
                if (grant.id, party) in self.fenced:
                    self.propose(state, Drained(grant.id, party, Proof.FENCED))
                elif (grant.id, party) not in self.fencing:
                    self.fencing.add((grant.id, party))
                    self.effects.append(Fence(grant.id, party))

    def _retire(self, grant: Grant) -> None:
        if grant.id not in self.retired:
            self.retired.add(grant.id)
            self.effects.append(Retire(grant.id))

    def _forget_log(self, request: RequestId) -> None:
        state = self.log.state(request)
        names = {g.id for g in state.grants}
        self.retired -= names
        self.fenced = {f for f in self.fenced if f[0] not in names}
        super()._forget_log(request)
